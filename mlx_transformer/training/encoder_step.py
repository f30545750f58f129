"""Training steps of encoders: classification, distillation and contrastive learning.

Shapes: B rows (or pairs), N texts of a batch, L tokens, D model, C classes, W numbers of a text's vector.

`HeadStep` learns labels and `VectorStep` another encoder's vectors. A row's loss doesn't depend on the other rows, so
a batch is split over streams as in translation. Targets of -1 are ignored. The losses:

    classes, token classes    the label-smoothed cross entropy of `loss.py`
    several classes, scores   binary cross entropy, averaged over the classes
    spans                     cross entropy of the answer's first and last token over the row's tokens, averaged
    vectors                   the squared distance; for unit vectors this is 2 (1 - cosine)

`ContrastiveStep` pulls the vectors of matching texts together and pushes those of other texts in the batch apart:

    L = 1/B sum_i [ logsumexp_j(s_ij) - s_ii ],   s_ij = cos(a_i, c_j) / temperature

a_i are the vectors of B sources, c_j those of all candidates: the B targets, then the hard negatives if the text has
any (InfoNCE: van den Oord et al. 2018, equation 4; in-batch negatives: Henderson et al. 2017, section 4.4).
`symmetric` adds the same loss with sources and targets swapped, and takes the mean. A candidate with the same text as
the right target is not a negative. If the model compares vectors by "dot", s_ij is a dot product too.

Here the loss of a row depends on all others, so gradients of parts of a batch can't simply be summed. Cached gradients
save the memory instead (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
section 3):

    1. compute all vectors, a chunk of texts at a time, without a gradient
    2. compute G, the gradient of the loss with respect to the vectors
    3. chunk by chunk again, add up the gradients of sum(vectors * G)

The result is the exact gradient, in the memory of one chunk. Dropout draws the same masks in 3 as in 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlx_transformer.core.text_embedding import SMALLEST_NORM, TextEmbedding
from mlx_transformer.data.matches import MatchBatch
from mlx_transformer.data.ragged import padded
from mlx_transformer.device import tuning
from mlx_transformer.nn.dropout import drawing_from, drawn_key
from mlx_transformer.nn.feedforward import ACTIVATIONS

from .loss import label_smoothed_loss
from .optimizers import spread
from .step import Gradients, Input, TrainStep


def text_vectors(embedding: TextEmbedding, memory: mx.array, counted: mx.array) -> mx.array:
    """Pool an encoder's output (B, L, D) over the tokens where `counted` (B, L) is True, to vectors (B, W).

    `core/text_embedding.py` in MLX, in float32, differentiable. The dense layers of `embedding` are applied but not
    trained.
    """
    memory = memory.astype(mx.float32)
    x = mx.concatenate([_pooled(memory, counted, way) for way in embedding.pooling], axis=-1)  # (B, D per pooling)
    for i, layer in enumerate(embedding.dense):
        x = x @ mx.array(embedding.weights[f"dense.{i}.weight"]).T
        x = x + mx.array(embedding.weights[f"dense.{i}.bias"]) if layer.bias else x
        x = x if layer.activation == "identity" else ACTIVATIONS[layer.activation](x)
    return unit(x) if embedding.normalize else x


def unit(x: mx.array) -> mx.array:
    """Scale vectors (..., W) to length 1."""
    squares = mx.sum(mx.square(x), axis=-1, keepdims=True)
    return x * mx.rsqrt(mx.maximum(squares, SMALLEST_NORM**2))


def _pooled(memory: mx.array, counted: mx.array, way: str) -> mx.array:
    """Pool (B, L, D) to (B, D) in one of the ways of `Pooling` in `core/heads.py`, e.g. "mean"."""
    real = counted.astype(mx.float32)
    if way == "max":
        largest = mx.max(mx.where(counted[..., None], memory, -mx.inf), axis=1)
        return mx.where(mx.any(counted, axis=1, keepdims=True), largest, 0)
    places = mx.cumsum(real, axis=1)
    count = mx.sum(real, axis=1, keepdims=True)
    if way == "cls":
        weights = real * (places == 1)
    elif way == "last":
        weights = real * (places == count)
    elif way == "weighted_mean":
        weights = real * (mx.arange(real.shape[1]) + 1)
        weights = weights / mx.maximum(mx.sum(weights, axis=1, keepdims=True), 1)
    else:
        weights = real / mx.maximum(count if way == "mean" else mx.sqrt(count), 1)
    return (weights[:, None] @ memory)[:, 0]  # (B, L) @ (B, L, D) -> (B, D)


NOTHING = -1
HIDDEN = -1e30
"""The logit of padding; minus infinity would give NaN gradients in a row of nothing but padding."""


class HeadStep(TrainStep):
    """Learns the labels of texts or tokens. `losses` returns the loss and the number of right labels."""

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
            picked_logits = mx.take_along_axis(logits, places[:, None], axis=1)[:, 0]  # (B, L, 2) -> (B, 2)
            loss = mx.mean(mx.logsumexp(logits, axis=1) - picked_logits, axis=-1)  # (B,)
            return self._with(function, _learned(loss, targets), lambda: mx.argmax(logits, axis=1), targets)
        loss = mx.mean(mx.logaddexp(0.0, logits) - targets * logits, axis=-1)  # (B, C) -> (B,)
        return self._with(
            function, _learned(loss, targets), lambda: logits > 0, mx.where(targets < 0, targets, targets > 0.5)
        )

    def _with(
        self, function: Callable[..., Any], loss: mx.array, outputs: Callable[[], mx.array], targets: mx.array
    ) -> Any:
        """Return the loss in training, (loss, number of right targets) in validation."""
        if function is label_smoothed_loss:
            return loss
        right = outputs() == targets
        if targets.ndim > 1 and self.model.config.head.kind != "token-classes":
            right = mx.all(right, axis=-1)
        return loss, mx.sum(right).astype(mx.float32)


def _learned(loss: mx.array, targets: mx.array) -> mx.array:
    """Sum the loss (B,) over the rows that have targets (B, C)."""
    return mx.sum(mx.where(targets[:, 0] == NOTHING, 0, loss))


class VectorStep(TrainStep):
    """Learns another encoder's vectors. `losses` returns the loss and the sum of the cosines with them."""

    second = "cosine"

    def _loss_by(self, function: Callable[..., Any], targets: mx.array, picked: Input, inputs: Sequence[Input]) -> Any:
        ids, mask = inputs
        embedding = self.model.text_embedding
        assert embedding is not None
        assert mask is not None
        vectors = text_vectors(embedding, self.model.encode(ids, mask), mask)  # (B, W)
        there = mx.any(mask, axis=1)  # (B,): not a row of padding
        loss = mx.sum(mx.where(there, mx.sum(mx.square(vectors - targets), axis=-1), 0))
        if function is label_smoothed_loss:
            return loss
        return loss, mx.sum(mx.where(there, mx.sum(unit(vectors) * unit(targets), axis=-1), 0))


