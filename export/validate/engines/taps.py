"""Values inside an exported graph as outputs, and its constants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The initializers of a graph and of the graphs within it."""
    yield from graph.initializer
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        if attribute.HasField("g"):
            yield from initializers(attribute.g)


def constant_part(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The part of a graph that computes this value, which doesn't depend on any input."""
    maker = {output: node for node in model.graph.node for output in node.output}
    needed, open_values = {name}, [name]
    while open_values:
        inputs = set(maker[value].input if (value := open_values.pop()) in maker else ()) - needed
        needed |= inputs
        open_values += inputs
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    part.graph.name = name
    part.graph.node.extend(node for node in model.graph.node if needed & {*node.output})
    part.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    part.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return part
