"""Values inside an exported graph as outputs."""

from __future__ import annotations

from collections.abc import Sequence

import onnx


def add_taps(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy of an exported graph in which the values of these names (those that it has) are outputs as well."""
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    present = {output for node in model.graph.node for output in node.output}
    outputs = {output.name for output in model.graph.output}
    for name in names:
        if name in present - outputs:
            tapped.graph.output.append(onnx.ValueInfoProto(name=name))  # of whatever type it is
    return tapped
