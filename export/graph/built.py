"""Two caches that make exports fast: inferred types of node outputs, and whole graphs.

`RememberingBuilder` infers the type and shape of a node's outputs once for each operator and types of inputs. There are
few such combinations, however many layers and graphs there are. onnxscript infers them for every node, which takes half
the time of an export.

`built_once` builds each graph once and returns copies of it. One package is built several times before it is written:
for each precision, and before that for the measurements of int8. A copy takes a sixth of the time. It has no weights;
they are filled in later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import onnxscript
from onnx.defs import OpSchema, SchemaError, get_schema

from export.nn.marks import ROWS_OF

PLAIN = {
    ir.AttributeType.INT,
    ir.AttributeType.INTS,
    ir.AttributeType.FLOAT,
    ir.AttributeType.FLOATS,
    ir.AttributeType.STRING,
    ir.AttributeType.STRINGS,
}
"""Types of attributes whose values can be part of a key."""
READ = 20
"""Most elements of a constant whose values onnxscript uses for inference."""

Inferred = tuple[ir.DataType, tuple[int | ir.SymbolicDim, ...] | None]
_inferred: dict[tuple[Any, ...], list[Inferred]] = {}


class RememberingBuilder(onnxscript.GraphBuilder):
    """`onnxscript.GraphBuilder` with a cache; adds the same nodes.

    The methods below override private hooks. If a later onnxscript doesn't call them, building is only slower.
    """

    def subgraph(
        self,
        trace_function: Callable[..., Any],
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[ir.Value],
        *,
        name: str = "subgraph",
    ) -> ir.Graph:
        """Build a branch or a loop's body, with the cache too."""

        def traced(op: Any, *values: ir.Value | None) -> Any:
            op.builder.__class__ = type(self)  # onnxscript always makes its own class of builder here
            return trace_function(op, *values)

        return super().subgraph(traced, inputs, outputs, name=name)

    def _get_schema(self, op_type: str, domain: str, version: int | None) -> OpSchema | None:
        try:
            return None if version is None else _schema(op_type, version, domain)
        except SchemaError:
            return None

    def _cast_inputs(self, schema: OpSchema | None, inputs: Sequence[Any]) -> Sequence[ir.Value | None]:
        """Leave values as they are. If an input is a plain number, onnxscript gives it a type."""
        if all(x is None or isinstance(x, ir.Value) for x in inputs):
            return inputs
        return super()._cast_inputs(schema, inputs)

    def _partition_inputs_attributes(
        self, schema: OpSchema | None, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Put attributes in the schema's order. Any call but positional inputs with named attributes, and every wrong
        call, goes to onnxscript."""
        if schema is not None:
            attributes, required = _attributes(schema.name, schema.since_version, schema.domain)
            fits = schema.min_input <= len(args) <= schema.max_input
            if fits and required <= kwargs.keys() <= attributes.keys():
                return list(args), {name: kwargs[name] for name in attributes if name in kwargs}
        return super()._partition_inputs_attributes(schema, args, kwargs)

    def _cast_attributes(self, schema: OpSchema | None, attributes: dict[str, Any]) -> dict[str, Any]:
        """Give each attribute the type in the schema; onnxscript would derive it from the value."""
        types = {} if schema is None else _attributes(schema.name, schema.since_version, schema.domain)[0]
        return {name: ir.convenience.convert_attribute(name, x, types.get(name)) for name, x in attributes.items()}

    def _infer_shapes(self, node: ir.Node) -> None:
        known = any(x.type is not None or x.shape is not None for x in node.outputs)
        key = None if known else _key(node)
        if key is None:
            super()._infer_shapes(node)
        elif key in _inferred:
            for output, (dtype, dims) in zip(node.outputs, _inferred[key], strict=True):
                output.type = ir.TensorType(dtype)
                output.shape = None if dims is None else ir.Shape(dims)
        else:
            super()._infer_shapes(node)
            results = [
                (x.type.dtype, None if x.shape is None else tuple(x.shape.dims))
                for x in node.outputs
                if type(x.type) is ir.TensorType
            ]
            if len(results) == len(node.outputs):
                _inferred[key] = results


_schema = functools.cache(get_schema)


@functools.cache
def _attributes(operator: str, version: int, domain: str) -> tuple[dict[str, ir.AttributeType], set[str]]:
    """The types of an operator's attributes, in order, and the names of the required attributes."""
    attributes = ir.schemas.OpSignature.from_op_schema(_schema(operator, version, domain)).attributes
    return {x.name: x.type for x in attributes}, {x.name for x in attributes if x.required}


def _key(node: ir.Node) -> tuple[Any, ...] | None:
    """The key of a node: everything its outputs' types and shapes depend on. None if something isn't known."""
    attributes = node.attributes.values()
    graphs = [attribute for attribute in attributes if attribute.type == ir.AttributeType.GRAPH]
    plain = [attribute for attribute in attributes if attribute.type in PLAIN]
    if len(graphs) + len(plain) < len(attributes):
        return None
    # The nodes of a branch or body were inferred when they were added: the types of its outputs are known.
    read = [*node.inputs, *(x for each in graphs for x in (*each.as_graph().inputs, *each.as_graph().outputs))]
    inputs = [None if x is None else _input_key(x) for x in read]
    if UNKNOWN in inputs:
        return None
    values = [(attribute.name, attribute.type, attribute.value) for attribute in plain]
    counts = [(each.name, len(each.as_graph().inputs), len(each.as_graph().outputs)) for each in graphs]
    return node.domain, node.op_type, node.version, len(node.outputs), *values, *counts, *inputs


UNKNOWN = ()


def _input_key(x: ir.Value) -> tuple[Any, ...]:
    """The type and shape of an input, and the values of a small constant; UNKNOWN if it can't be a key."""
    if type(x.type) is not ir.TensorType:
        return UNKNOWN
    shape = None if x.shape is None else tuple(x.shape.dims)
    constant = x.const_value
    if constant is None or constant.size > READ:
        return x.type.dtype, shape
    if constant.dtype == ir.DataType.STRING:
        return UNKNOWN
    return x.type.dtype, shape, constant.dtype, constant.tobytes()


KEPT = 20_000
"""Most nodes of all cached graphs together, about 100 MB; a graph of six layers has a few hundred."""
_BUILT: dict[Hashable, tuple[ir.Model, int]] = {}
"""Graphs with their numbers of nodes, the most recently used last."""


def built_once(key: Hashable, build: Callable[[], ir.Model]) -> ir.Model:
    """The graph from `build`, as a copy the caller may change. `key` must be different for every other graph."""
    entry = _BUILT.pop(key, None)
    if entry is None:
        model = build()
        entry = model, sum(1 for _ in model.graph.all_nodes())
    _BUILT[key] = entry
    while len(_BUILT) > 1 and sum(nodes for _, nodes in list(_BUILT.values())) > KEPT:
        _BUILT.pop(next(iter(_BUILT)), None)
    return _copied(entry[0])


def forget() -> None:
    """Empty the cache of graphs, e.g. after the code that builds them has changed."""
    _BUILT.clear()


def _copied(model: ir.Model) -> ir.Model:
    copy = model.clone()
    for value in _values(copy):
        if ROWS_OF in value.meta:
            parameter = value.meta[ROWS_OF]  # it isn't copied if another graph holds it
            value.meta[ROWS_OF] = copy.graph.initializers.get(str(parameter.name), parameter)
    return copy


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from graph.inputs
        for node in graph:
            yield from node.outputs
