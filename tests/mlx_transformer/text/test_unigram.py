"""A vocabulary of pieces that is learned here: one model whatever the order of its text, and SentencePiece's file."""

from __future__ import annotations

import json

import pytest

from mlx_transformer.data import built_in
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.sentencepiece import parse_sentencepiece, sentencepiece_bytes
from mlx_transformer.text.sentencepiece_tokenizer import sentencepiece_of, tokenizer_json
from mlx_transformer.text.tokenizer import Tokenizer
from mlx_transformer.text.unigram import train_unigram


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Some 640 phrases without rare names, whose letters occur too seldom for long pieces."""
    text = built_in.build("cldr:en-de", train_pairs=1000).train
    text = text.select([i for i, kind in enumerate(text.kinds or []) if kind not in ("territory", "language")])
    return [*text.source, *text.target]


@pytest.fixture(scope="module")
def tokenizer(lines: list[str]) -> Tokenizer:
    return train_unigram(lines, 400)


def test_the_ids_are_those_that_marian_has(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token(id) for id in (0, 1, 399)] == ["</s>", "<unk>", "<pad>"]
    ids = (tokenizer.eos_id, tokenizer.unk_id, tokenizer.pad_id, tokenizer.bos_id)
    assert (tokenizer.vocab_size, *ids) == (400, 0, 1, 399, 399)


def test_text_of_known_characters_comes_back_without_needless_spaces(tokenizer: Tokenizer, lines: list[str]) -> None:
    ids = tokenizer.encode_batch(lines)
    assert tokenizer.decode_batch(ids) == [" ".join(line.split(" ")) for line in lines]
    assert all(row[-1] == 0 and 1 not in row for row in ids)
    assert sum(map(len, ids)) < 0.6 * sum(map(len, lines))  # pieces are longer than characters
    assert tokenizer.encode("  a   b ") == tokenizer.encode("a b")
    assert tokenizer.unk_id in tokenizer.encode("漢")


def test_the_order_of_the_text_means_nothing(tokenizer: Tokenizer, lines: list[str]) -> None:
    assert train_unigram(reversed(lines), 400).to_json() == tokenizer.to_json()


def test_sentencepieces_file_holds_all_of_it(tokenizer: Tokenizer) -> None:
    model = sentencepiece_of(json.loads(tokenizer.to_json()))
    assert model is not None
    again = parse_sentencepiece(sentencepiece_bytes(model))
    assert (again.special, len(again.pieces)) == ((1, -1, 0, -1), 399)
    assert tokenizer_json(again, ["<pad>"]) == tokenizer.to_json()


def test_little_text_makes_few_pieces_and_none_is_refused() -> None:
    few = train_unigram(["a b c"], 300)
    assert few.decode(few.encode("c a b")) == "c a b"
    with pytest.raises(UserError, match="all lines are empty"):
        train_unigram(["", "  "], 300)
