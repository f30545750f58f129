"""Steps of encoders whose head has classes, and of those that learn another encoder's vectors. Each row's loss is its
own, so that a batch is split as one of translations is; only the loss differs.

Shapes: B rows, L tokens, C classes, W numbers of a vector. A target of -1 is learned nothing of.

    classes, token classes    the label-smoothed cross entropy of `loss.py`
    several classes, scores   binary cross entropy, its mean over the classes
    spans                     the cross entropies of the first and the last token among a row's tokens, their mean
    vectors                   the squared distance; of unit vectors twice what their cosine lacks to 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .loss import label_smoothed_loss
from .step import Input, TrainStep
from .text_vectors import text_vectors, unit

NOTHING = -1
HIDDEN = -1e30
"""The logit of padding; minus infinity would have no gradient in a row of padding alone."""


class HeadStep(TrainStep):
    """Learns the labels of texts or tokens. The second number of `losses` counts those that are right."""

    second = "accuracy"

    def _loss_by(self, function: Callable[..., Any], targets: mx.array, picked: Input, inputs: Sequence[Input]) -> Any:
        ids, mask, types = inputs
        named: dict[str, Any] = {} if types is None else {"token_types": types}
        hidden, head = self.model.hidden(ids, mask, **named), self.model.config.head
        if targets.dtype == mx.int32 and head.kind != "spans":
            classifier = self.model.classifier()
            loss = label_smoothed_loss(hidden, classifier, targets, self.smoothing, NOTHING, self.max_logits)
            return self._with(function, loss, lambda: mx.argmax(self.model.logits(hidden), -1), targets)
        logits = self.model.logits(hidden).astype(mx.float32)
        if head.kind == "spans":
            logits = mx.where(mask[..., None], logits, HIDDEN)  # type: ignore[index]
            places = mx.maximum(targets, 0)
            picked_logits = mx.take_along_axis(logits, places[:, None], axis=1)[:, 0]
            loss = mx.mean(mx.logsumexp(logits, axis=1) - picked_logits, axis=-1)
            return self._with(function, _learned(loss, targets), lambda: mx.argmax(logits, axis=1), targets)
        loss = mx.mean(mx.logaddexp(0.0, logits) - targets * logits, axis=-1)
        return self._with(
            function, _learned(loss, targets), lambda: logits > 0, mx.where(targets < 0, targets, targets > 0.5)
        )

    def _with(
        self, function: Callable[..., Any], loss: mx.array, outputs: Callable[[], mx.array], targets: mx.array
    ) -> Any:
        """Return the loss, and where not only that is wanted how many targets were found."""
        if function is label_smoothed_loss:
            return loss
        right = outputs() == targets
        if targets.ndim > 1 and self.model.config.head.kind != "token-classes":
            right = mx.all(right, axis=-1)
        return loss, mx.sum(right).astype(mx.float32)


def _learned(loss: mx.array, targets: mx.array) -> mx.array:
    """Return the sum of the loss (B,) over rows that have targets (B, C)."""
    return mx.sum(mx.where(targets[:, 0] == NOTHING, 0, loss))


class VectorStep(TrainStep):
    """Learns vectors. The second number of `losses` is the sum of cosines with them."""

    second = "cosine"

    def _loss_by(self, function: Callable[..., Any], targets: mx.array, picked: Input, inputs: Sequence[Input]) -> Any:
        ids, mask = inputs
        embedding = self.model.text_embedding
        assert embedding is not None
        assert mask is not None
        vectors = text_vectors(embedding, self.model.encode(ids, mask), mask)
        there = mx.any(mask, axis=1)
        loss = mx.sum(mx.where(there, mx.sum(mx.square(vectors - targets), axis=-1), 0))
        if function is label_smoothed_loss:
            return loss
        return loss, mx.sum(mx.where(there, mx.sum(unit(vectors) * unit(targets), axis=-1), 0))
