"""Decoders that start from a vector of zeros, as Marian's do: training leaves it as it is.

It is the row that padding and start token share, the last one. No output may be this token: its bias bars it, and the
loss is of the others.

The optimizers of `mlx.optimizers` by name, and the learning rates that a schedule gives them.

One learning rate serves all optimizers: a schedule gives Adam's, and an optimizer whose updates are of another size
multiplies it. Weight decay is decoupled, for the parameters that it suits. Moments are float32, as the parameters are.

A schedule is a warm-up, in steps or as a share of the run, and one of six curves after it:

    inverse-square-root    peak (warm-up / step)^0.5; section 5.3's curve, its peak bounded in short runs
    noam                   the same with the paper's own peak, (d_model * warm-up)^-0.5
    constant               peak
    linear, cosine         from the peak at the end of warm-up to 0 at the end of the run
    warmup-stable-decay    peak, then the falling end

The first two and the last may have a falling end: linear, to 0, over the last share `cooldown` of the run.

Where the rate falls to 0 by the end of the run, the warm-up takes at most half of it, so that a short run reaches its
peak. Other schedules don't depend on the run's length: one that goes on with --resume is as if it had been longer from
its start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map_with_path

from mlx_transformer.core.parameters import (
    BARRED,
    added_table_names,
    embedding_names,
    output_weight_name,
    target_embedding_name,
)
from mlx_transformer.device import cpu_streams, tuning
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.classifier import Classifier
from mlx_transformer.nn.parameters import named_arrays, named_parameters
from mlx_transformer.system.errors import UserError

from .options import ENDLESS, TrainingOptions


class ZeroStart:
    """The row of a model that stays zero: nothing, unless its decoder starts with padding and that row is zeros."""

    def __init__(self, model: Transformer):
        config, parameters = model.config, dict(named_parameters(model))
        name = target_embedding_name(config)
        table, bias = parameters.get(name), parameters.get("output_proj.bias")
        self._module: str | None = None
        self._row, self._outputs = config.bos_id, config.vocab_size
        if not config.has_decoder or config.bos_id != config.pad_id:
            return
        if table is not None and mx.issubdtype(table.dtype, mx.floating) and not mx.any(table[self._row]).item():
            self._module = name.removesuffix(".weight")
        if bias is not None:
            self._outputs = 1 + int(np.flatnonzero(np.array(bias.astype(mx.float32)) > BARRED)[-1])

    def classifier(self, classifier: Classifier) -> Classifier:
        """The model's classifier without the outputs at the end that the bias bars."""
        every = self._outputs == classifier.config.vocab_size
        return classifier if every else classifier.among(slice(self._outputs))

    def masked(self, gradients: Any) -> Any:
        """Return the gradients, with zeros for the row."""
        if (gradient := gradients.get(self._module, {}).get("weight")) is not None:
            gradient[self._row] = 0
        return gradients


NO_DECAY = "*.bias, *norm.weight, *embedding.weight, *.positions.*weight, *.magnitude"


# Where warm-up isn't given: a quarter of the run, at most the paper's steps. Where it is: see above.
WARMUP_SHARE, MOST_WARMUP_STEPS, LONGEST_WARMUP_SHARE = 0.25, 4000, 0.5
# The shorter the warm-up, the higher the paper's peak, (d_model * warm-up)^-0.5. Below this many steps for each unit of
# d_model it grows no more, but stays at 0.58 / d_model: at 0.93 / d_model a tiny model learned nothing, and what Adam
# takes falls with the width (Yang et al. 2021, "Tensor Programs V").
STEEPEST = 3
SMALL = 1 << 14
"""The most numbers of an array that aren't worth another stream's waiting for them."""


def spread(function: Callable[..., Any], streams: Sequence[mx.Stream]) -> Callable[..., Any]:
    """Return `function` of an array (and more) so that its calls work side by side on the streams.

    A call goes to the stream that has had the fewest numbers to work on so far, small arrays to the first one. Which
    stream computes a result changes nothing in it. Without a second stream it is `function` itself.
    """
    if len(streams) < 2:
        return function
    loads = [0] * len(streams)

    def on_a_stream(array: mx.array, *more: Any) -> Any:
        least = loads.index(min(loads)) if array.size > SMALL else 0
        loads[least] += array.size
        with mx.stream(streams[least]):
            return function(array, *more)

    return on_a_stream