SMALLEST = 16
"""Fewest texts of a part without `chunk`. Parts are padded to their own longest text only, so several cost less."""
WIDTHS = 8
"""Most widths of parts on a device that compiles for each shape."""


def contrastive_loss(
    vectors: mx.array, numbers: mx.array, temperature: float, symmetric: bool = False
) -> tuple[mx.array, mx.array]:
    """Return (the loss summed over the pairs, the number of sources whose nearest candidate is their target).

    vectors (2 B, W) or (3 B, W): B sources, B targets, then perhaps B negatives. numbers (2, B) or (3, B): equal for
    equal texts.
    """
    pairs = numbers.shape[1]
    scores = vectors[:pairs] @ vectors[pairs:].T / temperature  # (B, B) or (B, 2 B)
    loss = _not_ranked_first(scores, numbers[1], numbers[1:].reshape(-1))
    first = mx.sum(mx.max(scores, axis=1) == mx.diagonal(scores)).astype(mx.float32)
    if symmetric:
        loss = (loss + _not_ranked_first(scores[:, :pairs].T, numbers[0], numbers[0])) / 2
    return loss, first


def _not_ranked_first(scores: mx.array, right: mx.array, candidates: mx.array) -> mx.array:
    """Sum logsumexp_j(s_ij) - s_ii over the rows of scores (B, C). right (B,) and candidates (C,): numbers of the right
    texts and of all candidates; candidates equal to the right text are left out."""
    own = mx.arange(scores.shape[0])[:, None] == mx.arange(scores.shape[1])
    equal = (right[:, None] == candidates) & ~own
    return mx.sum(mx.logsumexp(mx.where(equal, -mx.inf, scores), axis=1) - mx.diagonal(scores))


