"""The optimizers of `mlx.optimizers` by name, with decoupled weight decay for the parameters that it suits.

One learning rate serves all of them: what a schedule gives is Adam's, and an optimizer whose updates are of another
size multiplies it. Moments are float32, as the parameters that are trained are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_transformer.core.parameters import added_table_names, embedding_names, output_weight_name
from mlx_transformer.nn import Transformer
from mlx_transformer.system.errors import UserError

from .options import TrainingOptions
from .spread import spread

NO_DECAY = "*.bias, *norm.weight, *embedding.weight, *.positions.weight, *.magnitude"


@dataclass(frozen=True)
class Kind:
    make: Callable[[TrainingOptions], optim.Optimizer]
    rate: float = 1.0
    """Its learning rate over Adam's."""
    decay: float = 0.0
    """Weight decay where the recipe gives none."""


def _adam(options: TrainingOptions) -> optim.Optimizer:
    # MLX's default leaves bias correction off.
    return optim.Adam(1.0, [options.beta1, options.beta2], options.epsilon, bias_correction=True)


def _adafactor(options: TrainingOptions) -> optim.Optimizer:
    """Without a first moment and with the schedule's rate, not one of its own (Shazeer and Stern 2018)."""
    return optim.Adafactor(1.0, scale_parameter=False, relative_step=False)


def _lion(options: TrainingOptions) -> optim.Optimizer:
    return optim.Lion(1.0, [options.beta1, options.beta2])


class Muon(optim.Muon):
    """Muon with updates as large as Adam's, so that both take a like learning rate (Liu et al. 2025, "Muon is Scalable
    for LLM Training", section 2.2): an orthogonal (O, D) matrix has a root mean square of max(O, D)^-0.5,
    Adam's updates one of about 0.2."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        rows, columns = parameter.shape
        change = super().apply_single(gradient, parameter, state) - parameter
        return parameter + 0.2 * max(rows, columns) ** 0.5 / max(1, rows / columns) ** 0.5 * change


def _muon(options: TrainingOptions) -> optim.Optimizer:
    return Muon(1.0, weight_decay=0.0)


KINDS = {
    "adam": Kind(_adam),
    "adamw": Kind(_adam, decay=0.01),
    "adafactor": Kind(_adafactor),
    # Its updates have a root mean square of 1 (Chen et al. 2023: a rate 3 to 10 times below Adam's).
    "lion": Kind(_lion, rate=0.2, decay=0.05),
    # Measured (benchmarks/RESULTS.md, "What the defaults learn"): Adam's rate is too low for it.
    "muon": Kind(_muon, rate=2.0, decay=0.01),
}


class Optimizer:
    """`update(model, gradients)` changes the model's parameters as the recipe's optimizer does.

    Weight decay is decoupled (Loshchilov and Hutter 2019): p <- p (1 - rate * decay) before the update, for the
    parameters whose name no pattern of no_decay fits. Muon takes the matrices inside the stacks, Adam all others.
    """

    def __init__(self, model: Transformer, options: TrainingOptions):
        kind = KINDS[options.optimizer_name]
        trained = [name for name, _ in _flat(model.trainable_parameters())]
        self._rate = kind.rate
        self._decay = kind.decay if options.weight_decay is None else options.weight_decay
        exempt = matching(trained, options.no_decay or NO_DECAY, "no_decay", strict=options.no_decay is not None)
        self._decayed = frozenset(trained) - exempt if self._decay else frozenset()
        self.inner = kind.make(options)
        if options.optimizer_name == "muon":
            tables = embedding_names(model.config) | added_table_names(model.config)
            tables |= {output_weight_name(model.config)}
            self.inner = optim.MultiOptimizer(
                [self.inner, _adam(options)], [lambda name, value: value.ndim == 2 and name not in tables]
            )
        self.inner.init(model.trainable_parameters())

    @property
    def state(self) -> dict[str, Any]:
        """Moments and counts, as a tree of arrays; the optimizer works on these very containers."""
        # Of several optimizers MLX makes a new list each time, of the same dictionaries.
        return self.inner.state

    def spread(self, streams: Sequence[mx.Stream]) -> None:
        """Update the parameters side by side on these streams from now on."""
        for each in getattr(self.inner, "optimizers", [self.inner]):
            each.apply_single = spread(each.apply_single, streams)

    def set_rate(self, rate: float) -> None:
        """`rate`: the schedule's."""
        self.inner.learning_rate = mx.array(rate * self._rate, dtype=mx.float32)

    def update(self, model: Transformer, gradients: Any) -> None:
        parameters: Any = model.trainable_parameters()
        if self._decayed:
            keep = 1 - self.inner.learning_rate * self._decay
            parameters = tree_map_with_path(lambda name, p: p * keep if name in self._decayed else p, parameters)
        updated: Any = self.inner.apply_gradients(gradients, parameters)
        model.update(updated)


def freeze(model: Transformer, patterns: str) -> None:
    """Keep the parameters that one of the patterns fits as they are. `UserError` if a pattern fits none, or all are."""
    names = [name for name, _ in _flat(model.parameters())]
    chosen = matching(names, patterns, "freeze")
    if chosen == set(names):
        raise UserError(f"freeze: {patterns!r} fits every parameter, so that nothing would be trained")
    for path, module in model.named_modules():
        within = {name.removeprefix(f"{path}.") if path else name for name in chosen if name.startswith(path)}
        keys = [key for key in module if key in within and isinstance(module[key], mx.array)]
        if keys:
            module.freeze(recurse=False, keys=keys)


def matching(
    names: Iterable[str], patterns: str, key: str, strict: bool = True, what: str = "parameter"
) -> frozenset[str]:
    """Those of the names that one of the patterns fits, which stand between commas: `encoder.*, *norm.weight`.

    `UserError` naming `key` if `strict` and a pattern fits none: it is a slip.
    """
    names, found = list(names), set[str]()
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        fitting = {name for name in names if fnmatchcase(name, pattern)}
        if strict and not fitting:
            raise UserError(f"{key}: {pattern!r} fits no {what}; they are called such as {names[0]} and {names[-1]}")
        found |= fitting
    return frozenset(found)


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))
