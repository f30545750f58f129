"""Train a unigram vocabulary that SentencePiece and Marian's engines can read.

Source: Kudo 2018, "Subword Regularization", section 3.2. Ids as in these engines: `</s>` 0, `<unk>` 1, then the pieces;
`<pad>`, with which the decoder starts, is last, as the engines' files lack it. Only spaces are normalised: spaces at
both ends and repeated spaces are removed. Characters that the training text lacks become `<unk>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from mlx_transformer.system.errors import UserError

from .sentencepiece import CONTROL, UNKNOWN, Piece, SentencePiece
from .sentencepiece_tokenizer import SPACES_PATTERN, tokenizer_json
from .tokenizer import Tokenizer, unicode_texts

SPECIAL = (Piece("</s>", 0.0, CONTROL), Piece("<unk>", 0.0, UNKNOWN))


def train_unigram(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of `vocab_size` ids from `lines` (both languages together).

    It is smaller if the text has too few candidates, and larger if the text has more than `vocab_size` characters,
    since each character is a piece. Raises `UserError` for empty text and for text that isn't Unicode.
    """
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Replace(tokenizers.Regex(SPACES_PATTERN), "")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    names = [piece.text for piece in SPECIAL]
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - 1, special_tokens=names, unk_token=names[1], show_progress=False
    )
    texts = [text for text in unicode_texts(lines) if text.strip()]
    if not texts:
        raise UserError("the vocabulary can't be learned: all lines are empty")
    backend.train_from_iterator(texts, trainer)
    vocabulary = json.loads(backend.to_str())["model"]["vocab"][len(SPECIAL) :]
    pieces = sorted(_settled(vocabulary), key=lambda piece: (-piece.score, piece.text))
    model = SentencePiece(pieces=(*SPECIAL, *pieces), normalizer="identity", special=(1, -1, 0, -1))
    return Tokenizer(tokenizer_json(model, ["<pad>"]), "trained tokenizer")


def _settled(pieces: Sequence[tuple[str, float]]) -> Iterator[Piece]:
    """Make the scores the same in each run. They are rounded to float32, since threads add up in any order. No score is
    below the lowest score of a longer piece; the rarest characters get that score."""
    least = min((score for text, score in pieces if len(text) > 1), default=0.0)
    for text, score in pieces:
        yield Piece(text, float(np.float32(max(score, least))))
