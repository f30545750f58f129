"""Compare a file's graph with the graph built from the checkpoint again: node by node, inner graphs included.

The graph is built with the choices in the package's record: target, precision, activations, scales, layer of attention.
Nothing is written, and weights get their values when they are read.

Nodes are matched by name, values by the node behind them. So a file may store a tensor elsewhere, list its nodes in
another valid order, spell out an attribute's default, or rename an inner value. Reported differences:

    a missing or extra node
    another operator, domain, attribute, input, or number of results
    another constant, or other values of a tensor computed from weights (parameters: see `weights.py`)
    other inputs and outputs, types, shapes, defaults, opsets, functions
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from export.graph.protos import load_graph
from export.package.around import recorded_plan
from export.package.weights import is_parameter, promise
from export.package.write import package_graphs
from export.precision.products import LATE
from export.search.write import one_file_graph, place_constants, settings_beside
from export.search.write import recorded_plan as recorded_file
from export.targets.table import TARGETS
from export.validate.engines.onnx_engine import OnnxEngine
from export.validate.engines.opaque_engines import SearchEngine
from export.validate.engines.stored import OnnxFiles
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.system.errors import shortened
from mlx_transformer.system.files import read_json

from .package_files import UNREADABLE


def same_graphs(engine: OnnxFiles) -> tuple[int, list[str]]:
    """Compare an engine's graphs with newly built graphs: (number of nodes, differences in words)."""
    nodes, problems = 0, list[str]()
    try:
        graphs = list(expected_graphs(engine))
    except UNREADABLE as error:
        return 0, [f"its record: no graph can be built by it ({shortened(str(error))})"]
    for name, expected in graphs:
        comparison = Comparison(expected, load_graph(engine.files[name]))
        nodes += comparison.nodes
        problems += [f"{name}: {problem}" for problem in comparison.problems]
    return nodes, problems


def expected_graphs(engine: OnnxFiles) -> Iterator[tuple[str, ir.Model]]:
    """Build the graphs of an engine's files again and yield (name, graph).

    Yields nothing without a checkpoint, or for another exporter's files.
    """
    if engine.checkpoint is None:
        return
    if isinstance(engine, SearchEngine):
        yield "search", _closest(engine)
    elif isinstance(engine, OnnxEngine):
        yield from _of_folder(engine)


def _of_folder(engine: OnnxEngine) -> Iterator[tuple[str, ir.Model]]:
    folder = engine.folder
    place = next((each for each in (folder.path, folder.place) if (each / ONNX_CONFIG).is_file()), None)
    if engine.checkpoint is None or place is None:
        return
    plan = recorded_plan(engine.checkpoint, folder.path, read_json(place / ONNX_CONFIG))
    if folder.activations is not None:
        plan = replace(plan, activations=folder.activations)
    for graphs in package_graphs(plan, folder.precision).values():
        for name, model in graphs.items():
            if name in engine.files:
                promise(model, plan.checkpoint)
                yield name, model


def _closest(engine: SearchEngine) -> ir.Model:
    """Build the graph of a single file with the search for every target, and return the most similar graph.

    Such a file doesn't record its target.
    """
    assert engine.checkpoint is not None
    path, text = engine.files["search"], engine.model.takes_text
    got, best, fewest = load_graph(path), None, 0
    plan = recorded_file(engine.checkpoint, engine.model.metadata, path)
    generation, _ = settings_beside(plan, path.stem, text)
    searching = [target for target in TARGETS.values() if target.search]
    for target in searching:
        model = one_file_graph(replace(plan, target=target), generation, text)
        promise(model, plan.checkpoint)
        place_constants(model)
        differing = len(Comparison(model, got).problems)
        if best is None or differing < fewest:
            best, fewest = model, differing
        if not fewest:
            break
    assert best is not None
    return best


Key = tuple[Any, ...]


