"""Find the operation behind an error: run each operation near the first tap over budget separately.

A tap over budget shows the place of an error, not its cause. So every operation is given the reference's values as its
inputs, rounded to float32. Its result then has only its own error. It is judged by the usual rule: t64 is the same
operation in float64 on the same inputs, e32 its error in float32.

An exported graph is cut at every known point: the point becomes an input with the reference's value, and the value that
the graph computes there becomes an output. MLX's modules are wrapped to return the reference's values instead.

Then guess the mistake: change the reference in a typical way, e.g. with another epsilon or without a bias. A guess is
reported only if it explains the error: the remaining error is at most a hundredth of the original, or twice float32's
own error (twice, as the guess is computed differently).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import onnx
from numpy.typing import NDArray

from export.graph.protos import COMPUTED, cut
from export.interface import DECODER_FIRST, DECODER_MERGED, DECODER_NEXT, ENCODER, GRAPHS, MODEL, PARTS, STATE
from export.targets.portable.runtime import positions
from export.validate.cases import (
    Case,
    full_pass,
    reference_logits,
    reference_memory,
    reference_started,
    reference_step,
    started,
)
from export.validate.engines.graph_points import points_of
from export.validate.engines.mlx_engine import replacing
from export.validate.engines.protocol import Engine
from export.validate.points import makers, operation, positions_first, tap_names
from export.validate.reference import Cache, Parameters, Reference, Tap
from export.validate.reference.layers import Past, activation, norm
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth
from mlx_transformer.core.config import Activation, TransformerConfig

Array = NDArray


@dataclass(frozen=True)
class Culprit:
    """The operation behind an error.

    `tap`, `path`, `case`: where the error shows. `point`, `operation`: its cause; "" if no single operation is over
    budget. `why`: the likely mistake, e.g. "epsilon 1e-06, not 1e-05", or why there is no culprit.
    """

    runtime: str
    path: str
    tap: str
    case: str
    point: str
    operation: str
    measurement: Measurement | None
    why: str = ""
    points: int = 0
    """How many operations were run separately."""

    @property
    def sentence(self) -> str:
        place = self.tap if self.point in ("", self.tap) else self.point.rpartition(".")[0]
        if self.point.endswith("norm") and not self.point.startswith(f"{self.tap}."):
            place = self.point
        return f"{place}: {self.operation or 'no single operation'}{f' ({self.why})' if self.why else ''}"


def isolate(
    engine: Engine, weights: Parameters, case: Case, path: str, tap: str, position: int | None = None
) -> Culprit:
    """Run the operations behind a failing tap separately. position: a failing position, to choose the cached pass."""
    config = engine.config
    part = None
    if path.startswith("cached") and not tap.startswith("encoder."):
        passes = case.passes()
        part = next((p for p in passes if position is not None and p.start <= position < p.stop), passes[-1])
    nobody = Culprit(engine.name, path, tap, case.name, "", "", None)
    setting = isolated_inputs(config, weights, case, part)
    if engine.is_training:
        return replace(nobody, operation="dropout", why="the model is in training mode")
    try:
        run = run_onnx if engine.capabilities.isolates == "onnx" else run_mlx
        computed = run(engine, setting, path, tap)
    except Exception as error:  # each runtime has its own exceptions
        return _named(nobody, " ".join(str(error).split()), list(setting.truth64), config)
    region = _region(list(setting.inputs), tap_names(config), tap)
    common = computed.keys() & setting.truth64.keys()
    values = {point: _aligned(point, computed[point], setting) for point in region if point in common}
    judged = [(point, _judge(point, *each, engine)) for point, each in values.items()]
    wrong = [(point, measurement) for point, measurement in judged if not measurement.passed]
    if not wrong:
        why = f"each of {len(judged)} operations is within its budget; their errors add up"
        return replace(nobody, why=why, points=len(judged))
    point, measurement = max(wrong, key=lambda pair: pair[1].share)
    got, t64, t32, valid = values[point]
    natural = float(np.abs(t32 - t64)[valid].sum())
    why = likely_mistake(point, config, weights, setting.inputs, got, t64, natural, valid)
    return replace(
        nobody, point=point, operation=operation(point, config), measurement=measurement, why=why, points=len(judged)
    )


def _region(points: list[str], taps: list[str], tap: str) -> list[str]:
    """Return the points after the previous tap up to this tap, and all points inside this tap."""
    i = taps.index(tap)
    earlier = taps[i - 1] if i and taps[i - 1] in points else None
    start = points.index(earlier) + 1 if earlier is not None else 0
    stop = points.index(tap) + 1
    return [p for k, p in enumerate(points) if start <= k < stop or p.startswith(f"{tap}.")]


def _aligned(point: str, got: Array, s: IsolatedInputs) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """Return (computed, float64, float32 value of a point, valid positions (B,L)), with positions before heads."""
    got, t64, t32 = (positions_first(x) for x in (got, s.truth64[point], s.truth32[point]))
    return got, t64, t32, valid_at(point, s.case, s.part, t64.shape[1])


def _judge(point: str, got: Array, t64: Array, t32: Array, valid: NDArray[np.bool_], engine: Engine) -> Measurement:
    if got.shape != t64.shape:
        deviation = Deviation.of(got, Truth(t64, np.ones(t64.shape[:2], bool), ErrorScale(0.0, 0.0, 0.0, 0, 0.0)))
        return Measurement(False, np.inf, np.inf, np.inf, deviation)
    truth = Truth.of(t64, t32, valid, exact=".embedding" in point and engine.is_exact)
    return Measurement.of(Deviation.of(got, truth), truth.scale, truth.scale, engine.budget)


def _named(nobody: Culprit, message: str, points: list[str], config: TransformerConfig) -> Culprit:
    """Find the operation named in a runtime's error message."""
    message = message.replace("/positions/", "/embedding/")
    spelled = {point.replace(".", "/").replace("layers/", "layers."): point for point in points}
    named = [point for scope, point in spelled.items() if f"{scope}/" in message]
    point = max(named, key=len) if named else ""
    return replace(nobody, point=point, operation=point and operation(point, config), why=f"fails: {message[:200]}")


