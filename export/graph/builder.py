"""A graph in the making, for every target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from export.interface import GRAPHS, PARTS, SOURCE_NAMES, STATE, Ports, Request
from export.nn.cache import KeyValues
from export.nn.marks import FULL_PRECISION
from export.nn.primitives import Op

from .built import RememberingBuilder

OPSET = 20
IR_VERSION = 9
DTYPES = {
    "float32": ir.DataType.FLOAT,
    "int64": ir.DataType.INT64,
    "int32": ir.DataType.INT32,
    "bool": ir.DataType.BOOL,
    "string": ir.DataType.STRING,
}
"""The types of ports, in ONNX."""
UNDECLARED = Ports((), ())


class GraphBuilder:
    """One graph in the making: its inputs by value (`export/interface.py`), its outputs, taps."""

    def __init__(self, name: str, ports: Ports = UNDECLARED) -> None:
        """ports: what is declared of the graph; without them `input` and `output` declare."""
        self.graph = ir.Graph([], [], nodes=[], name=name, opset_imports={"": OPSET})
        self.builder = RememberingBuilder(self.graph)
        self.op: Op = self.builder.op
        self.tapped: list[ir.Value] = []
        self.ports = ports
        self.inputs = {port.value: self.input(port.name, *port.axes, dtype=port.dtype) for port in ports.inputs}
        self._outputs_made: set[str] = set()

    @classmethod
    def declared(cls, name: str, request: Request) -> Self:
        """Begin the graph of that name with the inputs that it has for this request."""
        return cls(name, GRAPHS[name](request))

    def input(self, name: str, *axes: str | int, dtype: str = "float32") -> ir.Value:
        return self.builder.input(name, DTYPES[dtype], list(axes))

    def source(self) -> dict[str, Any]:
        """Return the arguments of `Transformer.encode`: ids, or None and vectors; the mask; what else the graph
        reads."""
        source: dict[str, Any] = {"source_ids": None}
        source |= {value: x for value, x in self.inputs.items() if value in SOURCE_NAMES}
        if (vectors := source.get("inputs_embeds")) is not None:
            # A tap names the value that it is given: where no positions are added, that would be the input.
            source["inputs_embeds"] = self.op.Identity(vectors)
        return source

    def pairs(self, value: str) -> list[KeyValues]:
        """Return the keys and values of every layer that come in as `value`; none where the graph takes none."""
        values = self.entries(value)
        return list(zip(values[::2], values[1::2], strict=True))

    def entries(self, value: str) -> list[ir.Value]:
        """Return all that comes in as `value`, layer by layer."""
        return [x for name, x in self.inputs.items() if name.startswith(f"{value}.")]

    def give(self, **values: ir.Value | Sequence[tuple[ir.Value, ...]] | None) -> None:
        """Make these values outputs, in the order of their ports; those without a port are left out. cache, cross: the
        keys and values of every layer, or its state."""
        single = {name: value for name, value in values.items() if isinstance(value, ir.Value)}
        for name, value in values.items():
            if value is not None and not isinstance(value, ir.Value):
                single |= {
                    f"{name}.{i}.{part}": x
                    for i, pair in enumerate(value)
                    for part, x in zip(PARTS if len(pair) > 1 else [STATE], pair, strict=True)
                }
        for port in self.ports.outputs:
            if port.value in single:
                self.output(port.name, single[port.value], *port.axes, type=DTYPES[port.dtype])
                self._outputs_made.add(port.value)
        if "attention" in single:  # before a target changes one of two equal nodes
            merge_equal(ir.Model(self.graph, ir_version=IR_VERSION))

    def output(self, name: str, value: ir.Value, *axes: str | int, type: ir.DataType = ir.DataType.FLOAT) -> None:
        if value in self.tapped:  # its name is taken
            value = self.op.Identity(value)
        value.shape = ir.Shape(axes)
        value.type = ir.TensorType(type)
        self.builder.add_output(value, name)

    def tap(self, name: str, value: ir.Value) -> None:
        """Name a value: a tap costs nothing else."""
        if name != "logits":  # an output already
            value.name = name
            self.tapped.append(value)

    def model(self) -> ir.Model:
        if missing := [port.name for port in self.ports.outputs if port.value not in self._outputs_made]:
            raise ValueError(f"{self.graph.name}: declared outputs not given: {', '.join(missing)}")
        model = ir.Model(self.graph, ir_version=IR_VERSION, producer_name="mlx-transformer")
        merge_equal(model)
        RemoveUnusedNodesPass()(model)
        _check_names(model)
        for node in model.graph.all_nodes():
            node.metadata_props.clear()
            for value in node.outputs:  # the builder's guesses; runtimes infer their own
                if not value.is_graph_output():
                    value.shape = value.type = None
        return model


def merge_equal(model: ir.Model) -> None:
    """Make nodes one that compute the same from the same values."""
    wide = [node for node in model.graph.all_nodes() if FULL_PRECISION in node.meta]
    for node in wide:  # another operator, as long as equal ones are made one
        node.overload = FULL_PRECISION
    CommonSubexpressionEliminationPass()(model)
    for node in wide:
        node.overload = ""


def _check_names(model: ir.Model) -> None:
    """Raise `ValueError` if two nodes have one name: reports and profiles would take them for each other."""
    twice = [f"{name} ({n})" for name, n in Counter(node.name for node in model.graph.all_nodes()).items() if n > 1]
    if twice:
        raise ValueError(f"{model.graph.name}: node names used more than once: {', '.join(twice)}")
