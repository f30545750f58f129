"""One optimizer step: loss, gradients, clipping, Adam.

On a GPU the whole step is one compiled function. On Linux CPUs `mx.compile` starts a C++ compiler at run time and
gains nothing, while one MLX stream runs on one core: there the batch is split in as many parts as there are cores,
each on its own stream, and the gradients (each already divided by the whole batch's token count) are summed.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from mlx_transformer.blas import set_blas_threads
from mlx_transformer.data.batches import Batch
from mlx_transformer.device import choices, cpu_streams
from mlx_transformer.nn import Transformer

from .loss import label_smoothed_loss

Gradients = Any


class TrainStep:
    """`step(batch, learning_rate) -> (mean loss, gradient norm, finite)`, lazy arrays; call `evaluate` to run them.

    Adam with bias correction (MLX's default leaves it off). A step whose gradient is not finite changes nothing.
    """

    def __init__(
        self,
        model: Transformer,
        betas: tuple[float, float] = (0.9, 0.98),
        epsilon: float = 1e-9,
        smoothing: float = 0.1,
        clip_norm: float = 0.0,
        compiled: bool | None = None,
    ):
        """`compiled` None: as the device likes it. If not, the batch is split over streams instead."""
        self.model = model
        self.optimizer = optim.Adam(1.0, betas=list(betas), eps=epsilon, bias_correction=True)
        self.optimizer.init(model.trainable_parameters())
        self.smoothing, self.clip_norm = smoothing, clip_norm
        whole_step = choices().compiles if compiled is None else compiled
        self.streams = [] if whole_step else cpu_streams()
        set_blas_threads(1)
        # Without the random state among them, a compiled step would repeat one dropout mask for ever.
        state = [model.state, self.optimizer.state, mx.random.state]
        self._run = mx.compile(self._step, inputs=state, outputs=state) if whole_step else self._split_step

    def __call__(self, batch: Batch, learning_rate: float) -> tuple[mx.array, mx.array, mx.array]:
        self.optimizer.learning_rate = mx.array(learning_rate, dtype=mx.float32)
        pad_id = self.model.config.pad_id
        ragged = bool((batch.source == pad_id).any())
        tokens = mx.array(max(1, batch.tokens), dtype=mx.float32)
        source, target_in, target_out = (mx.array(x) for x in (batch.source, batch.target_in, batch.target_out))
        mask = mx.array(batch.source != pad_id) if ragged else None
        return self._run(source, target_in, target_out, mask, tokens)

    def evaluate(self, *arrays: mx.array) -> None:
        """Run everything that is pending: the new parameters, Adam's moments and `arrays`."""
        mx.eval(self.model.parameters(), self.optimizer.state, *arrays)

    def loss(self, source, target_in, target_out, mask) -> mx.array:
        """Sum of the loss over a batch's target tokens."""
        hidden = self.model.hidden(source, target_in, mask)
        weight, bias = self.model.output_matrix(), self.model.output_bias()
        return label_smoothed_loss(hidden, weight, bias, target_out, self.smoothing, self.model.config.pad_id)

    def _step(self, source, target_in, target_out, mask, tokens):
        loss, gradients = self._gradients(source, target_in, target_out, mask, tokens)
        norm, gradients = _clip(gradients, self.clip_norm)
        finite = mx.isfinite(norm)
        before = tree_map(lambda x: x, (self.model.trainable_parameters(), self.optimizer.state))
        self.optimizer.update(self.model, gradients)
        after = (self.model.trainable_parameters(), self.optimizer.state)
        parameters, state = tree_map(lambda new, old: mx.where(finite, new, old), after, before)
        self.model.update(parameters)
        assign(self.optimizer.state, state)
        return loss, norm, finite

    def _split_step(self, source, target_in, target_out, mask, tokens):
        rows, parts = source.shape[0], min(len(self.streams), source.shape[0])
        edges = [rows * i // parts for i in range(parts + 1)]
        losses: list[mx.array] = []
        parts_of_gradients: list[Gradients] = []
        for i in range(parts):
            part = slice(edges[i], edges[i + 1])
            with mx.stream(self.streams[i]):
                part_mask = None if mask is None else mask[part]
                loss, gradients = self._gradients(source[part], target_in[part], target_out[part], part_mask, tokens)
            losses.append(loss)
            parts_of_gradients.append(gradients)
        # Nothing is evaluated before all parts are built: MLX lets few operations wait in all its CPU streams together,
        # so a part that was queued alone would keep the others out (measured: 5,700 instead of 7,900 tokens/s).
        gradients = tree_map(lambda *g: sum(g[1:], start=g[0]), *parts_of_gradients)
        norm, gradients = _clip(gradients, self.clip_norm)
        loss, finite = sum(losses[1:], start=losses[0]), mx.isfinite(norm)
        if finite.item():  # an exact skip; on CPU a synchronisation costs nothing
            self.optimizer.update(self.model, gradients)
        return loss, norm, finite

    def _gradients(self, source, target_in, target_out, mask, tokens) -> tuple[mx.array, Gradients]:
        def mean_loss() -> mx.array:
            return self.loss(source, target_in, target_out, mask) / tokens

        return nn.value_and_grad(self.model, mean_loss)()


def _clip(gradients: Gradients, largest: float) -> tuple[mx.array, Gradients]:
    """(norm of all gradients together, gradients scaled so that it is at most `largest`); 0 leaves them as they are."""
    arrays = [cast(mx.array, g) for _, g in tree_flatten(gradients)]
    norm = mx.sqrt(sum((mx.sum(mx.square(g.astype(mx.float32))) for g in arrays), start=mx.array(0.0)))
    if largest <= 0:
        return norm, gradients
    factor = mx.minimum(largest / (norm + 1e-6), 1.0)
    return norm, tree_map(lambda g: g * factor.astype(g.dtype), gradients)


def assign(tree: Any, values: Any) -> None:
    """Put `values` into a tree of dicts and lists in place: a compiled function keeps hold of the containers.

    Containers without arrays (modules without parameters) may be missing in `values`.
    """
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        if not isinstance(tree[key], (dict, list)):
            tree[key] = values[key]
        elif tree_flatten(tree[key]):
            assign(tree[key], values[key])