@dataclass(frozen=True)
class IsolatedInputs:
    """A pass of the reference, split at its points.

    `inputs`: {point: the reference's value, rounded to float32}. `truth64`, `truth32`: {point: its operation's result
    from these inputs}, in float64 and in float32.
    """

    case: Case
    part: slice | None
    """The decoder's positions of this pass; None for a full pass without a cache."""
    before: Cache | None
    """The reference's cache before the pass, rounded to float32."""
    earlier: tuple[Mapping[str, Array], ...]
    """`inputs` of earlier passes, for MLX, which fills its own cache."""
    memory: Array | None
    """The encoder's output (B,S,D), for models with both stacks."""
    inputs: Mapping[str, Array]
    truth64: Mapping[str, Array]
    truth32: Mapping[str, Array]


def isolated_inputs(config: TransformerConfig, weights: Parameters, case: Case, part: slice | None) -> IsolatedInputs:
    truth64 = Reference(config, weights, inner_points=True)
    truth32 = Reference(config, weights, np.float32, inner_points=True)
    inputs: dict[str, Array] = {}
    earlier: list[Mapping[str, Array]] = []
    before = None
    if part is not None:
        before = reference_started(truth64, case)
        source = dict(_source_points(before))
        for one in case.passes():
            if one.start == part.start:
                break
            earlier_inputs = dict(source)
            before = reference_step(truth64, case, one, before, _rounded_into(earlier_inputs))[1]
            earlier.append(earlier_inputs)
        before = _rounded(before)
        inputs |= source

    def run(reference: Reference, tap: Tap) -> None:
        if before is None or part is None:
            reference_logits(reference, case, tap)
        else:
            reference_step(reference, case, part, before, tap)

    run(truth64, _rounded_into(inputs))
    truths: list[dict[str, Array]] = []
    for reference in (truth64, truth32):
        made: dict[str, Array] = {}
        truths.append(made)

        def put_in(name: str, value: Array, made: dict[str, Array] = made, dtype: Any = reference.dtype) -> Array:
            made[name] = value
            return inputs[name].astype(dtype)

        run(reference, put_in)
    memory = reference_memory(truth64, case).astype(np.float32) if case.target_ids is not None else None
    return IsolatedInputs(case, part, before, tuple(earlier), memory, inputs, *truths)


def _rounded_into(values: dict[str, Array]) -> Tap:
    return lambda name, value: values.__setitem__(name, value.astype(np.float32))


def _rounded(cache: Cache) -> Cache:
    def rounded(past: Past | None) -> Any:
        return past and tuple(x.astype(np.float32) for x in past)

    own, cross = (tuple(map(rounded, pair)) for pair in (cache.self_attention, cache.cross))
    return replace(cache, self_attention=own, cross=cross)


def _source_points(cache: Cache) -> Iterator[tuple[str, Array]]:
    """Yield the source's keys and values: inputs of every cached pass, computed before."""
    for i, pair in enumerate(_rounded(cache).cross):
        if pair is not None:
            yield f"decoder.layers.{i}.cross_attention.keys", pair[0]
            yield f"decoder.layers.{i}.cross_attention.values", pair[1]


