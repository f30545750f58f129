"""A `tokenizer.json` made of a SentencePiece model gives SentencePiece's own ids; the package is the judge."""

from __future__ import annotations

import dataclasses
import io
import json
import unicodedata
from random import Random

import pytest
import sentencepiece
import tokenizers
from combined import SLOW
from hard_text import code_points, hard_lines, names

from mlx_transformer.data.training_text import BpeDropout
from mlx_transformer.generation.heads import trimmed
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.sentencepiece import BPE, Piece, SentencePiece, parse_sentencepiece, sentencepiece_bytes
from mlx_transformer.text.sentencepiece_tokenizer import tokenizer_json
from mlx_transformer.text.tokenizer import Tokenizer

KINDS = {
    "unigram": ("nmt_nfkc", "unigram", {}),
    "unigram, bytes": ("nfkc", "unigram", {"byte_fallback": True}),
    "BPE": ("nmt_nfkc_cf", "bpe", {}),
    "BPE, as it is": ("identity", "bpe", {"byte_fallback": True}),
}
ALIKE = ["unigram, bytes", "BPE"]  # what it has, two others have between them


def trained(rule: str, kind: str, **options) -> bytes:
    """A model of 3,000 pieces, with Marian's ids."""
    file = io.BytesIO()
    settings = dict(normalization_rule_name=rule, model_type=kind, vocab_size=3000, character_coverage=1.0)
    ids = dict(eos_id=0, unk_id=1, bos_id=-1)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(names()), model_writer=file, minloglevel=2, **settings, **ids, **options
    )
    return file.getvalue()


def with_every_letter(model: SentencePiece) -> SentencePiece:
    """The same with a piece for each character of two planes, so that the ids show what the normaliser does."""
    random, known = Random(0), {piece.text for piece in model.pieces}
    low = min(piece.score for piece in model.pieces)
    letters = [chr(c) for c in range(0x21, 0x20000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    new = [letter for letter in letters if letter not in known]
    scores = [low - 1 - i if model.model_type == BPE else float(random.randint(-16, -8)) for i in range(len(new))]
    return dataclasses.replace(model, pieces=(*model.pieces, *map(Piece, new, scores)))


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=SLOW if kind in ALIKE else []) for kind in KINDS])
def model(request) -> SentencePiece:
    rule, kind, options = KINDS[request.param]
    model = parse_sentencepiece(trained(rule, kind, **options))
    return model if options else with_every_letter(model)


@pytest.fixture(scope="module")
def judge(model: SentencePiece) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_bytes(model))


@pytest.fixture(scope="module")
def tokenizer(model: SentencePiece) -> Tokenizer:
    return Tokenizer(tokenizer_json(model, ["<pad>"]))


@pytest.fixture(scope="module")
def small(model: SentencePiece) -> Tokenizer:
    """Of the pieces that were learned alone: a twentieth of the file."""
    return Tokenizer(tokenizer_json(dataclasses.replace(model, pieces=model.pieces[:3000]), ["<pad>"]))


def differing(tokenizer: Tokenizer, judge: sentencepiece.SentencePieceProcessor, lines: list[str]) -> list[str]:
    ours, theirs = tokenizer.encode_batch(lines), judge.encode(lines)
    return [line for line, a, b in zip(lines, ours, theirs, strict=True) if a != [*b, tokenizer.eos_id]]


@pytest.mark.parametrize("kind", [kind for kind in hard_lines() if kind != "spaces"])
def test_places_of_tokens(tokenizer, judge, model, kind):
    """But for spaces, whose place is none's; of a character that becomes several tokens SentencePiece gives it to the
    last, and bytes may have the place of all the bytes around them."""
    lines = hard_lines()[kind][:400:5]
    compared = 0
    for line, each in zip(lines, tokenizer.encode_places(lines), strict=True):
        theirs = judge.encode(line, return_type="offset_mapping")
        assert each.ids == [*theirs["ids"], tokenizer.eos_id]
        assert each.places[-1] is None
        for place, other in zip(each.places, theirs["offsets"], strict=False):
            assert place is not None
            ours, expected = trimmed(line, *place), trimmed(line, *other)
            if expected[0] < expected[1]:
                assert (
                    ours == expected
                    if not model.byte_fallback
                    else max(ours[0], expected[0]) < min(ours[1], expected[1])
                )
                compared += 1
    assert compared or kind == "nothing"


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=SLOW)])
def test_every_code_point(tokenizer, judge, step):
    assert differing(tokenizer, judge, code_points()[::step]) == []


