"""Marian's folders of `transformers`, two SentencePiece models and one vocabulary, or two: text has the ids that are
looked up there; SentencePiece's own package cuts it for the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from published_folders import joint_vocabulary, left_behind, marian_config
from published_text import judge_of, lines, looked_up, text_pieces, trained, two_languages, write_model

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

WITH_CODES = [">>deu<< one", ">>fra<<two", ">>fra<<", ">>eng<< three", "a >>deu<< b", ">>deu<<>>fra<< x", ">> <", ">>x"]


@pytest.fixture(scope="module")
def sides() -> tuple[bytes, bytes]:
    source, target = two_languages()
    return trained(source), trained(target)


def marian_ids(model: bytes, vocabulary: dict[str, int], line: str) -> list[int]:
    """What `transformers` does: a language is cut off, pieces are looked up by their text, as is what the model doesn't
    know."""
    code, end = [], line.find("<<")
    if line.startswith(">>") and end != -1:
        code, line = [line[: end + 2]], line[end + 2 :]
    return looked_up([*code, *judge_of(model).encode(line, out_type=str)], vocabulary)


@pytest.fixture(scope="module")
def marian(sides, tmp_path_factory) -> tuple[Path, dict[str, int]]:
    vocabulary = joint_vocabulary(*sides)
    files = dict(source__spm=sides[0], target__spm=sides[1], vocab__json=vocabulary)
    folder = tmp_path_factory.mktemp("marian")
    write_model(folder / "theirs", marian_config(vocabulary), **files)
    notes = import_huggingface(folder / "theirs", folder / "ours")
    assert "translates into 2 languages: name one, or begin each text with one of >>deu<<, >>fra<<" in notes
    assert left_behind(notes) == []
    return folder / "ours", vocabulary


def test_marian_cuts_by_the_source_and_counts_by_the_vocabulary(marian, sides):
    tokenizer, vocabulary = Tokenizer.load(marian[0]), marian[1]
    texts = [*lines(), *WITH_CODES]
    expected = [marian_ids(sides[0], vocabulary, line) for line in texts]
    assert tokenizer.source.encode_batch(texts) == expected
    assert not tokenizer.separate
    flat = {id for row in expected for id in row}
    foreign = {vocabulary[piece] for piece in text_pieces(sides[1])} - {
        vocabulary.get(piece) for piece in text_pieces(sides[0])
    }
    assert flat & foreign  # what the source's model doesn't know, the target's does
    assert max(flat) < tokenizer.vocab_size == len(vocabulary)
    words = tokenizer.source.encode_words(texts)
    assert [len(row) for row in words] == [len(row) for row in expected]
    assert all(row == sorted(row) for row in words)


def test_marian_cuts_a_target_by_the_targets_model(marian, sides):
    tokenizer, vocabulary, judge = Tokenizer.load(marian[0]), marian[1], judge_of(sides[1])
    texts = lines()
    expected = [looked_up(judge.encode(line, out_type=str), vocabulary) for line in texts]
    assert tokenizer.encode_batch(texts) == expected != tokenizer.source.encode_batch(texts)
    again = Tokenizer(tokenizer.to_json())
    assert again.fingerprint == tokenizer.fingerprint != tokenizer.source.fingerprint
    assert again.encode_batch(texts[:99]) == expected[:99]


def test_marian_joins_pieces_of_the_target(marian, sides):
    tokenizer, vocabulary = Tokenizer.load(marian[0]), marian[1]
    judge = judge_of(sides[1])
    for line in two_languages()[1][::7]:
        pieces = judge.encode(line, out_type=str)
        ids = [vocabulary[piece] for piece in pieces if piece in vocabulary]
        assert tokenizer.decode([*ids, 0]) == judge.decode([p for p in pieces if p in vocabulary])
    assert tokenizer.decode([vocabulary["<unk>"], vocabulary["<pad>"], 0]) == ""


def test_marians_file_in_other_programs(marian, sides):
    """Alone the components have no piece without an id, nor what the target's model knows beyond the source's."""
    backend = tokenizers.Tokenizer.from_str(Tokenizer.load(marian[0]).to_json())
    known = set(text_pieces(sides[0])) & set(marian[1])
    own = [line for line in two_languages()[0] if set(judge_of(sides[0]).encode(line, out_type=str)) <= known]
    own = [line for line in own if line.isascii()]
    assert len(own) > 50
    texts = [*own, *(f">>deu<< {line}" for line in own)]
    assert [e.ids for e in backend.encode_batch(texts)] == [marian_ids(sides[0], marian[1], line) for line in texts]


def test_marian_translates_text(marian):
    model = Transformer.load(marian[0])
    (text,) = model.translate([">>deu<< Germany"], max_new_tokens=5)
    assert isinstance(text, str)


UNTOLD = "target_language: the model has 2 languages .deu, fra, ..... and its folder has no default: name one, or "


@pytest.mark.fast("onnx", "mlx")
@pytest.mark.parametrize("kind", ["mlx", "onnx", "search"])
def test_a_text_of_several_languages_names_its_own_or_the_caller_does(kind, marian, tmp_path):
    """By a row, so that no line is translated into a guessed language."""
    if kind == "mlx":
        model: Any = Transformer.load(marian[0])
    elif kind == "onnx":
        model = OnnxTransformer(export_onnx(marian[0], tmp_path / "onnx"), threads=1)
    else:
        pytest.importorskip("onnxruntime_extensions", reason="pip install -e '.[text]'")
        model = SearchModel(export_search(marian[0], tmp_path / "search.onnx", text=True), threads=1)
    options = dict(max_new_tokens=5)
    typed = model.translate([">>deu<< Germany", ">>fra<< Germany"], **options)
    assert typed == [model.translate("Germany", target_language=code, **options) for code in ("deu", "fra")]
    for text in ("Germany", ["Germany"], [">>deu<< Germany", "France"], [" >>deu<< Germany"], [">>eng<< Germany"]):
        with pytest.raises(UserError, match=UNTOLD):
            model.translate(text, **options)
    mixed = [">>deu<< Germany", "Germany"]
    if kind == "search":
        with pytest.raises(UserError, match="line 1: names its language, and target_language is given too"):
            model.translate(mixed, target_language="fra", **options)
    else:
        assert model.translate(mixed, target_language="fra", **options) == typed
        ids = model.tokenizer.source.encode_batch(["Germany"])
        with pytest.raises(UserError, match="target_language: the model has 2 languages"):
            model.generate(ids, **options)
        assert model.generate(model.tokenizer.source.encode_batch([">>deu<< Germany"]), **options)


def test_marians_text_goes_along(marian, tmp_path):
    """To a folder of graphs, whose runner translates as MLX, and to a folder for `transformers` and back."""
    texts = [">>deu<< Germany", "France", "Ελλάδα"]
    options = dict(max_new_tokens=6, suppressed=(), target_language="fra")
    export_onnx(marian[0], tmp_path / "onnx")
    model, runner = Transformer.load(marian[0]), OnnxTransformer(tmp_path / "onnx", threads=1)
    assert model.translate(texts, **options) == runner.translate(texts, **options)
    to_huggingface(marian[0], tmp_path / "theirs")
    assert left_behind(import_huggingface(tmp_path / "theirs", tmp_path / "back")) == []
    assert Tokenizer.load(tmp_path / "back").fingerprint == Tokenizer.load(marian[0]).fingerprint


def test_marian_with_two_vocabularies_and_one_table_works_on_ids(sides, tmp_path):
    vocabulary = joint_vocabulary(*sides)
    files = dict(source__spm=sides[0], target__spm=sides[1], vocab__json=vocabulary, target_vocab__json=vocabulary)
    settings = {"separate_vocabs": True}
    write_model(tmp_path / "theirs", marian_config(vocabulary), **files, tokenizer_config__json=settings)
    (note,) = import_huggingface(tmp_path / "theirs", tmp_path / "ours")
    assert "shares an embedding between the languages" in note


def test_marian_with_a_vocabulary_for_each_language(sides, tmp_path):
    first, second = ({t: i for i, t in enumerate(["</s>", "<unk>", *text_pieces(side)])} for side in sides)
    size = max(len(first), len(second)) + 1
    for each in (first, second):
        each |= {f"<filler {i}>": i for i in range(len(each), size - 1)} | {"<pad>": size - 1}
    separate = dict(share_encoder_decoder_embeddings=False, decoder_vocab_size=len(second))
    files = dict(source__spm=sides[0], target__spm=sides[1], vocab__json=first, target_vocab__json=second)
    write_model(tmp_path / "theirs", marian_config(first, **separate), **files)
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": True}))
    assert left_behind(import_huggingface(tmp_path / "theirs", tmp_path / "ours")) == []
    tokenizer = Tokenizer.load(tmp_path / "ours")
    texts = lines()[::5]
    assert tokenizer.separate
    assert tokenizer.source.encode_batch(texts) == [marian_ids(sides[0], first, line) for line in texts]
    judge = judge_of(sides[1])
    assert tokenizer.encode_batch(texts) == [looked_up(judge.encode(line, out_type=str), second) for line in texts]
    to_huggingface(tmp_path / "ours", tmp_path / "again")
    assert not (tmp_path / "again" / "tokenizer.json").exists()
    import_huggingface(tmp_path / "again", tmp_path / "back")
    assert Tokenizer.load(tmp_path / "back").fingerprint == tokenizer.fingerprint


def without_unknown(vocabulary: dict) -> dict:
    return {token: id for token, id in vocabulary.items() if token != "<unk>"}


DAMAGE = {
    "has ids beyond the model's": lambda v: {**v, "x": 10**12},
    "the vocabulary has no </s>": lambda v: {t: i for t, i in v.items() if t != "</s>"},
    "two tokens with the same id": lambda v: {**v, "x": 7},
    "the vocabulary has no <unk>": without_unknown,
    "pad_id is 3 in the tokenizer": lambda v: {**v, "<pad>": 3, next(t for t, i in v.items() if i == 3): v["<pad>"]},
    "damaged, or not JSON": lambda v: "{",
    "expected a JSON object": lambda v: [1],
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_vocabulary_that_is_none_stays_behind_with_a_note(reason, sides, tmp_path):
    vocabulary = joint_vocabulary(*sides)
    files = dict(source__spm=sides[0], target__spm=sides[1], vocab__json=DAMAGE[reason](vocabulary))
    write_model(tmp_path / "theirs", marian_config(vocabulary), **files)
    (note,) = import_huggingface(tmp_path / "theirs", tmp_path / "ours")
    assert note.startswith("no tokenizer (")
    assert reason in note
    assert not (tmp_path / "ours" / "tokenizer.json").exists()


def test_a_damaged_model_stays_behind_with_a_note(sides, tmp_path):
    vocabulary = joint_vocabulary(*sides)
    files = dict(source__spm=sides[0][:-50], target__spm=sides[1], vocab__json=vocabulary)
    write_model(tmp_path / "theirs", marian_config(vocabulary), **files)
    (note,) = import_huggingface(tmp_path / "theirs", tmp_path / "ours")
    assert "source.spm: damaged" in note


WRONG_ROLES = {
    "the ids of pad and bos": [{"pad": 10**6}, {"bos": -1}, {"pad": "0"}, {"bos": None}],
    "the target's pieces don't fit its vocabulary": [{"target": json.loads(Tokenizer.train(["a"], 300).to_json())}],
    "its pieces without an id": [
        {"missing": 3},
        {"missing": [["a"]]},
        {"missing": [[1, 2.0]]},
        {"missing": [["a", 1]]},
    ],
}


@pytest.mark.parametrize("reason", WRONG_ROLES)
def test_a_file_that_says_nonsense_is_refused(reason, marian):
    specification = json.loads(Tokenizer.load(marian[0]).to_json())
    for change in WRONG_ROLES[reason]:
        template = {**specification["post_processor"]}
        template["mlx_transformer"] = {**template["mlx_transformer"], **change}
        with pytest.raises(UserError, match=reason):
            Tokenizer(json.dumps({**specification, "post_processor": template}))