def run_mlx(engine: Any, s: IsolatedInputs, path: str, tap: str) -> dict[str, Array]:
    """Return {point: the value MLX's module computes from the reference's values before it}."""
    computed: dict[str, Array] = {}
    model, case = engine.model, s.case
    observe: Callable[[str, Array], None] = computed.__setitem__
    with engine.stream():
        if s.part is None:
            with replacing(model, s.inputs, observe) as tap_logits:
                full_pass(model, case, tap_logits)
            return computed
        ids, cache = started(model, case)
        for part, inputs in zip(case.passes(), s.earlier, strict=False):
            with replacing(model, inputs, lambda name, value: None):
                model.step(ids[:, part], cache)
        with replacing(model, s.inputs, observe) as tap_logits:
            model.step(ids[:, s.part], cache, tap=tap_logits)
    return computed


def run_onnx(engine: Any, s: IsolatedInputs, path: str, tap: str) -> dict[str, Array]:
    """Return {point: the value the graph computes from the reference's values before it}, for the graph of this tap."""
    config, case = engine.config, s.case
    if config.architecture != "encoder-decoder":
        name = MODEL
    elif tap.startswith("encoder."):
        name = ENCODER
    elif "merged" in path or DECODER_FIRST not in engine.files:
        name = DECODER_MERGED
    else:
        name = DECODER_FIRST if s.part is None or s.part.start == 0 else DECODER_NEXT
    model = onnx.load(engine.files[name], load_external_data=False)
    points = points_of(model.graph, s.inputs)
    session = engine.open(engine.files[name], cut(model, points))
    ports, values = GRAPHS[name](engine.folder.request), _values(config, s)
    feeds = {value: s.inputs[point] for point, value in points.items()}
    for port in ports.inputs:
        if port.value in values:
            feeds[port.name] = values[port.value]
        elif port.value.startswith(("cache.", "cross.")):  # empty keys and values, or states, in a first pass
            feeds[port.name] = np.zeros(port.without_positions(len(case.ids)), np.float32)
    entries = [entry.name for entry in session.get_inputs()]
    outputs = [point + COMPUTED for point in points]
    arrays = session.run(outputs, {key: np.ascontiguousarray(feeds[key]) for key in entries})
    return dict(zip(points, arrays, strict=True))


def _values(config: TransformerConfig, s: IsolatedInputs) -> dict[str, Array]:
    """Return all inputs of the graphs, by the name of the value (`Port.value`), e.g. "memory"."""
    case, before = s.case, s.before
    real = case.source_mask
    values = {**case.inputs, "source_mask": real}
    if config.architecture == "encoder-decoder":
        assert case.target_ids is not None
        assert s.memory is not None
        values["target_ids"] = case.target_ids if s.part is None else case.target_ids[:, s.part]
        first = 0 if s.part is None else s.part.start
        values["later"], values["positions"] = np.array([first > 0]), positions(values["target_ids"], first)
        values["memory"] = s.memory
    else:
        part = slice(0, case.ids.shape[1]) if s.part is None else s.part
        if s.part is not None and case.prompt_mask is None:
            real = np.ones_like(real)
        values["target_ids"], values["target_mask"] = case.ids[:, part], real[:, : part.stop]
        values["positions"] = np.maximum(np.cumsum(real, axis=1) - 1, 0)[:, part]
    if before is not None:
        own = [STATE] if config.recurrent else PARTS
        for i, pair in enumerate(zip(before.self_attention, before.cross, strict=True)):
            for value, parts, arrays in zip(("cache", "cross"), (own, PARTS), pair, strict=True):
                values |= {f"{value}.{i}.{part}": x for part, x in zip(parts, arrays or (), strict=False)}
    return {value: x.astype(np.float32) if x.dtype == np.float64 else x for value, x in values.items()}


def valid_at(point: str, case: Case, part: slice | None, length: int) -> NDArray[np.bool_]:
    """Return which positions of a point count (B,L). part: the decoder's positions in a cached pass; None: all."""
    of_keys = point.rpartition(".")[2].startswith(("key", "value"))
    if point.startswith("encoder.") or ("cross_attention" in point and of_keys):
        return case.source_real
    real = case.valid("logits")
    stop = real.shape[1] if part is None else part.stop
    return real[:, stop - length : stop]


EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
EXPLAINED = 0.01  # largest share of the error that may remain


