"""The products of int8 in a graph, against the scales that they were exported with, exactly.

Numbers can't tell it: the scale of a neighbouring product is within int8's budget as often as not, and so is a zero
point that one operator has and the other hasn't where activations are small. So each product is followed from the
integers that it reads to the scale of what it gives.

    x --> QuantizeLinear(1/a, zero) [--> Clip] --> MatMulInteger(., NAME.int8, zero) --> Cast --> Mul(1/a * NAME.scale)
                                               \\-> MatMulIntegerToFloat(., NAME.int8, 1/a, NAME.scale, zero)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from export.graph.protos import all_nodes, initializers, inner_graphs
from export.interface import ROWS_CPU
from export.precision.activations import ZERO, unit_of, zero_point
from export.precision.int8 import WHOLE
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import INT8_SCALES, SYMMETRIC, Int8Scales, ProductScales
from mlx_transformer.core.parameters import quantizable_shapes

PRODUCTS = {"MatMulInteger": 2, "MatMulIntegerToFloat": 4}
"""Which input is the zero point of the activations."""
SHOWN = " (shown)"
"""Ends the name of a branch's integers where they are an output."""
COPIES = ("Transpose", "Reshape", "Identity", "Gather")
"""The operators that give the numbers of their first input: in another shape, or those of some rows."""


def int8_products(files: Mapping[str, Path], scales: Int8Scales) -> tuple[int, list[str]]:
    """Return (how many products were compared, what is wrong with them in words) in all these graphs and those in
    them."""
    count, wrong = 0, []
    rows = _Graph(onnx.load(files[ROWS_CPU], load_external_data=False).graph, Path()) if ROWS_CPU in files else None
    for name, path in files.items():
        graph = _Graph(onnx.load(path, load_external_data=False).graph, path.parent, rows)
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
    """Say which matrices of these graphs are integers and shouldn't be, and which should."""
    for name, path in files.items():
        names = {tensor.name for tensor in initializers(onnx.load(path, load_external_data=False).graph)}
        for matrix in quantizable_shapes(config):
            integers = {f"{matrix}.{kind}" for kind in ("int8", "int8_rows", "uint8")} & names
            if integers and scales.of(matrix).float32:
                yield f"{name}: {matrix}: integers, {INT8_SCALES} has it in float32"
            if matrix in names and not scales.of(matrix).float32:
                yield f"{name}: {matrix}: float32, {INT8_SCALES} doesn't say so"


def quantisers(graph: onnx.GraphProto, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (parameter, the integers that it is multiplied with) of the outermost graph's products and those in its
    branches, where `show_integers` has made these outputs."""
    reader = _Graph(graph, folder)
    branches = (branch for node in graph.node for branch in inner_graphs(node))
    for owner in (graph, *branches):
        inside = {output for node in owner.node for output in node.output} if owner is not graph else ()
        for node in owner.node:
            if node.op_type in PRODUCTS:
                name = f"{node.input[0]}{SHOWN}" if node.input[0] in inside else node.input[0]
                yield from ((parameter, name) for parameter in reader.parameters(node))


def show_integers(graph: onnx.GraphProto) -> None:
    """Make what products within branches read an output of them, empty of the branch that doesn't multiply: a merged
    decoder computes the keys and values of the source in one of two."""
    for node in graph.node:
        branches = list(inner_graphs(node)) if node.op_type == "If" else []
        for branch in branches:
            made = {output for each in branch.node for output in each.output}
            for value in dict.fromkeys(each.input[0] for each in branch.node if each.op_type in PRODUCTS):
                if value not in made:
                    continue
                node.output.append(f"{value}{SHOWN}")
                for each in branches:
                    if each is not branch:
                        each.node.append(_nothing(f"{value}{SHOWN} otherwise"))
                    name = value if each is branch else f"{value}{SHOWN} otherwise"
                    each.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, None))


def _nothing(name: str) -> onnx.NodeProto:
    empty = numpy_helper.from_array(np.zeros((0, 0, 0), np.uint8))
    return onnx.helper.make_node("Constant", [], [name], value=empty)


class _Graph:
    """Who makes each value of a graph and of those in it, and what is constant. rows: the graph that makes the
    classifier's rows and scales which this one is given."""

    def __init__(self, graph: onnx.GraphProto, folder: Path, rows: _Graph | None = None):
        self.nodes, self.folder, self.rows = list(all_nodes(graph)), folder, rows
        self.makers = {output: node for node in self.nodes for output in node.output}
        self.tensors = {tensor.name: tensor for tensor in initializers(graph)}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for value in node.input:
                self.readers.setdefault(value, []).append(node)

    def problems(self, node: onnx.NodeProto, parameter: str, scales: Int8Scales) -> Iterator[str]:
        """Say what differs between one product and its scales."""
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
                yield "fixed scales, of which nothing is recorded"
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
        """Return whether each row has a scale of its own: it is divided by it, or multiplied with its reciprocal."""
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
        """Return the names of the unit and of the scales that an integer result is multiplied with."""
        for cast in self.readers.get(node.output[0], []):
            for multiply in (each for each in self.readers.get(cast.output[0], []) if each.op_type == "Mul"):
                other = multiply.input[1] if multiply.input[0] == cast.output[0] else multiply.input[0]
                maker = self.makers.get(other)
                if maker is not None and maker.op_type == "Mul":
                    return maker.input[0], maker.input[1]
        return "", ""

    def parameters(self, node: onnx.NodeProto) -> list[str]:
        """Return the parameters that a product multiplies with, several where their matrices lie side by side."""
        return [matrix.rpartition(".")[0] for matrix in self.side_by_side(node.input[1])]

    def side_by_side(self, value: str) -> list[str]:
        """Return the origins of what lies side by side in a value; of it, where nothing does."""
        maker = self.makers.get(value)
        return [self.origin(part) for part in ([value] if maker is None or maker.op_type != "Concat" else maker.input)]

    def origin(self, value: str) -> str:
        """Return the value that this one is another shape of."""
        while (maker := self.makers.get(value)) is not None and maker.op_type in COPIES:
            value = maker.input[0]
        if maker is None and self.rows is not None and value in self.rows.makers:
            return self.rows.origin(value)
        return value

    def zero(self, quantise: onnx.NodeProto) -> np.float32 | np.uint8 | None:
        """Return the zero point of activations, the same one for all rows; None where they aren't one number."""
        if len(quantise.input) < 3 or not quantise.input[2]:
            return np.uint8(0)
        filled = self.makers.get(quantise.input[2])
        if filled is None or filled.op_type != "ConstantOfShape":
            return self.constant(quantise.input[2])
        (value,) = (numpy_helper.to_array(attribute.t) for attribute in filled.attribute)
        return value[0]

    def constant(self, value: str) -> np.float32 | np.uint8 | None:
        """Return a constant number; None for anything else."""
        tensor = self.tensors.get(self.origin(value))
        array = None if tensor is None else numpy_helper.to_array(tensor, str(self.folder))
        return array.reshape(-1)[0] if array is not None and array.size == 1 else None
