"""Batches of corrupted text that a model learns to restore: masked tokens for an encoder, spans for an encoder-decoder.

Each epoch corrupts other tokens. The choice depends only on (seed, epoch, batch).

Shapes: B rows, S tokens, M tokens to restore per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .batches import Batch, BatchesOfOthers, TokenBatches
from .epochs import StepArrays, legacy_random
from .ragged import padded, ragged

MASKED, RANDOM = 0.8, 0.1
"""Of the tokens to restore, 80 % become <mask>, 10 % a random token, 10 % stay (Devlin et al. 2019, section 3.1)."""


@dataclass(frozen=True)
class MaskedBatch:
    """A step's input for an encoder. tokens: the number of targets without padding."""

    ids: NDArray  # (B, S) int32, corrupted, each row ends with eos
    picked: NDArray  # (B, M) int32: positions of the tokens to restore
    targets: NDArray  # (B, M) int32: these tokens; pad_id in unused columns
    tokens: int

    def arrays(self, pad_id: int) -> StepArrays:
        is_token = self.ids != pad_id
        return self.targets, self.picked, self.ids, None if is_token.all() else is_token


class MaskedBatches(BatchesOfOthers[MaskedBatch]):
    """Masked language modelling (Devlin et al. 2019): a share of each row's tokens, at least one, must be restored.

    clean: batches whose source and target are the same text. words: for each text the word number of each token, to
    mask whole words; None: mask single tokens.
    """

    def __init__(
        self,
        clean: TokenBatches,
        mask_id: int,
        vocabulary: Sequence[int],
        share: float = 0.15,
        words: Sequence[Sequence[int]] | None = None,
    ):
        """vocabulary: the ids from which random tokens are drawn."""
        super().__init__(clean)
        self.mask_id, self.share = mask_id, share
        self._vocabulary = np.array(vocabulary, np.int32)
        self._words = None if words is None else ragged(words)

    def build(self, part: tuple[int, NDArray], epoch: int, index: int) -> MaskedBatch:
        clean, random = self.clean.build(part, epoch, index), legacy_random(self.seed, epoch, index)
        ids = clean.source.copy()
        rows, length = ids.shape
        most = max(1, round(self.share * (length - 1)))
        lengths = (ids != self.clean.pad_id).sum(axis=1) - 1  # eos is never masked
        counts = np.where(lengths > 0, np.maximum(1, np.round(self.share * lengths)), 0).astype(int)
        order = random.random_sample((rows, length))
        if self._words is not None:
            # All tokens of a word get the same random number, so they are next to each other in the order.
            words = padded([self._words[i] for i in part[1]], rows, length, 0)
            order = np.take_along_axis(order, np.minimum(words, length - 1), axis=1)
        order[np.arange(length) >= lengths[:, None]] = 2
        picked = np.argsort(order, axis=1, kind="stable")[:, :most].astype(np.int32)
        learned = np.arange(most) < counts[:, None]
        targets = np.where(learned, np.take_along_axis(ids, picked, axis=1), self.clean.pad_id)
        kind = random.random_sample(picked.shape)
        inputs = np.where(kind < MASKED, self.mask_id, random.choice(self._vocabulary, picked.shape))
        inputs = np.where(kind < MASKED + RANDOM, inputs, targets)
        row, column = np.nonzero(learned)
        ids[row, picked[row, column]] = inputs[row, column]
        return MaskedBatch(ids, picked, targets.astype(np.int32), int(learned.sum()))


class DenoisingBatches(BatchesOfOthers[Batch]):
    """Text infilling (Lewis et al. 2020, BART, section 2.2): spans of tokens are each replaced by one <mask>.

    share: of all tokens in spans. span: the mean of their Poisson-distributed lengths; a span of length 0 inserts a
    <mask>. The whole text is the target. clean: batches whose source and target are the same text.
    """

    def __init__(self, clean: TokenBatches, mask_id: int, share: float = 0.3, span: float = 3.0):
        super().__init__(clean)
        self.mask_id, self.share, self.span = mask_id, share, span

    def build(self, part: tuple[int, NDArray], epoch: int, index: int) -> Batch:
        clean, random = self.clean.build(part, epoch, index), legacy_random(self.seed, epoch, index)
        source = np.full_like(clean.source, self.clean.pad_id)
        for row, ids in enumerate(clean.source):
            length = int((ids != self.clean.pad_id).sum())
            if length:
                infilled = self._infilled(ids[: length - 1], random)[: source.shape[1] - 1]
                source[row, : len(infilled) + 1] = [*infilled, ids[length - 1]]
        longest = int((source != self.clean.pad_id).sum(axis=1).max())
        # On a device that compiles for each shape, S stays the bucket's length.
        width = source.shape[1] if self.clean.few_shapes else longest
        return Batch(source[:, :width], clean.target_in, clean.target_out, clean.tokens)

    def _infilled(self, ids: NDArray, random: np.random.RandomState) -> list[int]:
        to_hide = round(self.share * len(ids))
        hidden, starts = np.zeros(len(ids), bool), np.zeros(len(ids) + 1, bool)
        while to_hide > 0:
            length = min(int(random.poisson(self.span)), to_hide)
            start = random.randint(0, len(ids) - length + 1)
            starts[start] = True
            hidden[start : start + length] = True
            to_hide -= max(1, length)
        result: list[int] = []
        for i, id in enumerate(ids):
            # Adjacent spans share one <mask>.
            if starts[i] and (not hidden[i] or i == 0 or not hidden[i - 1]):
                result.append(self.mask_id)
            if not hidden[i]:
                result.append(int(id))
        return [*result, self.mask_id] if starts[-1] and not hidden[-1:].any() else result
