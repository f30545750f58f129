"""`GraphBuilder`: declares a graph's inputs and outputs, collects its nodes and gives the finished model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
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
"""The types of ports (`export/interface.py`) in ONNX."""
UNDECLARED = Ports((), ())


class GraphBuilder:
    """A graph under construction. `inputs`: the input of each value (`export/interface.py`), e.g. "source_mask"."""

    def __init__(self, name: str, ports: Ports = UNDECLARED) -> None:
        """ports: the graph's inputs and outputs. Without them, declare with `input` and `output`."""
        self.graph = ir.Graph([], [], nodes=[], name=name, opset_imports={"": OPSET})
        self.builder = RememberingBuilder(self.graph)
        self.op: Op = self.builder.op
        self.tapped: list[ir.Value] = []
        self.ports = ports
        self.inputs = {port.value: self.input(port.name, *port.axes, dtype=port.dtype) for port in ports.inputs}
        self._outputs_made: set[str] = set()

    @classmethod
    def declared(cls, name: str, request: Request) -> Self:
        """Begin the graph `name`, e.g. "encoder_model", with the inputs it has for this request."""
        return cls(name, GRAPHS[name](request))

    def input(self, name: str, *axes: str | int, dtype: str = "float32") -> ir.Value:
        return self.builder.input(name, DTYPES[dtype], list(axes))

    def source(self) -> dict[str, Any]:
        """Arguments of `Transformer.encode`: source_ids (None if the graph reads vectors), the mask, other inputs."""
        source: dict[str, Any] = {"source_ids": None}
        source |= {value: x for value, x in self.inputs.items() if value in SOURCE_NAMES}
        if (vectors := source.get("inputs_embeds")) is not None:
            # A tap renames its value. If no positions are added, that would be the graph's input.
            source["inputs_embeds"] = self.op.Identity(vectors)
        return source

    def pairs(self, value: str) -> list[KeyValues]:
        """The (keys, values) of every layer that come in as `value`, "cache" or "cross"; [] if the graph has none."""
        values = self.entries(value)
        return list(zip(values[::2], values[1::2], strict=True))

    def entries(self, value: str) -> list[ir.Value]:
        """All inputs of `value`, layer by layer, e.g. cache.0.key, cache.0.value, cache.1.key, ..."""
        return [x for name, x in self.inputs.items() if name.startswith(f"{value}.")]

    def give(self, **values: ir.Value | Sequence[tuple[ir.Value, ...]] | None) -> None:
        """Make these values outputs, in the order of their ports; a value without a port is left out.

        cache, cross: for every layer its (keys, values), or its (state,).
        """
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
        if "attention" in single:  # before a target changes nodes: `weights` adds the same ones as `attend`
            merge_equal(ir.Model(self.graph, ir_version=IR_VERSION))

    def output(self, name: str, value: ir.Value, *axes: str | int, type: ir.DataType = ir.DataType.FLOAT) -> None:
        if value in self.tapped:  # a value has one name, and the tap needs it
            value = self.op.Identity(value)
        value.shape = ir.Shape(axes)
        value.type = ir.TensorType(type)
        self.builder.add_output(value, name)

    def tap(self, name: str, value: ir.Value) -> None:
        """Give a value its tap's name; adds no node."""
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
            for value in node.outputs:  # drop the builder's guesses; runtimes infer their own
                if not value.is_graph_output():
                    value.shape = value.type = None
        for port in self.ports.inputs:
            if port.default is not None:  # last: the builder treats an input with a value as a constant
                value = self.inputs[port.value]
                value.const_value = ir.tensor(np.full([1] * len(port.axes), port.default, port.dtype), name=port.name)
                self.graph.register_initializer(value)
        return model


def merge_equal(model: ir.Model) -> None:
    """Merge nodes that apply the same operator to the same values."""
    wide = [node for node in model.graph.all_nodes() if FULL_PRECISION in node.meta]
    for node in wide:  # a float32 node must not be merged with a 16-bit node: make them different operators meanwhile
        node.overload = FULL_PRECISION
    CommonSubexpressionEliminationPass()(model)
    for node in wide:
        node.overload = ""


def _check_names(model: ir.Model) -> None:
    """Raise `ValueError` if two nodes have the same name: reports and profiles would confuse them."""
    twice = [f"{name} ({n})" for name, n in Counter(node.name for node in model.graph.all_nodes()).items() if n > 1]
    if twice:
        raise ValueError(f"{model.graph.name}: node names used more than once: {', '.join(twice)}")