class ScaledMuon(optim.Muon):
    """Muon with updates as large as Adam's, so that both take a like learning rate.

    An orthogonal (O, D) matrix has a root mean square of max(O, D)^-0.5, Adam's updates one of about 0.2 (Liu et al.
    2025, "Muon is Scalable for LLM Training", section 2.2).
    """

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        rows, columns = parameter.shape
        change = super().apply_single(gradient, parameter, state) - parameter
        return parameter + 0.2 * max(rows, columns) ** 0.5 / max(1, rows / columns) ** 0.5 * change


def _adam(options: TrainingOptions) -> dict[str, Any]:
    # MLX's default leaves bias correction off.
    return {"betas": [options.beta1, options.beta2], "eps": options.epsilon, "bias_correction": True}


@dataclass(frozen=True)
class Kind:
    base: Any
    """The optimizer of MLX."""
    arguments: Callable[[TrainingOptions], dict[str, Any]]
    rate: float = 1.0
    """Its learning rate over Adam's."""
    decay: float = 0.0
    """The weight decay where the recipe gives none."""

    def make(self, options: TrainingOptions, streams: Sequence[mx.Stream]) -> optim.Optimizer:
        """Make the optimizer, which updates the parameters side by side on `streams`."""

        class SideBySide(self.base):
            def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
                return update(gradient, parameter, state)

        made = SideBySide(learning_rate=1.0, **self.arguments(options))
        update = spread(super(SideBySide, made).apply_single, streams)
        return made


KINDS = {
    "adam": Kind(optim.Adam, _adam),
    "adamw": Kind(optim.Adam, _adam, decay=0.01),
    # Without a first moment, at the schedule's rate and not one of its own (Shazeer and Stern 2018).
    "adafactor": Kind(optim.Adafactor, lambda o: {"scale_parameter": False, "relative_step": False}),
    # Its updates have a root mean square of 1 (Chen et al. 2023: a rate 3 to 10 times below Adam's).
    "lion": Kind(optim.Lion, lambda o: {"betas": [o.beta1, o.beta2]}, rate=0.2, decay=0.05),
    # Measured (benchmarks/RESULTS.md, "What the defaults learn"): Adam's rate is too low for it.
    "muon": Kind(ScaledMuon, lambda o: {"weight_decay": 0.0}, rate=2.0, decay=0.01),
}


class Optimizer:
    """`update(model, gradients)` changes the model's parameters as the recipe's optimizer does.

    Weight decay is decoupled (Loshchilov and Hutter 2019): p <- p (1 - rate * decay) before the update, for the
    parameters whose name no pattern of no_decay fits. Muon takes the matrices inside the stacks, Adam all others.
    """

    def __init__(self, model: Transformer, options: TrainingOptions, streams: Sequence[mx.Stream] | None = None):
        """`streams`: those that a step is split over, none for a step that is compiled as a whole; None: as MLX's
        device likes it."""
        if streams is None:
            streams = [] if tuning().compiles else cpu_streams()
        self.streams = list(streams)
        kind = KINDS[options.optimizer_name]
        trained = [name for name, _ in named_arrays(model.trainable_parameters())]
        self._rate = kind.rate
        self._decay = kind.decay if options.weight_decay is None else options.weight_decay
        exempt = matching(trained, options.no_decay or NO_DECAY, "no_decay", strict=options.no_decay is not None)
        self._decayed = frozenset(trained) - exempt if self._decay else frozenset()
        self.inner = kind.make(options, self.streams)
        if options.optimizer_name == "muon":
            tables = embedding_names(model.config) | added_table_names(model.config)
            tables |= {output_weight_name(model.config)}
            self.inner = optim.MultiOptimizer(
                [self.inner, KINDS["adam"].make(options, self.streams)],
                [lambda name, value: value.ndim == 2 and name not in tables],
            )
        self.inner.init(model.trainable_parameters())

    @property
    def state(self) -> dict[str, Any]:
        """The moments and counts, as a tree of arrays; the optimizer works on these very containers."""
        # For several optimizers MLX makes a new list each time, of the same dictionaries.
        return self.inner.state

    def set_rate(self, rate: float) -> None:
        """Take `rate`, the schedule's, from the next update on."""
        self.inner.learning_rate = mx.array(rate * self._rate, dtype=mx.float32)

    def update(self, model: Transformer, gradients: Any) -> None:
        """Change the model's trainable parameters by one step down `gradients`, a tree of their structure."""
        parameters: Any = model.trainable_parameters()
        if self._decayed:
            keep = 1 - self.inner.learning_rate * self._decay
            parameters = tree_map_with_path(lambda name, p: p * keep if name in self._decayed else p, parameters)
        updated: Any = self.inner.apply_gradients(gradients, parameters)
        model.update(updated)


