"""float16 and bfloat16: weights and activations in 16 bits, or only weights; inputs and outputs stay float32.

    float32 input --> Cast --> 16 bits ... --> Cast --> float32 output

Nodes that `nn/` marks with `full_precision`, e.g. RMSNorm's, stay float32. In float16 so do products with matrices of
`Role.UNBOUNDED` and the sums over them. LayerNormalization and Softmax accumulate in float32 anyway. A mask's -1e9
would be infinite in float16, so it becomes -6e4; e^(score - 6e4) is 0 too. Parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Container

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.nn.marks import FULL_PRECISION, ROLE, Role
from mlx_transformer.system.errors import UserError

from .products import LATE, derived

HIDDEN = -6e4
TYPES = {ir.DataType.FLOAT16: np.float16, ir.DataType.BFLOAT16: ml_dtypes.bfloat16}


def half(model: ir.Model, kind: ir.DataType) -> None:
    """Compute a built graph in 16 bits, before its weights are filled. `kind`: FLOAT16 or BFLOAT16."""
    unbounded = _keep_sums(model) if kind == ir.DataType.FLOAT16 else set()
    wide = [node for node in model.graph.all_nodes() if _is_wide(node)]
    constants = _constants(model) | unbounded
    for value in model.graph.initializers.values():
        if value.dtype == ir.DataType.FLOAT and value not in constants:
            _narrow(value, kind)
    for value in list(model.graph.inputs):
        if value.dtype == ir.DataType.FLOAT:
            _cast_after(model.graph, value, kind)
    for node in wide:
        _keep_wide(node, kind, constants)
    for graph in model.graph.subgraphs():
        for value in (*graph.inputs, *graph.outputs):
            if value.dtype == ir.DataType.FLOAT:
                value.type = ir.TensorType(kind)
    for i, value in enumerate(model.graph.outputs):
        if value.dtype == ir.DataType.FLOAT:
            model.graph.outputs[i] = _cast_output(model.graph, value)


def stored_half(model: ir.Model, kind: ir.DataType) -> None:
    """Store the parameters in 16 bits, and cast them to float32 once, when a runtime loads the graph.

    For runtimes that don't compute in this type, e.g. ONNX Runtime's CPU provider.
    """
    for value in list(model.graph.initializers.values()):
        if value.dtype == ir.DataType.FLOAT and value.const_value is None:
            _narrow(value, kind)
            _cast_after(model.graph, value, ir.DataType.FLOAT)


def _is_wide(node: ir.Node) -> bool:
    return bool(node.meta.get(FULL_PRECISION))


def _keep_sums(model: ir.Model) -> set[ir.Value]:
    """Mark products with `Role.UNBOUNDED` matrices, and the sums over their results, as float32; returns the
    matrices."""
    matrices = {value for value in model.graph.initializers.values() if value.meta.get(ROLE) is Role.UNBOUNDED}
    reached = list(matrices)
    while reached:
        value = reached.pop()
        readers = ("Transpose", "MatMul") if _is_weight(value, matrices) else ("Add",)
        for node, _ in value.uses():
            if node.op_type in readers and not _is_wide(node):
                node.meta[FULL_PRECISION] = True
                reached += node.outputs
    return matrices


def _is_weight(value: ir.Value, matrices: Container[ir.Value | None]) -> bool:
    maker = value.producer()
    return value in matrices or (maker is not None and maker.op_type == "Transpose" and maker.inputs[0] in matrices)


def _constants(model: ir.Model) -> set[ir.Value]:
    """The constants of the nodes that stay float32; a copy, if 16-bit nodes read the constant too."""
    constants = set()
    for value in list(model.graph.initializers.values()):
        uses = list(value.uses())
        inside = [(user, i) for user, i in uses if _is_wide(user)]
        if not inside or value.const_value is None:
            continue
        if value.dtype == ir.DataType.FLOAT and len(inside) < len(uses):
            tensor = ir.tensor(value.const_value.numpy(), name=f"{value.name}.wide")
            copy = ir.Value(name=tensor.name, shape=value.shape, type=value.type, const_value=tensor)
            model.graph.initializers[str(copy.name)] = copy
            for user, i in inside:
                user.replace_input_with(i, copy)
            value = copy
        constants.add(value)
    return constants


def _narrow(value: ir.Value, kind: ir.DataType) -> None:
    name = str(value.name)

    def make(array: NDArray) -> list[NDArray]:
        with np.errstate(over="ignore"):  # checked below
            narrow = array.astype(TYPES[kind])
        if not np.isfinite(narrow).all():
            raise UserError(f"{name} has values beyond {kind.name.lower()}'s range; export it in another precision")
        return [narrow]

    if value.const_value is None:
        value.meta[LATE] = derived(value, make, kind.name, elementwise=True), 0
    else:
        array = value.const_value.numpy()
        if kind == ir.DataType.FLOAT16:
            array = np.maximum(array, np.float32(HIDDEN))
        value.const_value = ir.tensor(make(array)[0], name=name)
    value.type = ir.TensorType(kind)


def _cast(value: ir.Value, name: str, to: ir.DataType) -> ir.Node:
    node = ir.node("Cast", [value], {"to": to}, name=name)
    node.outputs[0].name = f"{name}.0"
    return node


def _cast_after(graph: ir.Graph, value: ir.Value, kind: ir.DataType) -> None:
    users = list(value.uses())
    cast = _cast(value, f"{value.name}/Cast", kind)
    for user, i in users:
        user.replace_input_with(i, cast.outputs[0])
    graph.insert_before(graph[0], cast)


def _keep_wide(node: ir.Node, kind: ir.DataType, constants: Container[ir.Value]) -> None:
    """Add casts to float32 before a node, and back to `kind` after it. Constants, e.g. axes, get none."""
    assert node.graph is not None
    for i, value in enumerate(node.inputs):
        producer = None if value is None else value.producer()
        if value is not None and value not in constants and (producer is None or not _is_wide(producer)):
            cast = _cast(value, f"{node.name}/Cast_{i}", ir.DataType.FLOAT)
            node.graph.insert_before(node, cast)
            node.replace_input_with(i, cast.outputs[0])
    output = node.outputs[0]
    narrow = [(user, i) for user, i in output.uses() if not _is_wide(user) and user.op_type != "Cast"]
    if narrow:
        cast = _cast(output, f"{node.name}/Cast_y", kind)
        node.graph.insert_after(node, cast)
        for user, i in narrow:
            user.replace_input_with(i, cast.outputs[0])


def _cast_output(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """A float32 output behind the 16-bit value; the output takes the value's name, the value gets another."""
    name = str(value.name)
    value.name = f"{name}.narrow"
    cast = _cast(value, f"{name}/Cast", ir.DataType.FLOAT)
    output = cast.outputs[0]
    output.name, output.shape, output.type = name, value.shape, ir.TensorType(ir.DataType.FLOAT)
    value.shape = value.type = None
    graph.append(cast)
    return output
