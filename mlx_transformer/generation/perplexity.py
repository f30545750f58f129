"""How well a decoder alone predicts a text, whatever runtime computes its logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.system.errors import UserError

from .fitting import fitting_tokenizer

BATCH_TOKENS = 4096
LARGEST_EXPONENT = 700.0
"""Of a float64."""


def perplexity(
    config: TransformerConfig,
    tokenizer: Tokenizer | None,
    logits: Callable[[list[list[int]]], Any],
    texts: Sequence[str],
    where: str = "model",
    done: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Of documents: how many tokens they have (each one's end counted), e to the mean negative log-probability of a
    token, and the bits a byte of text takes, which doesn't depend on the vocabulary.

    logits: ids (B, L) -> (B, L, V). A document longer than the model takes is cut, and each piece predicted by itself
    from the token before it, as in training. done: told the share that is finished. `UserError` for a model that isn't
    a decoder alone.
    """
    tokenizer = fitting_tokenizer(config, tokenizer, where, "decoder", "a text's perplexity")
    rows = [row for ids in tokenizer.encode_batch(texts) for row in _pieces([config.bos_id, *ids], config)]
    total, tokens, finished = 0.0, sum(len(row) - 1 for row in rows), 0
    for batch in _batches(rows):
        found = np.asarray(logits(batch[:, :-1].tolist()), np.float32).astype(np.float64)
        top = found.max(axis=-1, keepdims=True)
        normaliser = top[..., 0] + np.log(np.exp(found - top).sum(axis=-1))
        total += float((normaliser - np.take_along_axis(found, batch[:, 1:, None], axis=-1)[..., 0]).sum())
        finished += batch[:, 1:].size
        done(finished / tokens)
    if not math.isfinite(total):
        raise UserError("the model's logits are not finite; check its weights")
    return {
        "documents": len(texts),
        "tokens": tokens,
        "perplexity": round(perplexity_of(total / tokens), 4),
        "bits_per_byte": round(total / math.log(2) / sum(len(text.encode()) for text in texts), 4),
    }


def perplexity_of(nats: float) -> float:
    """e to the mean negative log-probability of a token; finite, however bad the model is."""
    return math.exp(min(nats, LARGEST_EXPONENT))


def _pieces(ids: list[int], config: TransformerConfig) -> Iterator[list[int]]:
    for start in range(0, len(ids) - 1, config.max_positions):
        yield ids[start : start + config.max_positions + 1]


def _batches(rows: list[list[int]]) -> Iterator[NDArray[np.int64]]:
    """Rows of one length together, so that nothing is padded."""
    rows = sorted(rows, key=len)
    start = 0
    while start < len(rows):
        length = len(rows[start])
        most = max(1, BATCH_TOKENS // length)
        stop = next((i for i in range(start, min(start + most, len(rows))) if len(rows[i]) != length), None)
        stop = min(start + most, len(rows)) if stop is None else stop
        yield np.array(rows[start:stop], np.int64)
        start = stop