class ContrastiveStep(TrainStep):
    """Contrastive learning. `chunk`: the number of texts computed at a time, with cached gradients; None: all of a
    batch at once."""

    second = "accuracy"

    def __init__(
        self,
        *arguments: Any,
        temperature: float = 0.05,
        symmetric: bool = False,
        chunk: int | None = None,
        **named: Any,
    ):
        self.temperature, self.symmetric, self.chunk = temperature, symmetric, chunk
        super().__init__(*arguments, **named)

    def losses(self, batch: Any) -> tuple[mx.array, mx.array]:
        numbers, order, *parts = self._inputs(batch)
        vectors = [self._vectors(parts, i) for i in range(len(parts) // 2)]
        return self._compared(mx.concatenate(vectors)[order], numbers)

    def _inputs(self, batch: Any) -> list[Any]:
        """Cut a batch into parts of similar length; on a device that compiles, all parts have the same width.

        Returns [numbers of the texts (2 or 3, B), for each text the index of its vector among all parts' vectors (N,),
        ids (n, L) and token mask (n, L) of the first part, ids and mask of the second, ...]. A mask may be None.
        """
        assert isinstance(batch, MatchBatch)
        lengths, few = np.array([len(row) for row in batch.rows]), tuning().few_shapes
        order = np.arange(len(lengths)) if few else np.argsort(-lengths, kind="stable")
        size = self.chunk or (len(order) if few else max(SMALLEST, -(-len(order) // (4 * len(self.streams)))))
        multiple = -(-self.model.config.max_positions // WIDTHS) if few else 1
        parts: list[Input] = []
        for begin in range(0, len(order), size):
            rows = [batch.rows[i] for i in order[begin : begin + size]]
            longest = int(lengths.max()) if few else max(map(len, rows))
            width = max(tuning().shortest, -(-longest // multiple) * multiple)
            ids = padded(rows, len(rows), min(width, self.model.config.max_positions), self.model.config.pad_id)
            is_token = ids != self.model.config.pad_id
            parts += [mx.array(ids), None if is_token.all() else mx.array(is_token)]
        return [mx.array(batch.numbers), mx.array(np.argsort(order)), *parts]

    def _gradients(self, tokens: mx.array, *inputs: Any) -> tuple[mx.array, Gradients]:
        """As in `TrainStep`, but always for a whole batch."""
        numbers, order, *parts = inputs
        everything, trained, count = self.model.parameters(), self.model.trainable_parameters(), len(parts) // 2
        keys = mx.random.split(drawn_key(), count)

        def vectors(parameters: Any, i: int, after: Any = ()) -> mx.array:
            self.model.update(self.arithmetic.lowered(everything))
            self.model.update(self.arithmetic.lowered(parameters))
            with drawing_from(keys[i]):
                return self._vectors(parts, i, after)

        def mean_loss(v: list[mx.array]) -> tuple[mx.array, mx.array]:
            loss = self._compared(mx.concatenate(v)[order], numbers)[0] / tokens
            return self.arithmetic.scaled(loss), loss

        if self.chunk is None:
            whole = mx.value_and_grad(lambda p: mean_loss([vectors(p, i) for i in range(count)]))
            (_, loss), gradients = whole(trained)
        else:
            loss, gradients = self._cached(vectors, mean_loss, trained, count)
        self.model.update(everything)
        return loss, gradients

    _split_gradients = _gradients

    def _cached(
        self, vectors: Callable[..., mx.array], mean_loss: Callable[..., Any], trained: Any, count: int
    ) -> tuple[mx.array, Gradients]:
        """Return (loss, gradient) by cached gradients. On each stream a chunk waits for the one before, so that only
        one chunk a stream is in memory."""
        lanes = max(1, len(self.streams))
        parts_made: list[mx.array] = []
        for i in range(count):
            parts_made.append(
                mx.stop_gradient(vectors(trained, i, parts_made[i - lanes : i - lanes + 1] if i >= lanes else ()))
            )
        (_, loss), by_vector = mx.value_and_grad(mean_loss)(parts_made)
        sums: list[Gradients] = []
        for i in range(count):
            before = sums[i % lanes] if i >= lanes else None
            after = [] if before is None else [array for _, array in tree_flatten(before)]

            def product(parameters: Any, i: int = i, after: Any = after) -> mx.array:
                return mx.sum(vectors(parameters, i, after) * by_vector[i])

            with self._lane(i):
                gradient = mx.grad(product)(trained)
                if before is None:
                    sums.append(gradient)
                else:
                    sums[i % lanes] = tree_map(mx.add, before, gradient)
        return loss, tree_map(spread(lambda *g: sum(g[1:], start=g[0]), self.streams), *sums)

    def _vectors(self, parts: list[Any], i: int, after: Any = ()) -> mx.array:
        """Compute the vectors (n, W) of part i, after the arrays `after`."""
        ids, mask = parts[2 * i : 2 * i + 2]
        embedding = self.model.text_embedding
        assert embedding is not None
        with self._lane(i):
            (ids,) = mx.depends([ids], list(after)) if len(after) else (ids,)
            memory = self.model.encode(ids, mask)
            counted = mx.ones(ids.shape, mx.bool_) if mask is None else mask
            x = text_vectors(embedding, memory, counted)
            return x if embedding.similarity == "dot" else unit(x)

    def _compared(self, vectors: mx.array, numbers: mx.array) -> tuple[mx.array, mx.array]:
        return contrastive_loss(vectors, numbers, self.temperature, self.symmetric)

    def _lane(self, i: int) -> AbstractContextManager[Any]:
        """The stream of part i."""
        return mx.stream(self.streams[i % len(self.streams)]) if self.streams else nullcontext()