def freeze(model: Transformer, patterns: str) -> None:
    """Keep the parameters that one of the patterns fits as they are. `UserError` if a pattern fits none, or all are."""
    names = [name for name, _ in named_arrays(model.parameters())]
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
    """Return those of the names that one of the patterns fits.

    Patterns stand between commas: `encoder.*, *norm.weight`. `UserError` naming `key` if `strict` and a pattern fits no
    name: it is a slip.
    """
    names, chosen = list(names), set[str]()
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        fitting = {name for name in names if fnmatchcase(name, pattern)}
        if strict and not fitting:
            raise UserError(f"{key}: {pattern!r} fits no {what}; they are called such as {names[0]} and {names[-1]}")
        chosen |= fitting
    return frozenset(chosen)


def learning_rate(options: TrainingOptions, d_model: int, step: int, share: float) -> float:
    """Return the rate of step `step` (counted from 1); the share of the run done before it is `share`, in [0, 1]."""
    warmup = warm_up(options, step, share)
    if options.schedule in ("noam", "inverse-square-root"):
        rate = noam(step, d_model, warmup, _scale(options, d_model, warmup))
    else:
        rate = peak(options, d_model, warmup) * min(
            step / warmup, _after_warm_up(options.schedule, step, share, warmup)
        )
    return rate if options.schedule in ENDLESS else rate * cooldown(share, options.cooldown)


def _after_warm_up(schedule: str, step: int, share: float, warmup: float) -> float:
    """Return the factor on the peak; the steps of a run that ends by the clock are estimated, as in `warmup_steps`."""
    if schedule in ("constant", "warmup-stable-decay"):
        return 1.0
    warm = warmup * share / step  # the warm-up's share of the run
    done = 0.0 if share <= warm else min(1.0, (share - warm) / (1 - warm))
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def warm_up(options: TrainingOptions, step: int, share: float) -> float:
    """Return the steps of the warm-up: the recipe's, or fewer in a run too short for them, or those that follow from
    the run's length; `step` and `share` are as in `warmup_steps`."""
    if options.warmup_steps is None:
        return warmup_steps(step, share)
    if share <= 0 or not falls(options):
        return options.warmup_steps
    return min(options.warmup_steps, LONGEST_WARMUP_SHARE * step / share)


def falls(options: TrainingOptions) -> bool:
    """Say whether the rate falls to 0 by the end of the run."""
    return options.schedule in ("linear", "cosine") or (options.schedule not in ENDLESS and options.cooldown > 0)


def warmup_steps(step: int, share: float) -> float:
    """Return the warm-up steps where the recipe gives none, of a run whose first `step` steps are about its `share`.

    A run that ends by the clock doesn't know its number of steps before its end: it is estimated anew at every step,
    from these two numbers alone, so that the same shares give the same rates.
    """
    return min(MOST_WARMUP_STEPS, WARMUP_SHARE * step / share) if share > 0 else MOST_WARMUP_STEPS


def peak(options: TrainingOptions, d_model: int, warmup: float) -> float:
    """Return the rate at the end of a warm-up of `warmup` steps. One shorter than the recipe's has the peak of the
    recipe's: it is steeper, not higher."""
    return noam(warmup, d_model, warmup, _scale(options, d_model, warmup))


def _scale(options: TrainingOptions, d_model: int, warmup: float) -> float:
    if options.learning_rate is not None:
        return options.learning_rate * (d_model * warmup) ** 0.5
    unbounded = warmup if options.schedule == "noam" else STEEPEST * d_model
    short = min(1.0, warmup / (options.warmup_steps or unbounded)) ** 0.5
    return options.learning_rate_scale * short


def noam(step: float, d_model: int, warmup_steps: float, scale: float = 1.0) -> float:
    """Return scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), formula 3 of the paper; step counts
    from 1."""
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def cooldown(progress: float, share: float) -> float:
    """Return a factor that falls linearly from 1 to 0 over the last `share` of the run; with a share of 0 always 1.

    `progress` is in [0, 1].

    The paper stops training at a high rate and averages checkpoints instead; a falling rate does the same for short
    runs.
    """
    if share <= 0 or progress <= 1 - share:
        return 1.0
    return max(0.0, (1 - progress) / share)
