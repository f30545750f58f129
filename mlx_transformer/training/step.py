"""An optimizer step: loss, gradients, clipping, update.

On a GPU the whole step is one compiled function. On Linux CPUs `mx.compile` starts a C++ compiler at run time and
gains nothing, while one MLX stream runs on one core. So there the batch is split into as many parts as there are cores,
each on its own stream. The gradients, each already divided by the whole batch's token count, are summed. Work on single
parameters (sum, norm and update) is spread over the streams as well.

A step may take several batches, one after another (accumulation). The gradient is the same as for one batch with all
their tokens; the memory is that of the largest batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlx_transformer.data.epochs import TrainingBatch
from mlx_transformer.device import set_blas_threads
from mlx_transformer.nn.classifier import Classifier
from mlx_transformer.runtime.transformer import Transformer

from .group import ALONE, Group
from .loss import label_smoothed_loss, losses
from .optimizers import Optimizer, ZeroStart, spread

Gradients = Any
Input = mx.array | None
FIRST_FACTOR, LARGEST_FACTOR = 2.0**15, 2.0**24
DOUBLED_AFTER = 2000  # steps


class Arithmetic:
    """The type of a step's arithmetic: float32, bfloat16 or float16. Parameters and moments stay float32.

    Each step computes with copies of the parameters in the lower type, and the gradients come back in float32
    (Micikevicius et al. 2018, "Mixed Precision Training"). float16 gradients below 6e-8 would become 0, so the loss is
    multiplied by a factor: halved when a gradient overflows, doubled after 2000 steps without an overflow.
    """

    def __init__(self, dtype: str = "float32"):
        self.dtype: mx.Dtype = getattr(mx, dtype)
        self.state: dict[str, mx.array] = {}
        """For float16 the loss's factor, and the steps since it last changed; a compiled step updates it in place."""
        if self.dtype == mx.float16:
            self.state = {"loss_factor": mx.array(FIRST_FACTOR), "steps_of_loss_factor": mx.array(0, mx.uint32)}

    def lowered(self, parameters: Any) -> Any:
        """Convert a tree's floating-point arrays to the type; a quantised layer's integers stay."""
        if self.dtype == mx.float32:
            return parameters
        return tree_map(lambda p: p.astype(self.dtype) if mx.issubdtype(p.dtype, mx.floating) else p, parameters)

    def scaled(self, loss: mx.array) -> mx.array:
        """Multiply a loss by the factor, if any."""
        return loss * self.state["loss_factor"] if self.state else loss

    def unscaled(self, gradients: Any) -> Any:
        """Divide the gradients by the factor, if any."""
        if not self.state:
            return gradients
        return tree_map(lambda g: g / self.state["loss_factor"], gradients)

    def settle(self, finite: mx.array) -> None:
        """Update the factor after a step whose gradient was `finite`, or not."""
        if not self.state:
            return
        factor, steps = self.state["loss_factor"], mx.where(finite, self.state["steps_of_loss_factor"] + 1, 0)
        doubled = steps == DOUBLED_AFTER
        factor = mx.where(finite, mx.where(doubled, mx.minimum(factor * 2, LARGEST_FACTOR), factor), factor / 2)
        self.state["loss_factor"], self.state["steps_of_loss_factor"] = factor, mx.where(doubled, 0, steps)


