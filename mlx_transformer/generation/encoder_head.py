"""An encoder with a head of one kind at work on rows of text, whatever runtime computes its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import HeadKind
from mlx_transformer.core.text_pairs import Pair
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.system.errors import UserError

from .passes import BATCH_TOKENS, Passes, of_one_length
from .translate import fitting_tokenizer


class EncoderHead:
    """`logits(ids, token_types=...)` of rows (B, L) of one length, between a tokenizer and what is made of them."""

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer: Tokenizer | None,
        logits: Callable[..., Any],
        where: str,
        kind: HeadKind,
        verb: str,
        passes: Passes,
    ) -> None:
        """where: the model's name in messages. passes: how they are computed. `UserError`, which says that `verb` needs
        it, for a model without a head of this kind or without a tokenizer that fits it."""
        if config.architecture == "encoder" and config.head.kind != kind:
            raise UserError(f"{where}: {verb} needs a head of kind {kind!r}; its head is of kind {config.head.kind!r}")
        self.tokenizer = fitting_tokenizer(config, tokenizer, where, "encoder", verb, words=False)
        self.config, self.where, self.most, self._logits = config, where, config.max_positions, logits
        self._passes = passes

    def logits(self, rows: Sequence[Pair], done: Callable[[float], None]) -> list[NDArray[np.float64]]:
        """Return what the head gives for each row, (C,) or (L, C). Rows of one length are computed together, so that
        nothing is padded."""
        logits: list[NDArray[np.float64]] = [np.zeros(0)] * len(rows)
        computed = 0

        def compute(part: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
            types = {"token_types": [rows[i].token_types for i in part]} if self.config.token_types else {}
            batch = np.asarray(self._logits([rows[i].ids for i in part], **types), np.float64)
            if not np.isfinite(batch).all():
                raise UserError(f"{self.where}: its logits are not finite; check its weights")
            return part, batch

        batches = of_one_length([len(row.ids) for row in rows], BATCH_TOKENS // self._passes.at_once)
        for part, batch in self._passes.in_parallel(compute, batches):
            for i, each in zip(part, batch, strict=True):
                logits[i] = each
            computed += len(part)
            done(computed / len(rows))
        return logits


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the shares of the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
