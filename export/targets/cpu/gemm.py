"""A pass for graphs whose activations have two dimensions: each Linear, with what is added to it, becomes one Gemm.

    MatMul(x, Transpose(W)) --> Add(., bias or residual)        Gemm(x, W, bias or residual, transB=1)

The product starts from C, so the addition costs nothing, and W is read as it is stored.
"""

from __future__ import annotations

import onnx_ir as ir

from export.nn.marks import ROWS_OF


def use_gemm(graph: ir.Graph) -> None:
    """Replace every product with a transposed initializer, or with some rows of one, in place."""
    for node in list(graph):
        second = node.inputs[1] if node.op_type == "MatMul" else None
        if (weight := _transposed(second)) is not None:
            _replace(graph, node, weight, True)
        elif second is not None and ROWS_OF in second.meta:
            _replace(graph, node, second, False)


def join_reshapes(graph: ir.Graph) -> None:
    """Let a Reshape of a Reshape read what the first one reads, and leave it out if that has its shape, in place: heads
    are split and merged for the sake of what may lie between."""
    for node in graph:
        before = node.inputs[0] if node.op_type == "Reshape" else None
        producer = None if before is None else before.producer()
        if producer is not None and producer.op_type == "Reshape" and _counts_all(node.inputs[1]):
            node.replace_input_with(0, source := producer.inputs[0])
            if source is not None and _are_alike(source, node.outputs[0]):
                ir.convenience.replace_all_uses_with(node.outputs[0], source)


def _are_alike(x: ir.Value, reshaped: ir.Value) -> bool:
    """Return whether both are known to be matrices of as many columns, and so the same."""
    if x.shape is None or reshaped.shape is None or reshaped.is_graph_output():
        return False
    return len(x.shape) == len(reshaped.shape) == 2 and x.shape.is_static(1) and x.shape[1] == reshaped.shape[1]


def _counts_all(shape: ir.Value | None) -> bool:
    """Return whether a Reshape to it takes no extent from its input (0), as far as is known: of constants and
    extents."""
    const = None if shape is None else ir.convenience.get_const_tensor(shape)
    if const is not None:
        return 0 not in const.numpy()
    producer = None if shape is None else shape.producer()
    if producer is None or producer.op_type not in ("Shape", "Concat"):
        return False
    return producer.op_type == "Shape" or all(map(_counts_all, producer.inputs))


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """Return the initializer whose transpose this is."""
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type != "Transpose":
        return None
    source = producer.inputs[0]
    return source if source is not None and source.is_initializer() else None


def _replace(graph: ir.Graph, product: ir.Node, weight: ir.Value, transposed: bool) -> None:
    replaced, addends = [product], []
    while (following := _sole_addition(replaced[-1])) is not None:
        addition, addend = following
        # A Gemm adds one matrix, or one vector; several vectors are cheap to sum beforehand.
        if addends and not (_is_vector(addend) and _is_vector(addends[-1])):
            break
        replaced.append(addition)
        addends.append(addend)
        if not _is_vector(addend):
            break
    old = replaced[-1].outputs[0]
    new = []
    while len(addends) > 1:
        second = addends.pop()
        new.append(ir.node("Add", [addends.pop(), second], name=f"{product.name}/C{len(addends)}"))
        addends.append(new[-1].outputs[0])
        addends[-1].name = f"{old.name}/C{len(addends)}"
    gemm = ir.node(
        "Gemm", [product.inputs[0], weight, *addends], {"transB": int(transposed)}, name=f"{product.name}/Gemm"
    )
    result = gemm.outputs[0]
    result.shape, result.type = old.shape, old.type
    result.name, old.name = old.name, f"{old.name}/replaced"
    graph.insert_after(replaced[-1], [*new, gemm])
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    graph.remove(replaced, safe=True)


def _sole_addition(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Return the Add that alone reads this node's result, and what it adds."""
    output = node.outputs[0]
    users = list(output.uses())
    if len(users) != 1 or output.is_graph_output() or users[0].node.op_type != "Add":
        return None
    addition = users[0].node
    addend = addition.inputs[1] if addition.inputs[0] is output else addition.inputs[0]
    return None if addend is None else (addition, addend)


def _is_vector(value: ir.Value) -> bool:
    """Say whether it is known to be a vector: a bias or an input. All else here has two dimensions."""
    return (value.is_initializer() or value.is_graph_input()) and value.shape is not None and len(value.shape) == 1
