"""A vocabulary for each language: one object, one text, two plain files, and never one of them for the whole."""

from __future__ import annotations

import pytest
import tokenizers

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer_files import (
    JOINT,
    NAMES,
    SIDES,
    join_texts,
    side_texts,
    tokenizer_files,
    tokenizer_path,
)
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

SOURCE = Tokenizer.train(["alpha beta gamma"] * 9, 268)
TARGET = Tokenizer.train(["УНО ДОС ТРЕС"] * 9, 275)
PAIR = Tokenizer.pair(SOURCE, TARGET)
SIZES = dict(d_model=16, heads=1, d_ff=16, encoder_layers=1, decoder_layers=1)


def write(folder, tokenizer):
    for name, text in tokenizer_files(tokenizer.to_json()).items():
        (folder / name).write_text(text, encoding="utf-8")


def config(**changes):
    sizes = {**SIZES, "vocab_size": 275, "source_vocab_size": 268, "tie_embeddings": "target-output"}
    return TransformerConfig(**{**sizes, **changes})


def test_each_side_is_what_it_was(tmp_path):
    assert SOURCE.vocab_size != TARGET.vocab_size
    write(tmp_path, PAIR)
    assert {path.name for path in tmp_path.iterdir()} == set(SIDES.values())
    for found in (PAIR, Tokenizer(PAIR.to_json()), Tokenizer.load(tmp_path)):
        assert found.separate
        assert (found.source.fingerprint, found.vocab_size) == (SOURCE.fingerprint, TARGET.vocab_size)
        assert found.source.encode("alpha gamma") == SOURCE.encode("alpha gamma")
        assert found.encode("УНО") == TARGET.encode("УНО") != found.source.encode("УНО")
        assert found.decode(TARGET.encode("ДОС ТРЕС")) == "ДОС ТРЕС"
        assert found.to_json() == PAIR.to_json()
        assert found.fingerprint == PAIR.fingerprint
    assert len({PAIR.fingerprint, TARGET.fingerprint, Tokenizer.pair(TARGET, SOURCE).fingerprint}) == 3
    for side, expected in (("source", SOURCE), ("target", TARGET)):
        plain = tokenizers.Tokenizer.from_file(str(tmp_path / SIDES[side]))  # as any other program reads it
        assert plain.encode("alpha УНО").ids == expected.encode("alpha УНО")


def test_a_joint_vocabulary_is_its_own_source(tmp_path):
    assert SOURCE.source is SOURCE
    assert not SOURCE.separate
    assert side_texts(SOURCE.to_json()) is None
    assert tokenizer_path(tmp_path) is None
    write(tmp_path, SOURCE)
    assert tokenizer_path(tmp_path) == tmp_path / JOINT
    assert Tokenizer.load(tmp_path).fingerprint == SOURCE.fingerprint


@pytest.mark.parametrize("missing", [*SIDES.values(), None])
def test_part_of_a_pair_is_no_vocabulary(missing, tmp_path):
    write(tmp_path, PAIR)
    if missing is None:
        write(tmp_path, TARGET)
    else:
        (tmp_path / missing).unlink()
    with pytest.raises(UserError, match=r"holds either tokenizer\.json or source_tokenizer\.json and target"):
        Tokenizer.load(tmp_path)


def test_damage_is_named_by_its_file(tmp_path):
    write(tmp_path, PAIR)
    (tmp_path / NAMES[1]).write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"source_tokenizer\.json: not JSON"):
        Tokenizer.load(tmp_path)
    nested = join_texts(PAIR.to_json(), TARGET.to_json())
    with pytest.raises(UserError, match=r'x: source: not a tokenizer\.json \("model" is missing\)'):
        Tokenizer(nested, "x")


def test_what_model_it_fits():
    PAIR.check_fits(config(), "here")
    for changes, said in (
        ({"source_vocab_size": 267}, "here: source tokenizer of 268 tokens, but the model has 267"),
        ({"vocab_size": 274}, "here: tokenizer of 275 tokens, but the model has 274"),
        ({"source_vocab_size": 275, "tie_embeddings": "all"}, "here: tie_embeddings='all' shares an embedding"),
        (
            {"architecture": "decoder", "encoder_layers": 0, "source_vocab_size": 275},
            "here: architecture='decoder' has one vocabulary, but its tokenizer has two",
        ),
    ):
        with pytest.raises(UserError, match=said):
            PAIR.check_fits(config(**changes), "here")