def likely_mistake(
    point: str,
    config: TransformerConfig,
    weights: Parameters,
    inputs: Mapping[str, Array],
    got: Array,
    truth: Array,
    natural: float,
    valid: NDArray[np.bool_],
) -> str:
    """Describe the likely mistake, e.g. "gate and up exchanged"; "" if no guess explains the error.

    `inputs`: the reference's values at all points. `got`, `truth` (B,L,...): values at `point`, positions before heads.
    `natural`: the sum of float32's own absolute errors. `valid` (B,L): the positions to compare.
    """
    if got.shape != truth.shape:
        return f"shape {got.shape}, expected {truth.shape}"
    if not np.isfinite(got[valid]).all():
        return "not finite"
    last = point.rpartition(".")[2]
    if last == "weights":
        masked = _mask(np.where(valid[..., None, None], got, truth), truth)
        if masked:
            return masked
    config = config.at(point)
    tolerance = max(EXPLAINED * float(np.abs(got - truth)[valid].sum()), 2 * natural)
    for words, changed in _changed(point, last, config, weights, inputs, truth):
        if changed.shape == got.shape and np.abs(got - changed)[valid].sum() <= tolerance:
            return words
    return _factor(got[valid], truth[valid], tolerance)


def _changed(
    point: str,
    last: str,
    config: TransformerConfig,
    weights: Parameters,
    inputs: Mapping[str, Array],
    truth: Array,
) -> Iterator[tuple[str, Array]]:
    """Yield (mistake in words, the point's value with it) for typical mistakes in this kind of operation."""
    if last.endswith("_norm") or last == "norm":
        x = {after: inputs[before] for before, after in pairwise(inputs)}.get(point)  # a norm's input
        if x is not None and x.size == truth.size:
            gamma, beta = np.asarray(weights[f"{point}.weight"]), weights.get(f"{point}.bias")
            beta = None if beta is None else np.asarray(beta)
            for epsilon in EPSILONS:
                with np.errstate(divide="ignore", invalid="ignore"):
                    changed = norm(x.astype(np.float64).reshape(truth.shape), gamma, beta, epsilon)
                yield f"epsilon {epsilon:g}, not {config.norm_epsilon:g}", changed
    elif last == "inner":
        place = point.rpartition(".")[0]
        up = inputs[f"{place}.up_proj"].astype(np.float64)
        for name in get_args(Activation):
            if config.gated:
                gate = inputs[f"{place}.gate_proj"].astype(np.float64)
                yield f"{name}, not {config.activation}", activation(name, gate) * up
                yield "gate and up exchanged", activation(name, up) * gate
            else:
                yield f"{name}, not {config.activation}", activation(name, up)
        yield "not gated", up
    elif last in ("queries", "keys", "values", "context"):
        heads = truth if truth.ndim == 4 else truth.reshape(*truth.shape[:2], config.heads, -1)
        for first in range(heads.shape[2]):
            for second in range(first):
                order = list(range(heads.shape[2]))
                order[first], order[second] = second, first
                yield f"heads {second} and {first} exchanged", heads[:, :, order].reshape(truth.shape)
        for k in range(1, min(truth.shape[1], 4)):
            yield f"rows moved by {k}", np.roll(truth, k, axis=1)
            yield f"rows moved by -{k}", np.roll(truth, -k, axis=1)
    elif last == "residual":
        sub = inputs.get(point.removesuffix(".residual"))
        if sub is not None:
            yield "the input isn't added", sub.astype(np.float64)
            yield "the sub-layer's output isn't added", truth - sub
            yield "the sub-layer's output is added twice", truth + sub
            yield "the sub-layer's output is added to itself", 2.0 * sub
    module = "output_proj" if point == "logits" else makers(inputs, weights).get(point, point)
    bias = weights.get(f"{module}.bias")
    if bias is not None and bias.shape == truth.shape[-1:]:
        yield "the bias is missing", truth - np.asarray(bias)


def _mask(got: Array, truth: Array) -> str:
    """Describe the first query in attention weights (B,L,H,S) that sees a masked key or misses a visible key."""
    visible = np.argwhere((truth == 0) & (got > 1e-6))
    hidden = np.argwhere((truth > 1e-6) & (got == 0))
    for places, words in (
        (visible, "sees key {} of row {}, which is masked"),
        (hidden, "doesn't see key {} of row {}"),
    ):
        if len(places):
            row, query, _, key = (int(i) for i in places[0])
            return f"mask: query {query} {words.format(key, row)}"
    return ""


def _factor(got: Array, truth: Array, tolerance: float) -> str:
    """Guess that every value was multiplied by a constant."""
    square = float((truth * truth).sum())
    if not square:
        return ""
    factor = float((got * truth).sum()) / square
    rest = np.abs(got - factor * truth).sum()
    return f"every value times {factor:.6g}" if rest <= tolerance else ""
