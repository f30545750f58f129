"""Vocabularies of published encoders: the ids that their own tokenizer.json gives, in text of every script."""

import json
from pathlib import Path
from random import Random

import pytest
import tokenizers
from combined import thinned
from hard_text import code_points, hard_lines
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.families.encoder_text import adopted, lower_cased, wordpiece
from mlx_transformer.families.folder import tokenizer_config
from mlx_transformer.families.text import read_text_files, with_ends
from mlx_transformer.generation.heads import trimmed
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
LINES = hard_lines()
TEXT = [line for kind in ("names", "taken apart", "marks of Latin", "parts of Hangul") for line in LINES[kind][::5]]


def _bert(folder: Path, **settings) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(**settings)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=1500, special_tokens=BERT))
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return backend


def _roberta(folder: Path) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=1000, special_tokens=ROBERTA, initial_alphabet=alphabet)
    )
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return backend


def _xlm_roberta(folder: Path) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    spaces = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.train_from_iterator(
        TEXT, trainers.UnigramTrainer(vocab_size=5000, special_tokens=ROBERTA[:4], unk_token="<unk>")
    )
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    special = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=special
    )
    return backend


KINDS = {
    "bert": _bert,
    "bert, cased": lambda folder: _bert(folder, lowercase=False),
    "bert, accents kept": lambda folder: _bert(folder, strip_accents=False),
    "roberta": _roberta,
    "xlm-roberta": _xlm_roberta,
}


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    """The folder's own tokenizer, as published ones are cut and padded to 128, and ours of it."""
    folder = tmp_path_factory.mktemp("encoder")
    theirs = KINDS[request.param](folder)
    theirs.enable_truncation(128)
    theirs.enable_padding(length=128, pad_id=theirs.token_to_id("[PAD]") or theirs.token_to_id("<pad>") or 0)
    theirs.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    size, pad = theirs.get_vocab_size(), theirs.token_to_id("[PAD]" if request.param.startswith("bert") else "<pad>")
    config = TransformerConfig(architecture="encoder", decoder_layers=0, vocab_size=size, d_model=8, pad_id=pad)
    text, reason = read_text_files(folder, config, "bert")
    assert text is not None, reason
    theirs.no_truncation()
    theirs.no_padding()
    return theirs, Tokenizer(text), with_ends(config, text)


@pytest.mark.parametrize("kind", [kind for kind in LINES if kind != "control pieces"])
def test_ids_are_those_of_its_own_file(made, kind):
    theirs, ours, _ = made
    lines = LINES[kind][:1500:9]
    assert ours.encode_batch(lines) == [each.ids for each in theirs.encode_batch(lines)]


@pytest.mark.parametrize("kind", [kind for kind in LINES if kind != "control pieces"])
def test_places_of_tokens_are_those_of_its_own_file(made, kind):
    """But for spaces at their ends, which files of one family count to a word and others don't."""
    theirs, ours, _ = made
    lines = LINES[kind][:600:3]
    for line, each, judge in zip(lines, ours.encode_places(lines), theirs.encode_batch(lines), strict=True):
        assert each.ids == judge.ids
        assert (each.places[0], each.places[-1]) == (None, None)
        found = [trimmed(line, *place) for place in each.places if place is not None]
        assert found == [trimmed(line, *place) for place in judge.offsets[1:-1]]


def test_ids_of_code_points_that_a_normaliser_changes(made):
    theirs, ours, _ = made
    lines = code_points()[::30]
    assert ours.encode_batch(lines) == [each.ids for each in theirs.encode_batch(lines)]


def test_special_tokens_have_their_roles_and_typed_ones_are_text(made):
    theirs, ours, config = made
    ours.check_fits(config, "here")
    first, *_, last = theirs.encode("a").ids
    assert (config.bos_id, config.eos_id) == (ours.bos_id, ours.eos_id) == (first, last)
    spelled = theirs.id_to_token(last)
    assert ours.mask_token in ("[MASK]", "<mask>")
    assert theirs.token_to_id(ours.mask_token) == ours.mask_id
    if "[" in spelled:  # a piece of SentencePiece is what it is
        assert last not in ours.encode(f"a {spelled} b")[1:-1]


