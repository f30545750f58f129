"""Check int8 products against their scales exactly, and the network between the integers as float32.

Comparing tensors can't find a wrong scale: with a neighbouring product's scale, or without a zero point where
activations are small, results are often within int8's budget. So the check follows each product in the graph, from its
integer inputs to the scale of its result.

    x --> QuantizeLinear(1/a, zero) [--> Clip] --> MatMulInteger(., NAME.int8, zero) --> Cast --> Mul(1/a * NAME.scale)
                                               \\-> MatMulIntegerToFloat(., NAME.int8, 1/a, NAME.scale, zero)

Rounding to integers is a step function: now and then an error of 1e-7 before it becomes a whole step, and later layers
carry it on. So the reference computes with the runtime's own integers, and every named point must be within float32's
budget, not int8's. The integers must be the reference's rounded activations, except for flips: an activation so near
the middle of two steps that float32's error decides.

    reference x64 --> x64 a --> rounded --- equal to, or a flip of ---> the runtime's q
                                                                          |
                     reference's next x64 <-- (q W) scale / a + bias <----+
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray
from onnx import numpy_helper

from export.graph.protos import array_of, initializers
from export.interface import ROWS_CPU
from export.precision.int8 import WHOLE, ZERO, quantiser, unit_of, zero_point
from export.precision.rounding import from_int8_rows
from export.validate.cases import Case, reference_taps
from export.validate.engines.graph_points import PRODUCTS, ProductGraph
from export.validate.engines.protocol import Engine
from export.validate.engines.stored import OnnxFiles
from export.validate.findings import ON_INTEGERS, Point
from export.validate.reference import Parameters, Reference
from export.validate.rule import BUDGETS, UNIT, Deviation, ErrorScale, Truth
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import (
    INT8_SCALES,
    SYMMETRIC,
    UNSIGNED,
    Int8Scales,
    ProductScales,
    multiplied_names,
)
from mlx_transformer.core.parameters import embedding_names, quantizable_shapes

from .judging import DRAWS, Reordered, Sample, judged_points


def int8_products(files: Mapping[str, Path], scales: Int8Scales) -> tuple[int, list[str]]:
    """Check all int8 products in these graphs, inner graphs included: (number of products, problems in words)."""
    count, wrong = 0, []
    rows = _Products(onnx.load(files[ROWS_CPU], load_external_data=False).graph, Path()) if ROWS_CPU in files else None
    for name, path in files.items():
        graph = _Products(onnx.load(path, load_external_data=False).graph, path.parent, rows)
        for node in graph.nodes:
            if node.op_type in PRODUCTS:
                for parameter in graph.parameters(node):
                    count += 1
                    try:
                        problems = list(graph.problems(node, parameter, scales))
                    except (IndexError, ValueError):  # an input or an attribute that isn't there
                        problems = ["its integers can't be followed: other operators than export writes"]
                    wrong += [f"{name}: {parameter}: {each}" for each in problems]
    return count, wrong


def left_in_float32(files: Mapping[str, Path], scales: Int8Scales, config: TransformerConfig) -> Iterator[str]:
    """Report integer matrices that should be float32, and the reverse."""
    for name, path in files.items():
        names = {tensor.name for tensor in initializers(onnx.load(path, load_external_data=False).graph)}
        for matrix in quantizable_shapes(config):
            integers = {f"{matrix}.{kind}" for kind in ("int8", "int8_rows", "uint8")} & names
            if integers and scales.of(matrix).float32:
                yield f"{name}: {matrix}: integers, {INT8_SCALES} has it in float32"
            if matrix in names and not scales.of(matrix).float32:
                yield f"{name}: {matrix}: float32, {INT8_SCALES} doesn't say so"


class _Products(ProductGraph):
    """The int8 products of a graph, with the checks of their scales."""

    def problems(self, node: onnx.NodeProto, parameter: str, scales: Int8Scales) -> Iterator[str]:
        """Describe how a product differs from its scales."""
        fixed, maker = scales.of(parameter), self.makers.get(node.input[0])
        clip = maker if maker is not None and maker.op_type == "Clip" else None
        quantise = maker if clip is None else self.makers.get(clip.input[0])
        if quantise is None or quantise.op_type != "QuantizeLinear":
            yield "its activations aren't quantised in front of it"
            return
        zero, product_zero = self.zero(quantise), self.constant(node.input[PRODUCTS[node.op_type]])
        if zero is None or zero != product_zero:
            yield f"zero point {product_zero} in the product, {zero} where its activations are quantised"
        if fixed.activation is None:
            if not self._by_row(quantise):
                yield "fixed scales, but none is recorded"
            return
        if zero != zero_point(fixed):
            yield f"zero point {zero}, has to be {zero_point(fixed)}"
        least = None if clip is None else self.constant(clip.input[1])
        if least != (ZERO - SYMMETRIC if fixed.steps == SYMMETRIC else None):
            yield f"integers from {least}, of {fixed.steps} steps"
        if (unit := self.constant(quantise.input[1])) != unit_of(fixed):
            yield f"activations in units of {unit}, have to be of {unit_of(fixed)}"
        yield from self._result(node, parameter, fixed)

    def _by_row(self, quantise: onnx.NodeProto) -> bool:
        """Return whether each row has its own scale: the row is divided by it, or multiplied by its reciprocal."""
        row = self.makers.get(quantise.input[0])
        factor = None if row is None else self.makers.get(row.input[-1])
        if row is not None and (row.op_type == "Div" or (factor is not None and factor.op_type == "Reciprocal")):
            return True
        return self.constant(quantise.input[1]) is None

    def _result(self, node: onnx.NodeProto, parameter: str, fixed: ProductScales) -> Iterator[str]:
        unit, scale = (node.input[2], node.input[3]) if node.op_type == "MatMulIntegerToFloat" else self._after(node)
        if self.constant(unit) != unit_of(fixed):
            yield f"its result is in units of {self.constant(unit)}, has to be of {unit_of(fixed)}"
        parameters, scales = self.parameters(node), self.side_by_side(scale)
        own = scales[parameters.index(parameter)] if len(scales) == len(parameters) else ", ".join(scales)
        if own != f"{parameter}.{WHOLE}":
            yield f"its result has the scales {own or 'of nothing'}"

    def _after(self, node: onnx.NodeProto) -> tuple[str, str]:
        """Return the names of an integer result's factors: (unit of the activations, scales of the matrix)."""
        for cast in self.readers.get(node.output[0], []):
            for multiply in (each for each in self.readers.get(cast.output[0], []) if each.op_type == "Mul"):
                other = multiply.input[1] if multiply.input[0] == cast.output[0] else multiply.input[0]
                maker = self.makers.get(other)
                if maker is not None and maker.op_type == "Mul":
                    return maker.input[0], maker.input[1]
        return "", ""

    def zero(self, quantise: onnx.NodeProto) -> np.float32 | np.uint8 | None:
        """Return the activations' zero point; None if it isn't a single number."""
        if len(quantise.input) < 3 or not quantise.input[2]:
            return np.uint8(0)
        filled = self.makers.get(quantise.input[2])
        if filled is None or filled.op_type != "ConstantOfShape":
            return self.constant(quantise.input[2])
        (value,) = (numpy_helper.to_array(attribute.t) for attribute in filled.attribute)
        return value[0]

    def constant(self, value: str) -> np.float32 | np.uint8 | None:
        """Return a value if it is a constant number, else None."""
        tensor = self.tensors.get(self.origin(value))
        array = None if tensor is None else array_of(tensor, self.folder)
        return array.reshape(-1)[0] if array is not None and array.size == 1 else None


