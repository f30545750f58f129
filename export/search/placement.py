"""Weights where ONNX Runtime packs them, and stored where it frees what it has packed.

It packs a product's weights when it loads a graph, but of a loop within a loop, or a branch in it, only those that are
constants of that inner graph; products with others take up to twice the time. Initializers of inner graphs, though, it
copies with the node that holds the graph, once a level, and keeps for as long as the session. So matrices are stored in
the outermost graph, and the inner graph gets a Transpose or a Reshape of each, which runtimes fold into a constant of
that graph.
"""

from __future__ import annotations

from typing import cast

import onnx_ir as ir


def move_inside(model: ir.Model, name: str) -> None:
    """Give the graph `name` within this one its own constants, once they all have values."""
    (inner,) = (graph for graph in model.graph.subgraphs() if graph.name == name)
    for node in [node for node in model.graph if node.op_type == "Transpose"]:
        if node.inputs[0] in model.graph.initializers.values() and _graphs(node.outputs[0]) == {inner}:
            model.graph.remove(node)
            inner.insert_before(inner[0], node)
    for value in list(model.graph.initializers.values()):
        if value.is_graph_input() or value.shape is None:
            continue
        if len(value.shape) > 1:
            users = {node: None for node, _ in value.uses() if node.graph is inner}
            products = [node for node in users if node.op_type not in ("Gather", "Transpose")]
            if products:
                _read_through_reshape(inner, value, products, f"{value.name}/{name}")
        elif _graphs(value) == {inner}:
            del model.graph.initializers[str(value.name)]
            inner.register_initializer(value)


def _graphs(value: ir.Value) -> set[ir.Graph | None]:
    """Return the graphs in which a value is read."""
    return {cast(ir.Graph | None, node.graph) for node, _ in value.uses()}


def _read_through_reshape(graph: ir.Graph, value: ir.Value, readers: list[ir.Node], name: str) -> None:
    assert value.const_value is not None
    dims = ir.tensor(list(value.const_value.shape.numpy()), dtype=ir.DataType.INT64, name=f"{name}/dims")
    shape = ir.Value(name=dims.name, shape=ir.Shape([dims.size]), type=ir.TensorType(dims.dtype), const_value=dims)
    graph.register_initializer(shape)
    node = ir.node("Reshape", [value, shape], name=f"{name}/Reshape")
    node.outputs[0].name = f"{name}/here"
    graph.insert_before(graph[0], node)
    for reader in readers:
        for i, read in enumerate(reader.inputs):
            if read is value:
                reader.replace_input_with(i, node.outputs[0])