@pytest.mark.fast("bert-25", "roberta-25", "xlm-roberta-7")
@pytest.mark.parametrize("most", thinned([None, 6, 7, 12, 25], 2))
def test_pairs(made, most):
    theirs, ours, _ = made
    random = Random(0)
    drawn = [" ".join(random.choices(TEXT, k=random.randint(0, 8))) for _ in range(100)]
    pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
    theirs.enable_truncation(most) if most else theirs.no_truncation()
    expected = [(each.ids, each.type_ids) for each in theirs.encode_batch(pairs)]
    theirs.no_truncation()
    assert [tuple(pair) for pair in ours.encode_pairs(pairs, most)] == expected


def test_no_room_for_a_pair(made):
    _, ours, _ = made
    with pytest.raises(UserError, match=r"max_length=3: [34] tokens stand around two texts: give more"):
        ours.encode_pairs([("a", "b")], 3)


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"do_lower_case": False, "strip_accents": True}])
def test_a_vocab_txt_becomes_the_same(tmp_path, settings):
    lower = settings.get("do_lower_case", True)
    theirs = _bert(tmp_path, lowercase=lower, strip_accents=settings.get("strip_accents"))
    tokens = [token for token, _ in sorted(theirs.get_vocab().items(), key=lambda each: each[1])]
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    ours = Tokenizer(wordpiece(tmp_path, settings))
    for kind in ("names", "taken apart", "anything", "spaces"):
        assert ours.encode_batch(LINES[kind][:800]) == [each.ids for each in theirs.encode_batch(LINES[kind][:800])]


def test_lower_casing_is_the_tokenizers(tmp_path):
    """As sentence-transformers 6.2 has it: the final sigma is no other letter, and tokens keep their case."""
    theirs = _bert(tmp_path, lowercase=False)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(lower_cased(lower_cased(adopted(tmp_path, {}, fills=True))))
    theirs.normalizer = normalizers.Sequence([normalizers.Lowercase(), theirs.normalizer])
    lines = [
        "\u039f\u0394\u039f\u03a3 A [MASK] [mask]",
        "\u0130 STRASSE",
        *(line.upper() for line in LINES["names"][::9]),
    ]
    assert ours.encode_batch(lines) == [each.ids for each in theirs.encode_batch(lines)]
    assert ours.mask_id in ours.encode(lines[0])


@pytest.mark.parametrize("space", [False, True])
def test_the_space_before_a_text_is_told(tmp_path, space):
    """Fast tokenizers of transformers change a tokenizer.json to what tokenizer_config.json says, or doesn't say."""
    backend = _roberta(tmp_path)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    sizes = dict(vocab_size=backend.get_vocab_size(), d_model=8, pad_id=1)
    config = TransformerConfig(architecture="encoder", decoder_layers=0, **sizes)
    assert tokenizer_config(config, backend.to_str()).get("add_prefix_space", False) == space


def test_a_vocab_txt_without_its_special_tokens(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\na\n")
    with pytest.raises(UserError, match=r"vocab.txt: has no \[CLS\] and no \[SEP\]"):
        wordpiece(tmp_path, {})


def test_a_file_that_ends_no_text_is_refused(tmp_path):
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    config = TransformerConfig(architecture="encoder", decoder_layers=0, vocab_size=2, d_model=8, bos_id=1, eos_id=1)
    text, reason = read_text_files(tmp_path, config, "bert")
    assert text is None
    assert "must put a single token before and a single token after each text" in reason


def test_a_wordpiece_without_its_unknown_token():
    specification = {"model": {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"a": 0}}}
    with pytest.raises(UserError, match="is not in its vocabulary"):
        Tokenizer(json.dumps(specification))