@pytest.mark.fast("BPE, as it is")
def test_hard_text_of_twenty_scripts(tokenizer, judge):
    hard = {kind: lines[::3] for kind, lines in hard_lines().items()}
    assert {kind: different for kind, lines in hard.items() if (different := differing(tokenizer, judge, lines))} == {}


@pytest.mark.slow
def test_a_hundred_thousand_lines(tokenizer, judge):
    """Of several words each, in 30 languages and 20 scripts, often two in a line, some taken apart."""
    random, words = Random(1), names()
    lines = [
        random.choice([" ", " ", " ", "  ", "-", "", ", "]).join(random.choices(words, k=random.randint(1, 9)))
        for _ in range(70_000)
    ]
    lines += [unicodedata.normalize(random.choice(["NFD", "NFKD", "NFKC"]), line) for line in lines[:20_000]]
    for seed in range(1, 6):
        lines += [line for drawn in hard_lines(seed).values() for line in drawn[:400]]
    assert len(lines) >= 100_000
    assert differing(tokenizer, judge, lines) == []


def test_text_comes_back_as_theirs(model, tokenizer, judge):
    """But for what no piece has: SentencePiece writes two question marks, we nothing."""
    pieces = [id for id in range(len(model.pieces)) if model.pieces[id].type == 1]
    rows = [Random(i).sample(pieces, 9) for i in range(500)]
    assert tokenizer.decode_batch(rows) == judge.decode(rows)
    assert tokenizer.decode([*rows[0], tokenizer.unk_id, tokenizer.eos_id, tokenizer.pad_id]) == judge.decode(rows[0])


def test_ids_are_the_models(model, tokenizer, small):
    assert (tokenizer.eos_id, tokenizer.unk_id) == (0, 1)
    assert tokenizer.pad_id == tokenizer.bos_id == len(model.pieces)
    assert tokenizer.special_ids == {0, 1, len(model.pieces)}
    assert [tokenizer.token(id) for id in range(len(model.pieces))] == [piece.text for piece in model.pieces]
    assert Tokenizer(small.to_json()).fingerprint == small.fingerprint


def test_words_are_what_spaces_separate(tokenizer):
    assert tokenizer.encode("Aland Islands") != tokenizer.encode("Aland")
    (words,) = tokenizer.encode_words(["Aland Islands"])
    assert words == sorted(words)
    assert len({*words}) == 3  # and </s>


def test_merges_of_bytes_are_asked_for(tokenizer):
    with pytest.raises(UserError, match=r"bpe_dropout: this vocabulary is SentencePiece's"):
        BpeDropout(tokenizer, 0.1)


@pytest.mark.fast("unigram")
def test_what_other_programs_make_of_the_file(model, tokenizer, judge):
    """Alone the components give the same ids for text whose letters are whole, and without control pieces."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    lines = [*names(), "one  two ", "x\u3000y"]
    assert [encoding.ids[:-1] for encoding in backend.encode_batch(lines)] == judge.encode(lines)


def test_pieces_that_stay_whole_and_unused_ones():
    model = parse_sentencepiece(trained("nmt_nfkc", "unigram", user_defined_symbols=["<fix>"]))
    unused = dataclasses.replace(model.pieces[40], type=5)
    model = dataclasses.replace(model, pieces=(*model.pieces[:40], unused, *model.pieces[41:]))
    judge = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_bytes(model))
    tokenizer = Tokenizer(tokenizer_json(model, ["<pad>"]))
    lines = [*names(30, 30), "Island<fix>s fix", "<fix>", "a <fix> b"]
    assert differing(tokenizer, judge, lines) == []
    assert any(unused.text in line for line in lines)


@pytest.mark.parametrize("missing", ["</s>", "<pad>", "<unk>"])
def test_a_file_without_a_role_is_refused(small, missing):
    specification = json.loads(small.to_json().replace(missing, "<other>"))
    with pytest.raises(UserError, match=f"has no {missing}( and no <s>)?; import"):
        Tokenizer(json.dumps(specification))
