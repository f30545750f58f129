"""One optimizer step: loss, gradients, clipping, update.

On a GPU the whole step is one compiled function. On Linux CPUs `mx.compile` starts a C++ compiler at run time and
gains nothing, while one MLX stream runs on one core: there the batch is split in as many parts as there are cores,
each on its own stream, and the gradients (each already divided by the whole batch's token count) are summed. What is
done to each parameter by itself, sum, norm and update, is spread over the streams as well.

A step may take several batches, one after another: the gradient is that of all their tokens together, whichever batch
they are in, and the memory that of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlx_transformer.blas import set_blas_threads
from mlx_transformer.data.epochs import TrainingBatch
from mlx_transformer.device import choices, cpu_streams
from mlx_transformer.runtime.transformer import Transformer

from .arithmetic import Arithmetic
from .group import ALONE, Group
from .loss import label_smoothed_loss, losses
from .optimizers import Optimizer
from .spread import spread

Gradients = Any
Input = mx.array | None


class TrainStep:
    """`step(batches, learning_rate) -> (mean loss, gradient norm, finite)`, lazy arrays; call `evaluate` to run them.

    A step whose gradient is not finite changes nothing but the factor on a float16 loss.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: Optimizer,
        smoothing: float = 0.1,
        clip_norm: float = 0.0,
        arithmetic: Arithmetic | None = None,
        compiled: bool | None = None,
        group: Group = ALONE,
    ):
        """`compiled` None: as the device likes it. If not, the batch is split over streams instead. `group`: of the
        processes that take this step together, each with batches of its own."""
        self.model, self.optimizer, self.group = model, optimizer, group
        self.logits: int | None = None
        """Of one chunk of the loss, at most; None: `loss.LARGEST`."""
        self.smoothing, self.clip_norm = smoothing, clip_norm
        self.arithmetic = arithmetic or Arithmetic()
        whole_step = choices().compiles if compiled is None else compiled
        self.streams = [] if whole_step else cpu_streams()
        self.compilations = 0
        """Functions that were compiled so far, one for each shape of batches; 0 for ever where none is."""
        self.optimizer.spread(self.streams)
        set_blas_threads(1)
        # Without the random state among them, a compiled step would repeat one dropout mask for ever.
        state = [model.state, optimizer.state, self.arithmetic.state, mx.random.state]

        def made(function: Callable[..., Any]) -> Callable[..., Any]:
            return mx.compile(self._counted(function), inputs=state, outputs=state) if whole_step else function

        self._run, self._apply = made(self._step), made(self._finish)
        self._part = made(self._gradients if whole_step else self._split_gradients)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """To be compiled: MLX calls it for shapes that it has not seen, and never again for those."""

        def traced(*arguments: Any) -> Any:
            self.compilations += 1
            return function(*arguments)

        return traced

    @property
    def state(self) -> dict[str, Any]:
        """All that steps leave behind besides the parameters: a tree of arrays, in whose containers they work."""
        return {**self.optimizer.state, **self.arithmetic.state}

    @property
    def all(self) -> dict[str, Any]:
        """The trained parameters and the state."""
        return {"parameters": self.model.trainable_parameters(), "state": self.state}

    def take(self, all: dict[str, Any]) -> None:
        """Go on from what `all` was, here or in another process."""
        self.model.update(all["parameters"])
        self.restore(all["state"])

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` was."""
        assign(self.optimizer.state, state)
        assign(self.arithmetic.state, state)

    def __call__(
        self,
        batches: TrainingBatch | Sequence[TrainingBatch],
        learning_rate: float,
        tokens_of_all: int | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """`tokens_of_all`: of the batches of all processes; None: these are all."""
        batches = batches if isinstance(batches, Sequence) else [batches]
        self.optimizer.set_rate(learning_rate)
        count = sum(batch.tokens for batch in batches) if tokens_of_all is None else tokens_of_all
        # Of a group the mean over its processes is the sum over their batches, divided by all tokens.
        tokens = mx.array(max(1, count) / self.group.size, dtype=mx.float32)
        if len(batches) == 1 and self.group.size == 1:
            return self._run(tokens, *self._inputs(batches[0]))
        loss, gradients = self._part(tokens, *self._inputs(batches[0]))
        for batch in batches[1:]:
            mx.eval(loss, gradients)
            more_loss, more = self._part(tokens, *self._inputs(batch))
            loss, gradients = loss + more_loss, tree_map(mx.add, gradients, more)
        return self._apply(*self.group.mean((loss, gradients)))

    def evaluate(self, *arrays: mx.array) -> None:
        """Run everything that is pending: the new parameters, the optimizer's moments and `arrays`."""
        mx.eval(self.model.parameters(), self.state, *arrays)

    def loss(self, targets: mx.array, picked: Input, *inputs: Input) -> mx.array:
        """Sum of the loss over a batch's targets (B, M). `picked` (B, M): the positions they are of, None: all in
        order. inputs: of `Transformer.hidden`."""
        weight, bias = self.model.output_matrix(), self.model.output_bias()
        hidden, pad_id = self._hidden(picked, inputs), self.model.config.pad_id
        return label_smoothed_loss(hidden, weight, bias, targets, self.smoothing, pad_id, self.logits)

    def losses(self, batch: TrainingBatch) -> tuple[mx.array, mx.array]:
        """(the loss, the same without label smoothing), sums over a batch's targets; no gradient."""
        targets, picked, *inputs = self._inputs(batch)
        weight, bias = self.model.output_matrix(), self.model.output_bias()
        hidden, pad_id = self._hidden(picked, inputs), self.model.config.pad_id
        return losses(hidden, weight, bias, targets, self.smoothing, pad_id, self.logits)

    def _hidden(self, picked: Input, inputs: Sequence[Input]) -> mx.array:
        hidden = self.model.hidden(*inputs)
        return hidden if picked is None else mx.take_along_axis(hidden, picked[..., None], axis=1)

    def _inputs(self, batch: TrainingBatch) -> list[Any]:
        return [None if array is None else mx.array(array) for array in batch.arrays(self.model.config.pad_id)]

    def _step(self, tokens: mx.array, *inputs: Any):
        part = self._split_gradients if self.streams else self._gradients
        return self._finish(*part(tokens, *inputs))

    def _finish(self, loss: mx.array, gradients: Gradients):
        gradients = self.arithmetic.unscaled(gradients)
        norm, gradients = _clip(gradients, self.clip_norm, self.streams)
        finite = mx.isfinite(norm)
        if not self.streams:
            before = tree_map(lambda x: x, (self.model.trainable_parameters(), self.optimizer.state))
            self.optimizer.update(self.model, gradients)
            after = (self.model.trainable_parameters(), self.optimizer.state)
            parameters, state = tree_map(lambda new, old: mx.where(finite, new, old), after, before)
            self.model.update(parameters)
            assign(self.optimizer.state, state)
        elif finite.item():  # an exact skip; on CPU a synchronisation costs nothing
            self.optimizer.update(self.model, gradients)
        self.arithmetic.settle(finite)
        return loss, norm, finite

    def _split_gradients(self, tokens: mx.array, *inputs: Input) -> tuple[mx.array, Gradients]:
        rows = cast(mx.array, inputs[0]).shape[0]
        parts = min(len(self.streams), rows)
        edges = [rows * i // parts for i in range(parts + 1)]
        losses: list[mx.array] = []
        parts_of_gradients: list[Gradients] = []
        for i in range(parts):
            part = slice(edges[i], edges[i + 1])
            with mx.stream(self.streams[i]):
                of_part: Any = (None if array is None else array[part] for array in inputs)
                loss, gradients = self._gradients(tokens, *of_part)
            losses.append(loss)
            parts_of_gradients.append(gradients)
        # Nothing is evaluated before all parts are built: MLX lets few operations wait in all its CPU streams together,
        # so a part that was queued alone would keep the others out (measured: 5,700 instead of 7,900 tokens/s).
        gradients = tree_map(spread(lambda *g: sum(g[1:], start=g[0]), self.streams), *parts_of_gradients)
        return sum(losses[1:], start=losses[0]), gradients

    def _gradients(self, tokens: mx.array, targets: mx.array, *inputs: Input) -> tuple[mx.array, Gradients]:
        """(mean loss, gradients of the trainable parameters, times the arithmetic's factor)"""
        everything, trained = self.model.parameters(), self.model.trainable_parameters()

        def mean_loss(parameters) -> tuple[mx.array, mx.array]:
            self.model.update(self.arithmetic.lowered(everything))
            self.model.update(self.arithmetic.lowered(parameters))
            loss = self.loss(targets, *inputs) / tokens
            return self.arithmetic.scaled(loss), loss

        (_, loss), gradients = mx.value_and_grad(mean_loss)(trained)
        self.model.update(everything)
        return loss, gradients


def _clip(gradients: Gradients, largest: float, streams: Sequence[mx.Stream] = ()) -> tuple[mx.array, Gradients]:
    """(norm of all gradients together, gradients scaled so that it is at most `largest`); 0 leaves them as they are."""
    squares = tree_map(spread(lambda g: mx.sum(mx.square(g.astype(mx.float32))), streams), gradients)
    norm = mx.sqrt(sum((cast(mx.array, each) for _, each in tree_flatten(squares)), start=mx.array(0.0)))
    if largest <= 0:
        return norm, gradients
    factor = mx.minimum(largest / (norm + 1e-6), 1.0)
    return norm, tree_map(spread(lambda g: g * factor.astype(g.dtype), streams), gradients)


def assign(tree: Any, values: Any) -> None:
    """Put `values` into a tree of dicts and lists in place: a compiled function keeps hold of the containers.

    Containers without arrays (modules without parameters) may be missing in `values`.
    """
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        if not isinstance(tree[key], (dict, list)):
            tree[key] = values[key]
        elif tree_flatten(tree[key]):
            assign(tree[key], values[key])