class Comparison:
    """Compares two graphs. `nodes`: how many the expected graph has. `problems`: the differences, extra nodes first."""

    def __init__(self, expected: ir.Model, got: ir.Model) -> None:
        self.nodes = 0
        self._expected, self._got = _Side(expected), _Side(got)
        self._more: list[str] = []
        self._missing: list[str] = []
        self._other: list[str] = []
        self._tensors: list[tuple[str, ir.Value | None, ir.TensorProtocol, ir.TensorProtocol]] = []
        self._graphs(expected.graph, got.graph, ())
        self._ports(expected.graph, got.graph)
        self._of_model(expected, got)
        self._contents()
        self._initializers()

    @property
    def problems(self) -> list[str]:
        return [*self._more, *self._missing, *self._other]

    def _graphs(self, expected: ir.Graph, got: ir.Graph, path: Key) -> None:
        """Compare the nodes and outputs of two graphs. path: the nodes and attributes around an inner graph."""
        self._expected.enter(expected, path)
        self._got.enter(got, path)
        known, found = {n.name: n for n in _operators(expected)}, dict[str | None, ir.Node]()
        for node in _operators(got):
            if node.name not in known or node.name in found:
                twice = " once more" if node.name in found else ""
                self._more.append(f"{_label(node)}: a node that the architecture doesn't have{twice}")
            else:
                found[node.name] = node
        self.nodes += len(known)
        for name, node in known.items():
            if name in found:
                self._nodes(node, found[name], (*path, name))
            else:
                self._missing.append(f"{_label(node)}: is missing")
        if (a := len(expected.outputs)) != (b := len(got.outputs)):
            self._other.append(f"{'/'.join(map(str, path)) or 'the graph'}: {b} outputs, has to be {a}")
        for value, other in zip(expected.outputs, got.outputs, strict=False):
            self._values(f"output {value.name}", value, other)

    def _nodes(self, expected: ir.Node, got: ir.Node, path: Key) -> None:
        label = _label(expected)
        kinds = [(node.domain, node.op_type, node.overload) for node in (expected, got)]
        if kinds[0] != kinds[1]:
            kind, should = (".".join(filter(None, each)) for each in reversed(kinds))
            self._other.append(f"{label}: operator is {kind}, has to be {should}")
            self._attributes(label, expected, got, path, inner_only=True)
            return
        self._attributes(label, expected, got, path)
        read, given = _without_end(expected.inputs), _without_end(got.inputs)
        if len(read) != len(given):
            self._other.append(f"{label}: reads {len(given)} values, has to be {len(read)}")
        for i, (value, other) in enumerate(zip(read, given, strict=False)):
            self._values(f"{label}: input {i}", value, other)
        results = [sum(bool(value.name) for value in node.outputs) for node in (expected, got)]
        if results[0] != results[1]:
            self._other.append(f"{label}: gives {results[1]} values, has to be {results[0]}")

    def _attributes(self, label: str, expected: ir.Node, got: ir.Node, path: Key, inner_only: bool = False) -> None:
        for name in dict.fromkeys([*expected.attributes, *got.attributes]):
            pair = [node.attributes.get(name) for node in (expected, got)]
            kinds = {None if each is None else each.type for each in pair}
            if kinds == {ir.AttributeType.GRAPH}:
                a, b = (each.as_graph() for each in pair if each is not None)
                self._graphs(a, b, (*path, name))
                continue
            if inner_only:
                continue
            should, value = (_plain(node, name, each) for node, each in zip((expected, got), pair, strict=True))
            if kinds == {ir.AttributeType.TENSOR}:
                self._tensors.append((f"{label}: {name}", None, should, value))
            elif should != value:
                words = ["not there" if each is None else each for each in (value, should)]
                self._other.append(f"{label}: {name} is {words[0]}, has to be {words[1]}")

    def _values(self, place: str, expected: ir.Value | None, got: ir.Value | None) -> None:
        """Compare an input of two nodes: constants by their contents, other values by the node behind them."""
        a, b = self._expected.constant(expected), self._got.constant(got)
        if a is not None and b is not None and expected is not None and got is not None:
            if is_parameter(expected) and expected.name != got.name:
                self._other.append(f"{place} is {got.name}, has to be {expected.name}")
            self._tensors.append((f"{place}, {expected.name},", expected, a, b))
        elif self._expected.key(expected) != self._got.key(got):
            self._other.append(f"{place} is {_source(got)}, has to be {_source(expected)}")

    def _ports(self, expected: ir.Graph, got: ir.Graph) -> None:
        for kind in ("inputs", "outputs"):
            sides = [list(map(_port, getattr(graph, kind))) for graph in (expected, got)]
            if sides[0] != sides[1]:
                differing = [b for b in sides[1] if b not in sides[0]], [a for a in sides[0] if a not in sides[1]]
                is_, should = (", ".join(each) or "fewer or in another order" for each in differing)
                self._other.append(f"its {kind}: {is_}, has to be {should}")
        given = {value.name: value for value in got.inputs}
        for value in expected.inputs:
            other = given.get(value.name)
            if other is not None:
                defaults = [None if each is None else each.const_value for each in (value, other)]
                a, b = defaults
                if a is not None and b is not None:
                    self._tensors.append((f"default of {value.name}", None, a, b))
                elif a is not b:
                    self._other.append(f"default of {value.name}: {'is' if a is None else 'is not'} there")

    def _of_model(self, expected: ir.Model, got: ir.Model) -> None:
        for function in got.functions.values():
            if function.identifier() not in expected.functions:
                self._more.append(f"function {function.domain}.{function.name}: the architecture has none")
        versions = [model.opset_imports for model in (expected, got)]
        for name in dict.fromkeys([*versions[0], *versions[1]]):
            if (a := versions[0].get(name)) != (b := versions[1].get(name)):
                is_, has_to_be = ("not there" if x is None else x for x in (b, a))
                self._other.append(f"opset {name or 'ai.onnx'} is {is_}, has to be {has_to_be}")

    def _initializers(self) -> None:
        """Report unused tensors, and two tensors with the same name: `weights.py` would see only the last."""
        seen = set[str]()
        for graph in self._got.graphs:
            for name, value in graph.initializers.items():
                if name in seen:
                    self._more.append(f"{name}: two tensors have this name")
                seen.add(name)
                if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                    self._other.append(f"{name}: a tensor that nothing reads")

    def _contents(self) -> None:
        """Compare tensors, in an order that keeps tensors computed together next to each other."""
        done = set[tuple[int, int]]()

        def made(entry: tuple[str, ir.Value | None, Any, Any]) -> str:
            value = entry[1]
            return "" if value is None or LATE not in value.meta else value.meta[LATE][0].key

        for place, value, expected, got in sorted(self._tensors, key=made):
            if (pair := (id(expected), id(got))) not in done:
                done.add(pair)
                if problem := _difference(expected, got, value is not None and is_parameter(value)):
                    self._other.append(f"{place} {problem}")


