"""Optimizers and learning rate schedules.

`Optimizer` wraps an optimizer of `mlx.optimizers`. Schedules give Adam's learning rate; optimizers with updates of
another size multiply it (e.g. lion by 0.2). Weight decay is decoupled and skips e.g. biases and norms. Parameters and
moments are float32.

A schedule is a warm-up, in steps or as a share of the run, and one of six curves after it:

    inverse-square-root    peak (warm-up / step)^0.5: section 5.3's curve, with a bounded peak in short runs
    noam                   the same with the paper's peak, (d_model * warm-up)^-0.5
    constant               the peak, to the end
    linear, cosine         from the peak at the end of warm-up down to 0 at the end of the run
    warmup-stable-decay    the peak, then the cooldown

The first two and the last may end in a cooldown: a linear fall to 0 over the last share `cooldown` of the run.

If the rate falls to 0 by the end of the run, warm-up takes at most half of the run, so a short run reaches its peak.
Other schedules don't depend on the run's length: a run that is extended with --resume is the same as a run that was
longer from the start.

`ZeroStart` is for decoders that start from a zero vector, such as Marian's: training keeps this embedding zero.
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
    """Keeps the start token's embedding zero, if the decoder starts with padding (bos_id == pad_id) and that row is
    zeros. Otherwise it changes nothing.

    If the output bias bars tokens at the end of the vocabulary, e.g. padding, the loss leaves them out.
    """

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
        """The classifier without the barred outputs at the end of the vocabulary."""
        every = self._outputs == classifier.config.vocab_size
        return classifier if every else classifier.among(slice(self._outputs))

    def masked(self, gradients: Any) -> Any:
        """Set the row's gradient to zero."""
        if (gradient := gradients.get(self._module, {}).get("weight")) is not None:
            gradient[self._row] = 0
        return gradients


NO_DECAY = "*.bias, *norm.weight, *embedding.weight, *.positions.*weight, *.magnitude"


# Without warmup_steps, warm-up is WARMUP_SHARE of the run, at most the paper's 4000 steps. With warmup_steps, it is cut
# to LONGEST_WARMUP_SHARE of the run if the rate falls to 0 at the end.
WARMUP_SHARE, MOST_WARMUP_STEPS, LONGEST_WARMUP_SHARE = 0.25, 4000, 0.5
# The paper's peak, (d_model * warm-up)^-0.5, grows as warm-up gets shorter. From STEEPEST * d_model steps down it stays
# at 0.58 / d_model: at 0.93 / d_model a tiny model learned nothing, and Adam's highest stable rate falls with the width
# (Yang et al. 2021, "Tensor Programs V").
STEEPEST = 3
SMALL = 1 << 14
"""Arrays of at most so many numbers stay on the first stream: moving them isn't worth the synchronisation."""


def spread(function: Callable[..., Any], streams: Sequence[mx.Stream]) -> Callable[..., Any]:
    """Wrap a function of an array (and more) so that its calls run in parallel on the streams.

    A call goes to the stream with the fewest numbers so far; small arrays go to the first stream. Results don't
    depend on the stream. With fewer than two streams, returns `function` itself.
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
    """Muon with updates as large as Adam's, so that both take similar learning rates.

    An orthogonal (O, D) matrix has a root mean square of max(O, D)^-0.5; Adam's updates have one of about 0.2 (Liu et
    al. 2025, "Muon is Scalable for LLM Training", section 2.2).
    """

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        rows, columns = parameter.shape
        change = super().apply_single(gradient, parameter, state) - parameter
        return parameter + 0.2 * max(rows, columns) ** 0.5 / max(1, rows / columns) ** 0.5 * change


def _adam(options: TrainingOptions) -> dict[str, Any]:
    # bias correction is off by default in MLX
    return {"betas": [options.beta1, options.beta2], "eps": options.epsilon, "bias_correction": True}


@dataclass(frozen=True)
class Kind:
    base: Any
    """A class of `mlx.optimizers`."""
    arguments: Callable[[TrainingOptions], dict[str, Any]]
    rate: float = 1.0
    """Factor on the schedule's learning rate, which is Adam's."""
    decay: float = 0.0
    """Weight decay if the recipe gives none."""

    def make(self, options: TrainingOptions, streams: Sequence[mx.Stream]) -> optim.Optimizer:
        """Make the optimizer; it updates parameters in parallel on `streams`."""

        class SideBySide(self.base):
            def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
                return update(gradient, parameter, state)

        made = SideBySide(learning_rate=1.0, **self.arguments(options))
        update = spread(super(SideBySide, made).apply_single, streams)
        return made


KINDS = {
    "adam": Kind(optim.Adam, _adam),
    "adamw": Kind(optim.Adam, _adam, decay=0.01),
    # Without a first moment, and at the schedule's rate instead of its own (Shazeer and Stern 2018).
    "adafactor": Kind(optim.Adafactor, lambda o: {"scale_parameter": False, "relative_step": False}),
    # Lion's updates have a root mean square of 1 (Chen et al. 2023: a rate 3 to 10 times below Adam's).
    "lion": Kind(optim.Lion, lambda o: {"betas": [o.beta1, o.beta2]}, rate=0.2, decay=0.05),
    # Adam's rate is too low for Muon (measured: benchmarks/RESULTS.md, "What the defaults learn").
    "muon": Kind(ScaledMuon, lambda o: {"weight_decay": 0.0}, rate=2.0, decay=0.01),
}


class Optimizer:
    """The recipe's optimizer; `update(model, gradients)` takes a step.

    Weight decay is decoupled (Loshchilov and Hutter 2019): p <- p (1 - rate * decay) before the update, unless the
    parameter's name matches `no_decay`. Muon updates the matrices inside the stacks, Adam all other parameters.
    """

    def __init__(self, model: Transformer, options: TrainingOptions, streams: Sequence[mx.Stream] | None = None):
        """`streams`: the CPU streams that a step is split over; [] if it is compiled as a whole. None: choose for the
        device."""
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
        """Moments and step counts, as a tree of arrays. Not a copy: changes to its containers change the optimizer."""
        # MLX makes a new list for several optimizers each time, but of the same dictionaries.
        return self.inner.state

    def set_rate(self, rate: float) -> None:
        """Use the schedule's `rate` from the next update on."""
        self.inner.learning_rate = mx.array(rate * self._rate, dtype=mx.float32)

    def update(self, model: Transformer, gradients: Any) -> None:
        """Update the trainable parameters; `gradients` is a tree of the same structure."""
        parameters: Any = model.trainable_parameters()
        if self._decayed:
            keep = 1 - self.inner.learning_rate * self._decay
            parameters = tree_map_with_path(lambda name, p: p * keep if name in self._decayed else p, parameters)
        updated: Any = self.inner.apply_gradients(gradients, parameters)
        model.update(updated)