class TrainStep:
    """`step(batches, learning_rate) -> (mean loss, gradient norm, finite)`, lazy arrays; call `evaluate` to run them.

    If the gradient is not finite, a step changes nothing but the factor on a float16 loss. This class learns to predict
    tokens; subclasses have another loss (`_loss_by`) or compute gradients in another way (`_gradients`).
    """

    second = "perplexity"
    """Name of the second number of `losses`."""

    def __init__(
        self,
        model: Transformer,
        optimizer: Optimizer,
        smoothing: float = 0.1,
        clip_norm: float = 0.0,
        arithmetic: Arithmetic | None = None,
        group: Group = ALONE,
        max_logits: int | None = None,
    ):
        """Steps are split over the optimizer's streams, or compiled as a whole if it has none.

        clip_norm: largest gradient norm; 0: no clipping. group: the processes that take each step together, each with
        its own batches. max_logits: most logits in one chunk of the loss; None: `loss.MAX_LOGITS`.
        """
        self.model, self.optimizer, self.group = model, optimizer, group
        self.max_logits = max_logits
        self.smoothing, self.clip_norm = smoothing, clip_norm
        self.arithmetic = arithmetic or Arithmetic()
        self.zero_start = ZeroStart(model)
        self.streams = optimizer.streams
        self.frozen: Classifier | None = None
        """A classifier that isn't trained, dequantised once for all steps and streams."""
        classifier = self.zero_start.classifier(model.classifier()) if model.config.head.classifies else None
        if self.streams and classifier and not classifier.trained and self.arithmetic.dtype == mx.float32:
            self.frozen = classifier.unpacked()
        self.compilations = 0
        """Functions compiled so far, one for each shape of batches; 0 if steps are split over streams."""
        set_blas_threads(1)
        # Without the random state in here, a compiled step would repeat one dropout mask forever.
        state = [model.state, optimizer.state, self.arithmetic.state, mx.random.state]

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            return function if self.streams else mx.compile(self._counted(function), inputs=state, outputs=state)

        self._run, self._apply = compiled(self._step), compiled(self._finish)
        self._part = compiled(self._split_gradients if self.streams else self._gradients)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count the compilations of `function`: MLX calls it once for each new shape, and never again."""

        def traced(*arguments: Any) -> Any:
            self.compilations += 1
            return function(*arguments)

        return traced

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's and the arithmetic's arrays, as a tree. Not a copy: steps update its containers in place."""
        return {**self.optimizer.state, **self.arithmetic.state}

    @property
    def all(self) -> dict[str, Any]:
        """Everything a step changes: the trained parameters and the state."""
        return {"parameters": self.model.trainable_parameters(), "state": self.state}

    def take(self, all: dict[str, Any]) -> None:
        """Continue from `all`, the parameters and state of this process or another."""
        self.model.update(all["parameters"])
        self.restore(all["state"])

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from an earlier `state`."""
        assign(self.optimizer.state, state)
        assign(self.arithmetic.state, state)

    def __call__(
        self,
        batches: TrainingBatch | Sequence[TrainingBatch],
        learning_rate: float,
        tokens_of_all: int | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Take a step. tokens_of_all: target tokens in the batches of all processes; None: `batches` are all."""
        batches = batches if isinstance(batches, Sequence) else [batches]
        self.optimizer.set_rate(learning_rate)
        count = sum(batch.tokens for batch in batches) if tokens_of_all is None else tokens_of_all
        # Divided by this, the mean over the processes is the sum over all batches divided by all tokens.
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
        """Evaluate the new parameters, the optimizer's moments and `arrays`."""
        mx.eval(self.model.parameters(), self.state, *arrays)

    def loss(self, targets: mx.array, picked: Input, *inputs: Input) -> mx.array:
        """Sum the loss over a batch's targets (B, M), in nats.

        picked (B, M): the positions of the targets; None: all positions in order. inputs: arguments of
        `Transformer.hidden`.
        """
        return self._loss_by(label_smoothed_loss, targets, picked, inputs)

    def losses(self, batch: TrainingBatch) -> tuple[mx.array, mx.array]:
        """Return (the loss, the loss without label smoothing), each summed over a batch's targets, for validation.

        Subclasses return something else as second number, e.g. the number of right labels; `second` names it.
        """
        targets, picked, *inputs = self._inputs(batch)
        return self._loss_by(losses, targets, picked, inputs)

    def _loss_by(self, function: Callable[..., Any], targets: mx.array, picked: Input, inputs: Sequence[Input]) -> Any:
        classifier = self.frozen or self.zero_start.classifier(self.model.classifier())
        hidden = self.model.hidden(*inputs)
        hidden = hidden if picked is None else mx.take_along_axis(hidden, picked[..., None], axis=1)
        return function(hidden, classifier, targets, self.smoothing, self.model.config.pad_id, self.max_logits)

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
        elif finite.item():  # really skips the update; on a CPU waiting for `finite` costs nothing
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
                inputs_of_part: Any = (None if array is None else array[part] for array in inputs)
                loss, gradients = self._gradients(tokens, *inputs_of_part)
            losses.append(loss)
            parts_of_gradients.append(gradients)
        # All parts are built before any is evaluated. MLX limits the operations that wait in all CPU streams together,
        # so a part queued first would keep the others out (measured: 5,700 instead of 7,900 tokens/s).
        gradients = tree_map(spread(lambda *g: sum(g[1:], start=g[0]), self.streams), *parts_of_gradients)
        return sum(losses[1:], start=losses[0]), gradients

    def _gradients(self, tokens: mx.array, targets: mx.array, *inputs: Input) -> tuple[mx.array, Gradients]:
        """Return (mean loss, gradients of the trainable parameters, still times the arithmetic's factor)."""
        everything, trained = self.model.parameters(), self.model.trainable_parameters()

        def mean_loss(parameters) -> tuple[mx.array, mx.array]:
            self.model.update(self.arithmetic.lowered(everything))
            self.model.update(self.arithmetic.lowered(parameters))
            loss = self.loss(targets, *inputs) / tokens
            return self.arithmetic.scaled(loss), loss

        (_, loss), gradients = mx.value_and_grad(mean_loss)(trained)
        self.model.update(everything)
        return loss, self.zero_start.masked(gradients)


def _clip(gradients: Gradients, largest: float, streams: Sequence[mx.Stream] = ()) -> tuple[mx.array, Gradients]:
    """Return (norm of all gradients together, gradients scaled so that it is at most `largest`); 0: no scaling."""
    squares = tree_map(spread(lambda g: mx.sum(mx.square(g.astype(mx.float32))), streams), gradients)
    norm = mx.sqrt(sum((cast(mx.array, each) for _, each in tree_flatten(squares)), start=mx.array(0.0)))
    if largest <= 0:
        return norm, gradients
    factor = mx.minimum(largest / (norm + 1e-6), 1.0)
    return norm, tree_map(spread(lambda g: g * factor.astype(g.dtype), streams), gradients)


def assign(tree: Any, values: Any) -> None:
    """Put `values` into a tree of dicts and lists in place, since a compiled function refers to the containers.

    `values` may lack containers without arrays (modules without parameters).
    """
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        if not isinstance(tree[key], (dict, list)):
            tree[key] = values[key]
        elif tree_flatten(tree[key]):
            assign(tree[key], values[key])