class _Side:
    """Either of the two models, with a key for each value: the path to the node behind it."""

    def __init__(self, model: ir.Model) -> None:
        self.graphs = [model.graph, *model.graph.subgraphs()]
        self._initializers = {id(v) for graph in self.graphs for v in graph.initializers.values()}
        self._keys: dict[int, Key] = {}

    def enter(self, graph: ir.Graph, path: Key) -> None:
        for i, value in enumerate(graph.inputs):
            self._keys[id(value)] = (*path, "input", i if path else value.name)
        for node in graph:
            for i, value in enumerate(node.outputs):
                self._keys[id(value)] = (*path, "node", node.name, node.op_type if not node.name else "", i)

    def key(self, value: ir.Value | None) -> Key | None:
        return None if value is None else self._keys.get(id(value), ("unknown", value.name))

    def constant(self, value: ir.Value | None) -> ir.TensorProtocol | None:
        """Return a value's tensor if it is a Constant or an initializer (without a graph input); else None."""
        if value is None or value.is_graph_input():
            return None
        maker = value.producer()
        if maker is not None:
            tensor = maker.attributes.get("value") if _is_constant(maker) else None
            return None if tensor is None else tensor.as_tensor()
        return value.const_value if id(value) in self._initializers else None


def _is_constant(node: ir.Node) -> bool:
    return node.op_type == "Constant" and node.domain in ("", "ai.onnx") and "value" in node.attributes


