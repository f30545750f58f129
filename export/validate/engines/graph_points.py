"""Find the points of the network, and the integers of int8 products, in an exported graph.

Nodes have their modules' names, which lead to the points. Inside attention the code follows the data around the
softmax. Points it can't find are left out, e.g. in a graph changed beyond recognition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from export.graph.protos import Wiring, all_nodes, initializers, inner_graphs
from export.interface import STATE

Array = NDArray
AFTER_SOFTMAX = 3
"""The mode in which Attention's fourth output, `qk_matmul_output`, is softmax(Q K^T / sqrt(d_k))."""


def show_weights(graph: onnx.GraphProto) -> None:
    """Make fused attention operators also return their weights, as points NAME.weights."""
    for node in graph.node:
        if node.op_type == "Attention" and len(node.output) == 1:
            node.output.extend(["", "", f"{node.name.rpartition('/')[0].replace('/', '.')}.weights"])
            node.attribute.append(onnx.helper.make_attribute("qk_matmul_output_mode", AFTER_SOFTMAX))


def points_of(graph: onnx.GraphProto, names: Iterable[str]) -> dict[str, str]:
    """Return {point: value in the graph} in the order of `names`, without missing points; no value is used twice."""
    wiring = Wiring(graph)
    values: dict[str, str] = {}
    used: set[str] = set()
    for point in names:
        value = point if point in wiring.maker else _value(wiring, point)
        if value is not None and value in wiring.maker and value not in used:
            values[point] = value
            used.add(value)
    return values


def _value(wiring: Wiring, point: str) -> str | None:
    place, _, last = point.rpartition(".")
    scope = point.replace(".", "/").replace("layers/", "layers.")
    if last.endswith(("_proj", "norm")):
        return wiring.last(scope)
    if last == "residual":
        layer = scope.rsplit("/", 2)[0]
        added = [wiring.last(f"{scope.rpartition('/')[0]}_post_norm") or place, place]
        scaled = [n.output[0] for value in added for n in wiring.readers(value) if n.name.startswith(f"{layer}/Mul")]
        readers = (n for value in scaled + added for n in wiring.readers(value) if n.name.startswith(f"{layer}/Add"))
        return next((n.output[0] for n in readers if n.op_type == "Add"), None)
    if place.endswith(".embedding"):
        return _embedding(wiring, place, last)
    module = scope.rpartition("/")[0]
    if last in ("inner", "context"):
        product = wiring.first(f"{module}/{'down' if last == 'inner' else 'output'}_proj", "MatMul")
        return None if product is None else product.input[0]
    if last == "states":
        rectified = wiring.maker.get(place)
        return rectified.input[0] if rectified is not None and rectified.op_type == "Relu" else None
    if last == STATE:
        layer = place.split(".")[2]
        return next((name for name in wiring.maker if name.endswith(f".{layer}.decoder.{STATE}")), None)
    return dict(_attention(wiring, module)).get(last)


def _embedding(wiring: Wiring, tap: str, last: str) -> str | None:
    """Walk back from the tap to the rows gathered from the table (`last`: "rows" or "scaled")."""
    path = [tap]
    while (node := wiring.maker.get(path[-1])) is not None and node.op_type in ("Add", "Mul"):
        path.append(node.input[0])
    for after, value in pairwise(path[::-1]):
        if wiring.maker.get(after) is not None and wiring.maker[after].op_type == "Gather":
            return after if last == "rows" else value if wiring.maker[value].op_type == "Mul" else None
    return None


def _attention(wiring: Wiring, module: str) -> Iterator[tuple[str, str]]:
    softmax = wiring.first(module, "Softmax")
    if softmax is None:
        return
    yield "weights", softmax.output[0]
    masked = wiring.maker.get(softmax.input[0])
    scores = masked.input[0] if masked is not None and masked.op_type == "Add" else softmax.input[0]
    yield "scores", scores
    bounded = wiring.maker.get(wiring.behind(scores, "Mul"))  # cap * tanh(scores / cap)
    if bounded is not None and bounded.op_type == "Tanh":
        scores = wiring.behind(bounded.input[0], "Div")
    product = wiring.maker.get(wiring.behind(scores, "Reshape"))
    if product is not None and product.op_type == "MatMul":
        scaled = wiring.behind(product.input[0], "Reshape")
        yield (
            "queries",
            wiring.behind(scaled, "Mul"),
        )  # the last factor is 1 / sqrt(d_k); earlier factors belong to the queries
        transposed = wiring.maker.get(product.input[1])
        if transposed is not None and transposed.op_type == "Transpose":
            yield "keys", transposed.input[0]
    readers = wiring.readers(softmax.output[0])
    if readers and readers[0].op_type == "Reshape":
        readers = wiring.readers(readers[0].output[0])
    if readers and readers[0].op_type == "MatMul":
        yield "values", readers[0].input[1]


PRODUCTS = {"MatMulInteger": 2, "MatMulIntegerToFloat": 4}
"""{operator: index of the input with its activations' zero point}"""
SHOWN = " (shown)"
"""Suffix of an If's output with a branch's integers."""
COPIES = ("Transpose", "Reshape", "Identity", "Gather")
"""Operators that return their first input's numbers in another shape, or some rows of them."""


def quantisers(graph: onnx.GraphProto, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (parameter, name of the integers it is multiplied with) for int8 products.

    Finds products in the outermost graph and, after `show_integers`, in its branches.
    """
    reader = ProductGraph(graph, folder)
    branches = (branch for node in graph.node for branch in inner_graphs(node))
    for owner in (graph, *branches):
        inside = {output for node in owner.node for output in node.output} if owner is not graph else ()
        for node in owner.node:
            if node.op_type in PRODUCTS:
                name = f"{node.input[0]}{SHOWN}" if node.input[0] in inside else node.input[0]
                yield from ((parameter, name) for parameter in reader.parameters(node))


def show_integers(graph: onnx.GraphProto) -> None:
    """Make the integer inputs of products in branches an output of the branches; empty in branches without the product.

    A merged decoder needs this: it computes the source's keys and values in either of two branches.
    """
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


class ProductGraph:
    """The producer, readers and constants of each value in a graph, inner graphs included.

    rows: a graph with the classifier's rows and scales as outputs, which this graph reads (target cpu's shortlist).
    """

    def __init__(self, graph: onnx.GraphProto, folder: Path, rows: ProductGraph | None = None):
        self.nodes, self.folder, self.rows = list(all_nodes(graph)), folder, rows
        self.makers = {output: node for node in self.nodes for output in node.output}
        self.tensors = {tensor.name: tensor for tensor in initializers(graph)}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for value in node.input:
                self.readers.setdefault(value, []).append(node)

    def parameters(self, node: onnx.NodeProto) -> list[str]:
        """Return the parameters of a product: several if matrices are concatenated."""
        return [matrix.rpartition(".")[0] for matrix in self.side_by_side(node.input[1])]

    def side_by_side(self, value: str) -> list[str]:
        """Return the origins of the values concatenated in this value; its own origin if it isn't a Concat."""
        maker = self.makers.get(value)
        return [self.origin(part) for part in ([value] if maker is None or maker.op_type != "Concat" else maker.input)]

    def origin(self, value: str) -> str:
        """Follow reshapes, transposes and other copies back to the original value's name."""
        while (maker := self.makers.get(value)) is not None and maker.op_type in COPIES:
            value = maker.input[0]
        if maker is None and self.rows is not None and value in self.rows.makers:
            return self.rows.origin(value)
        return value
