"""Tables and classifiers of many rows in parts, so that none of a graph's tensors is longer than `LIMIT`: a graph pass.

    ids --> 0 in other parts' rows --> Gather(NAME.rows_0) --> times 1 or 0 --+
     |                                                                        +--> sum: the row
     +----> 0 in other parts' rows --> Gather(NAME.rows_1) --> times 1 or 0 --+

    x --> MatMul(NAME.rows_0, transposed) --> bias --> logits.rows_0 (B, L, 16384)
     +--> MatMul(NAME.rows_1, transposed) --> bias --> logits.rows_1 (B, L, the rest)

Arithmetic alone, as everywhere in these graphs; exact, for x * 1 + y * 0 is x for finite values (-0 becomes 0). Ids are
whole in float32 up to 2^24. Parts of a parameter lie in the data file one after the other: its bytes as they are.

Shapes: B rows, L positions, D width, V rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from export.graph.edit import Nodes
from export.interface import Port
from export.nn.marks import extent
from export.precision.late_weights import SLICE, derived, late_initializer

from .shape import part_name

# ONNX Runtime's provider left nodes with longer inputs to the CPU (helper.cc, IsInputSupported): a model with one
# didn't load (apple/coremltools#1003), and Metal's textures end there. Since microsoft/onnxruntime#24594 (2025) it asks
# that of convolutions alone; what Core ML makes of all other tensors, weights and outputs too, is written nowhere.
LIMIT = 16384
"""Longest extent."""


def split_rows(model: ir.Model) -> None:
    """Change a built graph whose shapes are known, before its weights are filled."""
    for node in list(model.graph):
        if node.op_type == "Gather" and _is_long(node.inputs[0]):
            _look_up(model, node)
    for output in list(model.graph.outputs):
        if output.name == "logits" and extent(output, -1) > LIMIT:
            _classify(model.graph, output)


def split_outputs(outputs: Iterable[Port]) -> Iterator[Port]:
    """Yield the outputs that a graph has once `split_rows` has changed it."""
    for port in outputs:
        length = port.axes[-1] if port.name == "logits" else 0
        if isinstance(length, int) and length > LIMIT:
            for k, rows in enumerate(_slices(length)):
                yield port._replace(name=part_name(port.name, k), axes=(*port.axes[:-1], rows.stop - rows.start))
        else:
            yield port


def _look_up(model: ir.Model, node: ir.Node) -> None:
    """Replace Gather(V rows, ids (B, L)) -> (B, L, D), or (B, L) of a table of single numbers, integers too."""
    table, ids = node.inputs
    assert table is not None
    is_integer, single = table.dtype != ir.DataType.FLOAT, len(table.shape or ()) == 1
    add = Nodes(model, node, "rows")

    def number(value: float) -> ir.Value:
        return add.constant(np.float32(value))

    ids = add("Cast", ids, to=ir.DataType.FLOAT)
    zero, one = number(0), number(1)
    starts = range(0, extent(table, 0), LIMIT)
    behind = [add("Clip", add("Sub", ids, number(start - 1)), zero, one) for start in starts[1:]]  # 1 from `start` on
    within = [add("Sub", *pair) for pair in zip([one, *behind], behind, strict=False)] + [behind[-1]]
    total = None
    for start, part, is_inside in zip(starts, _parts(model.graph, table), within, strict=True):
        clipped = add("Clip", add("Sub", ids, number(start)), zero, number(extent(part, 0) - 1))
        rows = add("Gather", part, add("Cast", clipped, to=ir.DataType.INT64), axis=0)
        rows = add("Cast", rows, to=ir.DataType.FLOAT) if is_integer else rows
        is_inside = is_inside if single else add("Unsqueeze", is_inside, add.constant([-1]))
        rows = add("Mul", rows, is_inside)
        total = rows if total is None else add("Add", total, rows)
    assert total is not None
    add.replace(add("Cast", total, to=table.dtype) if is_integer else total)


def _classify(graph: ir.Graph, output: ir.Value) -> None:
    """Replace MatMul(x, W^T) and what follows it, each value of a row by itself, by as many outputs as W has parts."""
    product, *after = _since_product(output)
    turned = product.inputs[1].producer() if product.op_type == "MatMul" and product.inputs[1] is not None else None
    matrix = turned.inputs[0] if turned is not None and turned.op_type == "Transpose" else None
    if matrix is None:
        raise ValueError(f"{output.name}: longer than {LIMIT}, and not the product with a matrix's rows")
    operands = [matrix, *(value for node in after for value in node.inputs)]
    columns: dict[ir.Value | None, list[ir.Value]] = {x: _parts(graph, x) for x in operands if x and _is_long(x)}
    made: list[ir.Node] = []
    outputs = []
    for k, part in enumerate(columns[matrix]):
        transpose = ir.node("Transpose", [part], {"perm": [1, 0]}, name=f"{part.name}/Transpose")
        transpose.outputs[0].name = f"{part.name}/transposed"
        made.append(transpose)
        last = product.outputs[0]
        copied: dict[ir.Value | None, ir.Value] = {}
        copied[last] = _copy(made, product, k, [product.inputs[0], transpose.outputs[0]])
        for node in after:
            inputs = [copied[x] if x in copied else columns[x][k] if x in columns else x for x in node.inputs]
            last = node.outputs[0]
            copied[last] = _copy(made, node, k, inputs)
        value = copied[last]
        value.name, value.type = part_name(str(output.name), k), output.type
        value.shape = ir.Shape([*(output.shape or [])[:-1], extent(part, 0)])
        outputs.append(value)
    graph.insert_after([product, *after][-1], made)
    place = graph.outputs.index(output)
    graph.outputs[place : place + 1] = outputs
    graph.remove([*after[::-1], product], safe=True)


def _since_product(output: ir.Value) -> list[ir.Node]:
    """Return the nodes from the last MatMul on, one after the other."""
    nodes: list[ir.Node] = []
    value: ir.Value | None = output
    while value is not None and (node := value.producer()) is not None:
        nodes.insert(0, node)
        if node.op_type == "MatMul":
            break
        value = next((x for x in node.inputs if x is not None and not x.is_initializer()), None)
    return nodes


def _copy(nodes: list[ir.Node], node: ir.Node, k: int, inputs: Sequence[ir.Value | None]) -> ir.Value:
    copy = ir.node(node.op_type, inputs, node.attributes, name=part_name(str(node.name), k))
    copy.outputs[0].name = f"{copy.name}/output"
    nodes.append(copy)
    return copy.outputs[0]


def _parts(graph: ir.Graph, value: ir.Value) -> list[ir.Value]:
    """Return the parts of a long initializer along its first axis, as initializers: made once, for all their
    readers."""
    length, rest = extent(value, 0), list(value.shape or [])[1:]
    slices = _slices(length)
    late, known = derived(value, lambda w: [w[rows] for rows in slices], "rows"), value.const_value
    parts = []
    for k, rows in enumerate(slices):
        name, shape = part_name(str(value.name), k), [rows.stop - rows.start, *rest]
        if name not in graph.initializers:
            if known is None:
                part = late_initializer(name, late, k, shape, ir.DataType.FLOAT)
            else:
                tensor = ir.tensor(known.numpy()[rows], name=name)
                part = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
            part.meta[SLICE] = str(value.name), rows
            graph.initializers[name] = part
        parts.append(graph.initializers[name])
    return parts


def _slices(length: int) -> list[slice]:
    return [slice(start, min(start + LIMIT, length)) for start in range(0, length, LIMIT)]


def _is_long(value: ir.Value | None) -> bool:
    """Return whether a value is an initializer of too many rows."""
    return value is not None and value.is_initializer() and len(value.shape or []) > 0 and extent(value, 0) > LIMIT
