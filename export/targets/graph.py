"""A graph in the making, for every target."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
import onnxscript
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from export.nn.cache import CacheShape, KeyValues
from export.nn.primitives import FULL_PRECISION, Op

OPSET = 20
IR_VERSION = 9

# transformers.js fills the axis of this name, and sets the other dynamic ones to 0, when it makes an empty cache.
BATCH = "batch_size"


class GraphBuilder:
    """One graph in the making: typed inputs, named outputs, taps."""

    def __init__(self, name: str) -> None:
        self.graph = ir.Graph([], [], nodes=[], name=name, opset_imports={"": OPSET})
        self.builder = onnxscript.GraphBuilder(self.graph)
        self.op: Op = self.builder.op
        self.tapped: list[ir.Value] = []

    def ids(self, name: str, *axes: str) -> ir.Value:
        return self.builder.input(name, ir.DataType.INT64, axes)

    def floats(self, name: str, *axes: str | int) -> ir.Value:
        return self.builder.input(name, ir.DataType.FLOAT, axes)

    def source(self, width: int, vectors: bool, *axes: str) -> tuple[ir.Value | None, ir.Value | None]:
        """What an encoder reads: `input_ids` and None, or with `vectors` None and `inputs_embeds` of that width."""
        if not vectors:
            return self.ids("input_ids", *axes), None
        # A tap names the value that it is given: where no positions are added, that would be the input.
        return None, self.op.Identity(self.floats("inputs_embeds", *axes, width))

    def output(self, name: str, value: ir.Value, *axes: str | int, type: ir.DataType = ir.DataType.FLOAT) -> None:
        if value in self.tapped:  # its name is taken
            value = self.op.Identity(value)
        value.shape = ir.Shape(axes)
        value.type = ir.TensorType(type)
        self.builder.add_output(value, name)

    def keys_values(self, name: str, shape: CacheShape, rows: str | int, length: str | int) -> KeyValues:
        """Inputs NAME.key and NAME.value (rows, K, length, d)."""
        keys, values = (
            self.floats(f"{name}.{part}", rows, shape.heads, length, width) for part, width in shape.widths.items()
        )
        return keys, values

    def put_keys_values(
        self, name: str, pair: KeyValues, shape: CacheShape, rows: str | int, length: str | int
    ) -> None:
        """Outputs NAME.key and NAME.value."""
        for (part, width), value in zip(shape.widths.items(), pair, strict=True):
            self.output(f"{name}.{part}", value, rows, shape.heads, length, width)

    def tap(self, name: str, value: ir.Value) -> None:
        """A tap costs nothing: it is the name of a value."""
        if name != "logits":  # an output already
            value.name = name
            self.tapped.append(value)

    def model(self) -> ir.Model:
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
    """Node names serve reports and profiles: two of one name would be taken for each other."""
    twice = [f"{name} ({n})" for name, n in Counter(node.name for node in model.graph.all_nodes()).items() if n > 1]
    if twice:
        raise ValueError(f"{model.graph.name}: node names used more than once: {', '.join(twice)}")