def freeze(model: Transformer, patterns: str) -> None:
    """Freeze the parameters whose names match one of the patterns, e.g. "encoder.*, *embedding.*".

    Raises UserError if a pattern matches no parameter, or all parameters are frozen.
    """
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
    """Return the names that match one of the comma-separated patterns, e.g. "encoder.*, *norm.weight".

    If `strict`, raises UserError for a pattern that matches no name, since it is probably a typo. key: the recipe key,
    for the error.
    """
    names, chosen = list(names), set[str]()
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        fitting = {name for name in names if fnmatchcase(name, pattern)}
        if strict and not fitting:
            raise UserError(f"{key}: {pattern!r} fits no {what}; they are called such as {names[0]} and {names[-1]}")
        chosen |= fitting
    return frozenset(chosen)


def learning_rate(options: TrainingOptions, d_model: int, step: int, share: float) -> float:
    """The learning rate of step `step`, counted from 1. share: the part of the run done before it, in [0, 1]."""
    warmup = warm_up(options, step, share)
    if options.schedule in ("noam", "inverse-square-root"):
        rate = noam(step, d_model, warmup, _scale(options, d_model, warmup))
    else:
        rate = peak(options, d_model, warmup) * min(
            step / warmup, _after_warm_up(options.schedule, step, share, warmup)
        )
    return rate if options.schedule in ENDLESS else rate * cooldown(share, options.cooldown)


def _after_warm_up(schedule: str, step: int, share: float, warmup: float) -> float:
    """The factor on the peak. The length of a run that ends by the clock is estimated, as in `warmup_steps`."""
    if schedule in ("constant", "warmup-stable-decay"):
        return 1.0
    warm = warmup * share / step  # share of the run that is warm-up
    done = 0.0 if share <= warm else min(1.0, (share - warm) / (1 - warm))
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def warm_up(options: TrainingOptions, step: int, share: float) -> float:
    """The number of warm-up steps: the recipe's, fewer if the run is too short for them; without any in the recipe,
    `warmup_steps(step, share)`."""
    if options.warmup_steps is None:
        return warmup_steps(step, share)
    if share <= 0 or not falls(options):
        return options.warmup_steps
    return min(options.warmup_steps, LONGEST_WARMUP_SHARE * step / share)


def falls(options: TrainingOptions) -> bool:
    """Whether the learning rate falls to 0 by the end of the run."""
    return options.schedule in ("linear", "cosine") or (options.schedule not in ENDLESS and options.cooldown > 0)


def warmup_steps(step: int, share: float) -> float:
    """The number of warm-up steps if the recipe gives none. `step` steps are about the share `share` of the run.

    A run that ends by the clock can't know its number of steps. It is estimated anew at every step, only from these
    two numbers, so that a resumed run with the same shares gets the same rates.
    """
    return min(MOST_WARMUP_STEPS, WARMUP_SHARE * step / share) if share > 0 else MOST_WARMUP_STEPS


def peak(options: TrainingOptions, d_model: int, warmup: float) -> float:
    """The learning rate at the end of a warm-up of `warmup` steps. If warm-up was cut short, the peak stays that of the
    recipe's `warmup_steps`: the rate rises more steeply, not higher."""
    return noam(warmup, d_model, warmup, _scale(options, d_model, warmup))


def _scale(options: TrainingOptions, d_model: int, warmup: float) -> float:
    if options.learning_rate is not None:
        return options.learning_rate * (d_model * warmup) ** 0.5
    unbounded = warmup if options.schedule == "noam" else STEEPEST * d_model
    short = min(1.0, warmup / (options.warmup_steps or unbounded)) ** 0.5
    return options.learning_rate_scale * short


def noam(step: float, d_model: int, warmup_steps: float, scale: float = 1.0) -> float:
    """Formula 3 of the paper times `scale`: d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5). step counts from
    1."""
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def cooldown(progress: float, share: float) -> float:
    """A factor that falls linearly from 1 to 0 over the last `share` of the run; always 1 for a share of 0.

    progress: in [0, 1]. The paper stops at a high rate and averages checkpoints instead; in short runs a falling rate
    has the same effect.
    """
    if share <= 0 or progress <= 1 - share:
        return 1.0
    return max(0.0, (1 - progress) / share)
