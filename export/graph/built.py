"""A builder that asks onnx once: what a node's output is depends on its operator and the types of its inputs, and those
are few, however many layers and graphs there are. onnxscript asks for every node, half of the time of an export.

Graphs that have been built already: each is built once, and copied for whoever asks for it again.

One package is built several times before it is written: for each precision, and for the measurements of int8 before
that. A copy takes a sixth of the time. Weights are no part of it: they are filled into the copy.
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
"""Attributes that are equal where their values are."""
READ = 20
"""Elements of the largest constant whose values onnxscript lets an inference read."""

Inferred = tuple[ir.DataType, tuple[int | ir.SymbolicDim, ...] | None]
_inferred: dict[tuple[Any, ...], list[Inferred]] = {}


class RememberingBuilder(onnxscript.GraphBuilder):
    """`onnxscript.GraphBuilder`, node for node; a version of it without these hooks is only slower."""

    def subgraph(
        self,
        trace_function: Callable[..., Any],
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[ir.Value],
        *,
        name: str = "subgraph",
    ) -> ir.Graph:
        """Build the graph of a branch or a loop's body, remembering as well."""

        def traced(op: Any, *values: ir.Value | None) -> Any:
            op.builder.__class__ = type(self)  # onnxscript names the class of the builders inside
            return trace_function(op, *values)

        return super().subgraph(traced, inputs, outputs, name=name)

    def _get_schema(self, op_type: str, domain: str, version: int | None) -> OpSchema | None:
        try:
            return None if version is None else _schema(op_type, version, domain)
        except SchemaError:
            return None

    def _cast_inputs(self, schema: OpSchema | None, inputs: Sequence[Any]) -> Sequence[ir.Value | None]:
        """Leave values as they are. Numbers among the inputs are onnxscript's to give a type."""
        if all(x is None or isinstance(x, ir.Value) for x in inputs):
            return inputs
        return super()._cast_inputs(schema, inputs)

    def _partition_inputs_attributes(
        self, schema: OpSchema | None, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Give attributes the schema's order. Anything that is not plainly inputs by place and attributes by name, and
        all that is wrong, is onnxscript's to sort."""
        if schema is not None:
            attributes, required = _attributes(schema.name, schema.since_version, schema.domain)
            fits = schema.min_input <= len(args) <= schema.max_input
            if fits and required <= kwargs.keys() <= attributes.keys():
                return list(args), {name: kwargs[name] for name in attributes if name in kwargs}
        return super()._partition_inputs_attributes(schema, args, kwargs)

    def _cast_attributes(self, schema: OpSchema | None, attributes: dict[str, Any]) -> dict[str, Any]:
        """Give each attribute the schema's type, which onnxscript would look for in the value."""
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
    """Return the types of an operator's attributes in order, and the names of those that it can't do without."""
    attributes = ir.schemas.OpSignature.from_op_schema(_schema(operator, version, domain)).attributes
    return {x.name: x.type for x in attributes}, {x.name for x in attributes if x.required}


def _key(node: ir.Node) -> tuple[Any, ...] | None:
    """Return all that the types and shapes of a node's outputs depend on; None where that can't be told."""
    attributes = node.attributes.values()
    graphs = [attribute for attribute in attributes if attribute.type == ir.AttributeType.GRAPH]
    plain = [attribute for attribute in attributes if attribute.type in PLAIN]
    if len(graphs) + len(plain) < len(attributes):
        return None
    # A branch's or a body's nodes have been asked about: what it returns is known.
    read = [*node.inputs, *(x for each in graphs for x in (*each.as_graph().inputs, *each.as_graph().outputs))]
    inputs = [None if x is None else _input_key(x) for x in read]
    if UNKNOWN in inputs:
        return None
    values = [(attribute.name, attribute.type, attribute.value) for attribute in plain]
    counts = [(each.name, len(each.as_graph().inputs), len(each.as_graph().outputs)) for each in graphs]
    return node.domain, node.op_type, node.version, len(node.outputs), *values, *counts, *inputs


UNKNOWN = ()


def _input_key(x: ir.Value) -> tuple[Any, ...]:
    """Return what is known of an input: its type, its shape and, of a small constant, its values."""
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
"""The nodes of the graphs that are kept, those asked for last: some 100 MB. A graph of six layers has a few hundred."""
_BUILT: dict[Hashable, tuple[ir.Model, int]] = {}
"""Graphs with the numbers of their nodes, what was asked for last at the end."""


def built_once(key: Hashable, build: Callable[[], ir.Model]) -> ir.Model:
    """Return what `build` makes, a copy that is the caller's own; `key` tells one graph from every other."""
    entry = _BUILT.pop(key, None)
    if entry is None:
        model = build()
        entry = model, sum(1 for _ in model.graph.all_nodes())
    _BUILT[key] = entry
    while len(_BUILT) > 1 and sum(nodes for _, nodes in list(_BUILT.values())) > KEPT:
        _BUILT.pop(next(iter(_BUILT)), None)
    return _copied(entry[0])


def forget() -> None:
    """Let the next graph be built anew: what builds it has been changed."""
    _BUILT.clear()


def _copied(model: ir.Model) -> ir.Model:
    copy = model.clone()
    for value in _values(copy):
        if ROWS_OF in value.meta:
            parameter = value.meta[ROWS_OF]  # which stays the same where another graph holds it
            value.meta[ROWS_OF] = copy.graph.initializers.get(str(parameter.name), parameter)
    return copy


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from graph.inputs
        for node in graph:
            yield from node.outputs
