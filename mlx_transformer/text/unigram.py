"""A vocabulary of pieces, learned here, that SentencePiece reads, and so Marian's engines (Kudo 2018, "Subword
Regularization", section 3.2: a unigram language model).

`</s>` is 0 and `<unk>` 1, as these engines have it, and `<pad>` behind all pieces: their files don't have it, and it is
what the decoder starts with. Text is not normalised, but for spaces: none at either end, and never two. Text without a
piece becomes `<unk>`, so that text comes back only if it is of characters that were learned from.
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
    """Learn pieces from `lines` (both languages together), so many that there are `vocab_size` ids.

    There are fewer where the text has no more, and more where it has more characters, each of which is a piece.
    `UserError` for text that isn't Unicode, or has no character.
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
        raise UserError("vocabulary: there is no text to learn it from")
    backend.train_from_iterator(texts, trainer)
    vocabulary = json.loads(backend.to_str())["model"]["vocab"][len(SPECIAL) :]
    pieces = sorted(_settled(vocabulary), key=lambda piece: (-piece.score, piece.text))
    model = SentencePiece(pieces=(*SPECIAL, *pieces), normalizer="identity", special=(1, -1, 0, -1))
    return Tokenizer(tokenizer_json(model, ["<pad>"]), "trained tokenizer")


def _settled(pieces: Sequence[tuple[str, float]]) -> Iterator[Piece]:
    """Take from the scores what differs from run to run: the last digits, since threads add up in any order, and which
    of the rarest characters is before which."""
    least = min((score for text, score in pieces if len(text) > 1), default=0.0)
    for text, score in pieces:
        yield Piece(text, float(np.float32(max(score, least))))