def _operators(graph: ir.Graph) -> Iterator[ir.Node]:
    return (node for node in graph if not _is_constant(node))


def _label(node: ir.Node) -> str:
    return node.name or f"{node.op_type} that makes {node.outputs[0].name if node.outputs else 'nothing'}"


def _source(value: ir.Value | None) -> str:
    if value is None:
        return "nothing"
    maker = value.producer()
    return f"{value.name}" if maker is None else f"{value.name} of {_label(maker)}"


def _without_end(values: Iterable[ir.Value | None]) -> list[ir.Value | None]:
    """Return a node's inputs, without omitted inputs at the end."""
    read = [None if value is None or value.name == "" else value for value in values]
    while read and read[-1] is None:
        read.pop()
    return read


def _port(value: ir.Value) -> str:
    dims = "?"
    if value.shape is not None:
        dims = ", ".join(str(dim.value if isinstance(dim, ir.SymbolicDim) else dim) for dim in value.shape)
    return f"{value.name} {value.dtype} ({dims})"


def _plain(node: ir.Node, name: str, attribute: ir.Attr | None) -> Any:
    """Return an attribute's value, by default the operator's default. Floats are rounded to float32, as in files."""
    if attribute is None:
        try:
            schema = onnx.defs.get_schema(node.op_type, node.version or onnx.defs.onnx_opset_version(), node.domain)
        except onnx.defs.SchemaError:
            return None
        default = schema.attributes.get(name)
        if default is None or not default.default_value.name:
            return None
        value = onnx.helper.get_attribute_value(default.default_value)
        return value.decode() if isinstance(value, bytes) else value
    value: Any = attribute.value
    if attribute.type == ir.AttributeType.FLOAT:
        return float(np.float32(value))
    if attribute.type == ir.AttributeType.FLOATS:
        return [float(np.float32(each)) for each in value]
    return list(value) if isinstance(value, (tuple, list)) else value


def _difference(expected: ir.TensorProtocol, got: ir.TensorProtocol, parameter: bool) -> str:
    """Describe how two tensors differ; "" if they don't.

    parameter: compare only type and shape, as `weights.py` compares the contents. In a table of floats a difference in
    the last bit is fine, as another machine may round a sum, sine or power differently; single numbers must be exact.
    """
    shapes = [tuple(map(int, tensor.shape.numpy())) for tensor in (expected, got)]
    if expected.dtype != got.dtype or shapes[0] != shapes[1]:
        return f"is {got.dtype}{shapes[1]}, has to be {expected.dtype}{shapes[0]}"
    if parameter:
        return ""
    if expected.dtype == ir.DataType.STRING:
        a, b = (list(np.asarray(tensor.numpy()).reshape(-1)) for tensor in (expected, got))
    elif expected.tobytes() == got.tobytes():
        return ""
    else:
        a, b = (np.asarray(tensor.numpy()).reshape(-1) for tensor in (expected, got))
        if a.dtype in (np.float32, np.float64) and a.size > 1:
            near = np.abs(a.astype(np.float64) - b) <= np.spacing(np.abs(a).astype(np.float32)).astype(np.float64)
            if near.all():
                return ""
    differing = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y and not (x != x and y != y)]
    if not differing:
        return "" if expected.dtype == ir.DataType.STRING else "differs in its bits"
    first = differing[0]
    if len(a) == 1:
        return f"is {_short(b[0])}, has to be {_short(a[0])}"
    place = [int(i) for i in np.unravel_index(first, shapes[0])]
    numbers = f"{_short(b[first])}, has to be {_short(a[first])}"
    return f"differs in {len(differing)} of {len(a)} values, first {place}: {numbers}"


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