Array = NDArray
BUDGET = BUDGETS["float32", "cpu"]
INTEGERS = " (integers)"
"""Suffix of points that are a product's input."""


class IntegerReference(Reference):
    """The reference with products that multiply given integers (B,L,D), by weight name, else its own rounded inputs.

    weights: lookup tables must have the package's values (`with_tables`). `seen`: the inputs of products before
    rounding, by weight name. Without a fixed scale, an input isn't rounded.
    """

    def __init__(
        self,
        config: TransformerConfig,
        weights: Parameters,
        scales: Int8Scales,
        integers: Mapping[str, Array],
        dtype: DTypeLike,
        inner_points: bool = False,
    ) -> None:
        multiplied = multiplied_names(config)
        rounded = (name for name in scales.products if name in multiplied and not scales.of(name).float32)
        quantised = {name: quantiser(name, scales.of(name).weight)(np.asarray(weights[name])) for name in rounded}
        tables = {name: from_int8_rows(*parts) for name, parts in quantised.items()}
        super().__init__(config, {**weights, **tables}, dtype, inner_points)
        self.quantised, self.scales, self.integers = quantised, scales, integers
        self.seen: dict[str, Array] = {}

    def _product(self, x: Array, weight: str) -> Array:
        fixed = self.scales.of(weight)
        if fixed.activation is None:
            return super()._product(x, weight)
        self.seen[weight], (w, scale) = x, self.quantised[weight]
        if weight in self.integers:
            q = self.integers[weight].astype(np.float64) - zero_point(fixed)
        else:
            q = np.rint(_steps(x, fixed))
        sums = q @ w.T.astype(np.float64)  # exact
        return sums.astype(self.dtype) * (unit_of(fixed) * scale).astype(self.dtype)


class Redrawn(IntegerReference, Reordered):
    """`IntegerReference` with softmax sums in another order each time; integer products are exact in any order."""


def on_its_integers(engine: Any, stored: Parameters, cases: Sequence[Case], searching: bool = False) -> Iterator[Point]:
    """Judge every named point, and the integers of every product, of an engine with fixed int8 scales.

    Yields nothing if the engine doesn't show its integers, or if its products have a scale for each token. searching:
    judge only the integers, in the passes of a search.
    """
    names = {name for name in multiplied_names(engine.config) if not engine.int8_scales.of(name).float32}
    if any(engine.int8_scales.of(name).activation is None for name in names):
        return
    stored = with_tables(engine, stored)
    samples: list[Sample] = []
    for case in cases:
        taps, integers = engine.taps_with_integers(case, searching)
        if not names <= integers.keys():
            return
        exact = {name + INTEGERS: integers[name] for name in names}
        exact |= {} if searching else {**engine.taps(case), **taps}
        what = engine.config, stored, engine.int8_scales, integers
        t64, t32 = (_values(IntegerReference(*what, kind), case) for kind in (np.float64, np.float32))
        for tap in (tap for tap in t64 if tap in exact):
            truth, got = Truth.of(t64[tap], t32[tap], _valid(tap, case)), exact[tap]
            if tap.endswith(INTEGERS):
                got = _nearest(got, truth, engine.int8_scales.of(tap.removesuffix(INTEGERS)))
            samples.append(Sample(engine, ON_INTEGERS, tap, case, Deviation.of(got, truth), truth.scale))
    by_name = {case.name: case for case in cases}
    drawn = cache(lambda name: _redrawn(engine, stored, by_name[name], searching))
    yield from judged_points(samples, lambda case, tap, _: drawn(case.name)[tap], BUDGET)


def fixed_reference(engine: Engine, stored: Parameters, inner_points: bool = False) -> IntegerReference | None:
    """The network that an engine's fixed scales define, which round and cut what comes to a product; None without."""
    if not (isinstance(engine, OnnxFiles) and engine.int8_scales.is_fixed):
        return None
    tables = with_tables(engine, stored)
    return IntegerReference(engine.config, tables, engine.int8_scales, {}, np.float64, inner_points)


def with_tables(engine: Any, stored: Parameters) -> Parameters:
    """Replace tables that are only looked up by the values an engine's files must hold."""
    tables = embedding_names(engine.config) - multiplied_names(engine.config)
    places = [(where, name) for where, name, _ in engine.parameters() if name in tables]
    return {**stored, **{name: engine.as_stored(where, name, np.asarray(stored[name])) for where, name in places}}


def _values(reference: IntegerReference, case: Case) -> dict[str, Array]:
    """Return every tap of a reference, and its products' inputs."""
    taps = reference_taps(reference, case)
    return taps | {name + INTEGERS: x for name, x in reference.seen.items()}


def _redrawn(engine: Any, stored: Parameters, case: Case, searching: bool) -> dict[str, ErrorScale]:
    """Compute float32's own error for each value of `_values`, from several draws (`judging.py`)."""
    what = engine.config, stored, engine.int8_scales, engine.taps_with_integers(case, searching)[1]
    t64, again = _values(IntegerReference(*what, np.float64), case), Redrawn(*what, np.float32)
    draws = [_values(again, case) for _ in range(DRAWS)]
    scales = {tap: [Truth.of(t64[tap], each[tap], _valid(tap, case)).scale for each in draws] for tap in t64}
    return {tap: ErrorScale.drawn(each) for tap, each in scales.items()}


def _valid(tap: str, case: Case) -> Array:
    """Return which positions (B,L) of a tap or a product's input count."""
    if not tap.endswith(INTEGERS):
        return case.valid(tap)
    of_memory = ("cross_attention.key_proj.weight", "cross_attention.value_proj.weight")
    of_source = tap.startswith("encoder.") or tap.removesuffix(INTEGERS).endswith(of_memory)
    return case.source_real if of_source else case.valid("logits")


def _nearest(q: Array, x: Truth, fixed: ProductScales) -> Array:
    """Return the activations nearest to the reference's that round to a runtime's integers q.

    Usually the reference's own. A flip by up to 2 * UNIT relative error is allowed, as the division by 1/a rounds
    twice.
    """
    integer, steps = q.astype(np.float64) - zero_point(fixed), _steps(x.t64, fixed)
    beyond = np.where(np.rint(steps) == integer, 0.0, np.abs(steps - integer) - 0.5 - 2 * UNIT * np.abs(steps))
    assert fixed.activation is not None
    return x.t64 + np.maximum(beyond, 0.0) / np.float64(fixed.activation)


def _steps(x: Array, fixed: ProductScales) -> Array:
    """Activations in steps of their fixed scale, cut to its range, not rounded yet."""
    assert fixed.activation is not None
    least, most = {UNSIGNED: (0, UNSIGNED), SYMMETRIC: (-SYMMETRIC, SYMMETRIC)}.get(fixed.steps, (-ZERO, ZERO - 1))
    return np.clip(x * np.float64(fixed.activation), least, most)
