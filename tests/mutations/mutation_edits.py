"""Edits of an ONNX graph that put a bug into it."""

from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from export.graph.protos import all_nodes, inner_graphs

Edit = Callable[[onnx.ModelProto], None]


def weight(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Replace an initializer wherever it is."""

    def edit(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name == name:
                array = change(numpy_helper.to_array(tensor).copy())
                tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))

    return edit


def integers(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Replace a table of int64."""

    def edit(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name == name:
                array = change(numpy_helper.to_array(tensor).copy())
                tensor.CopyFrom(numpy_helper.from_array(array.astype(np.int64), name))

    return edit


def node(op_type: str, scope: str, change: Callable[[onnx.NodeProto], None]) -> Edit:
    """Change the first node of a type whose name starts with a scope."""

    def edit(model: onnx.ModelProto) -> None:
        found = [n for n in model.graph.node if n.op_type == op_type and n.name.startswith(scope)]
        for first in found[:1]:
            change(first)

    return edit


def bounded_after_the_mask(scope: str) -> Edit:
    """The mask is added to the scores before they are bounded, which shows masked keys."""

    def edit(model: onnx.ModelProto) -> None:
        nodes = model.graph.node
        own = [n for n in nodes if n.name.startswith(scope)]
        divided, times = (next(n for n in own if n.name.startswith(f"{scope}/score_cap/{op}")) for op in ("Div", "Mul"))
        masked = next(n for n in own if n.op_type == "Add" and times.output[0] in n.input)
        masked.input[0] = divided.input[0]
        divided.input[0] = masked.output[0]
        next(n for n in own if n.op_type == "Softmax").input[0] = times.output[0]
        moved = onnx.NodeProto()
        moved.CopyFrom(masked)
        nodes.remove(masked)
        nodes.insert(list(nodes).index(divided), moved)

    return edit


def feeding(op_type: str, reader: str, change: Callable[[onnx.NodeProto], None]) -> Edit:
    """Change the node of a type whose result nodes of a scope read."""

    def edit(model: onnx.ModelProto) -> None:
        read = {name for n in model.graph.node if n.name.startswith(reader) for name in n.input}
        for n in model.graph.node:
            if n.op_type == op_type and n.output[0] in read:
                change(n)

    return edit


def epsilon(value: float) -> Callable[[onnx.NodeProto], None]:
    def change(n: onnx.NodeProto) -> None:
        next(a for a in n.attribute if a.name == "epsilon").f = value

    return change


def become(op_type: str, **attributes: str) -> Callable[[onnx.NodeProto], None]:
    def change(n: onnx.NodeProto) -> None:
        n.op_type = op_type
        del n.attribute[:]
        n.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in attributes.items())

    return change


def swap_inputs(n: onnx.NodeProto) -> None:
    n.input[0], n.input[1] = n.input[1], n.input[0]


def one_more(input_index: int, value: float | int) -> Callable[[onnx.ModelProto, str, str], Edit]:
    """Add a constant to one input of a node."""

    def at(op_type: str, scope: str) -> Edit:
        def edit(model: onnx.ModelProto) -> None:
            for i, n in enumerate(model.graph.node):
                if n.op_type == op_type and n.name.startswith(scope):
                    kind = np.float32 if isinstance(value, float) else np.int64
                    model.graph.initializer.append(numpy_helper.from_array(np.array(value, kind), "one_more"))
                    added = onnx.helper.make_node("Add", [n.input[input_index], "one_more"], ["one_more_out"])
                    n.input[input_index] = "one_more_out"
                    model.graph.node.insert(i, added)
                    return

        return edit

    return at


def constant(old: float, new: float, consumer: str) -> Edit:
    """Another value for a scalar that nodes of one scope read."""

    def edit(model: onnx.ModelProto) -> None:
        scalars = {
            t.name for t in model.graph.initializer
            if not t.dims and t.data_type == onnx.TensorProto.FLOAT and np.isclose(numpy_helper.to_array(t), old)
        }  # fmt: skip
        changed = False
        for n in model.graph.node:
            if n.name.startswith(consumer):
                for i, name in enumerate(n.input):
                    if name in scalars:
                        n.input[i], changed = "changed_constant", True
        if changed:
            model.graph.initializer.append(numpy_helper.from_array(np.array(new, np.float32), "changed_constant"))

    return edit


def both(*edits: Edit) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        for one in edits:
            one(model)

    return edit


def reads(scope: str, old: str, new: str) -> Edit:
    """Nodes of a scope, and those of their inner graphs, read another value."""

    def edit(model: onnx.ModelProto) -> None:
        outer = [n for n in model.graph.node if n.name.startswith(scope)]
        for first in outer:
            for n in (first, *(n for graph in inner_graphs(first) for n in all_nodes(graph))):
                for i, name in enumerate(n.input):
                    if name == old:
                        n.input[i] = new

    return edit


def exchanged(scope: str, first: str, second: str) -> Edit:
    """Nodes directly in a scope read what the last nodes of two scopes make the other way round."""

    def edit(model: onnx.ModelProto) -> None:
        values = {}
        for n in model.graph.node:
            for part in (first, second):
                if n.name.startswith(f"{scope}/{part}/"):
                    values[part] = n.output[0]
        if len(values) < 2:
            return
        swap = {values[first]: values[second], values[second]: values[first]}
        for n in model.graph.node:
            if n.name.startswith(f"{scope}/") and "/" not in n.name[len(scope) + 1 :]:
                for i, name in enumerate(n.input):
                    n.input[i] = swap.get(name, name)

    return edit


def after(
    op_type: str,
    scope: str,
    operator: str,
    *others: Callable[[onnx.NodeProto], str] | np.ndarray,
    at: int = 0,
    **attributes: int,
) -> Edit:
    """One more node behind the output of a node: operator(output, others...). `at`: which of several nodes."""

    def edit(model: onnx.ModelProto) -> None:
        found = [(i, n) for i, n in enumerate(model.graph.node) if n.op_type == op_type and n.name.startswith(scope)]
        if len(found) <= at:
            return
        i, n = found[at]
        old, n.output[0] = n.output[0], f"{n.output[0]}_before"
        inputs = [n.output[0]]
        for k, other in enumerate(others):
            if isinstance(other, np.ndarray):
                model.graph.initializer.append(numpy_helper.from_array(other, f"{old}_{k}"))
                inputs.append(f"{old}_{k}")
            else:
                inputs.append(other(n))
        model.graph.node.insert(i + 1, onnx.helper.make_node(operator, inputs, [old], **attributes))

    return edit


def sees(query: int, key: int) -> Edit:
    """The causal mask lets one query see one key after it."""

    def edit(model: onnx.ModelProto) -> None:
        graph = model.graph
        for i, n in enumerate(graph.node):
            if n.op_type == "LessOrEqual":
                distances = next(m for m in graph.node if m.output[0] == n.input[0])
                keys, queries, out = distances.input[0], distances.input[1], n.output[0]
                n.output[0] = "causal_before"
                for name, value in (("one_key", key), ("one_query", query)):
                    graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
                more = [
                    onnx.helper.make_node("Equal", [keys, "one_key"], ["is_key"]),
                    onnx.helper.make_node("Equal", [queries, "one_query"], ["is_query"]),
                    onnx.helper.make_node("And", ["is_key", "is_query"], ["is_both"]),
                    onnx.helper.make_node("Or", ["causal_before", "is_both"], [out]),
                ]
                for k, node_ in enumerate(more):
                    graph.node.insert(i + 1 + k, node_)
                return

    return edit


def left_padding_seen(model: onnx.ModelProto) -> None:
    """Padding before the first token isn't masked."""
    graph = model.graph
    cast = next(i for i, n in enumerate(graph.node) if n.op_type == "Cast")
    n = graph.node[cast]
    out, n.output[0] = n.output[0], "tokens_before"
    for name, value in (("axis_one", 1), ("none_yet", 0)):
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
    more = [
        onnx.helper.make_node("CumSum", [n.input[0], "axis_one"], ["tokens_so_far"]),
        onnx.helper.make_node("Equal", ["tokens_so_far", "none_yet"], ["before_all"]),
        onnx.helper.make_node("Or", ["tokens_before", "before_all"], [out]),
    ]
    for k, node_ in enumerate(more):
        graph.node.insert(cast + 1 + k, node_)


def pooled_over_padding(model: onnx.ModelProto) -> None:
    """Padding counts in a text's vector as a token does."""
    graph = model.graph
    place, cast = next(
        (i, n) for i, n in enumerate(graph.node) if n.op_type == "Cast" and n.name.startswith("sentence_embedding/")
    )
    tokens, cast.input[0] = cast.input[0], "every_position"
    graph.node.insert(place, onnx.helper.make_node("Equal", [tokens, tokens], ["every_position"]))


def untied(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """The classifier gets a matrix of its own."""

    def edit(model: onnx.ModelProto) -> None:
        for n in model.graph.node:
            if n.name == f"{name}/Transpose":
                tensor = next(t for t in model.graph.initializer if t.name == name)
                copy = change(numpy_helper.to_array(tensor).copy()).astype(np.float32)
                model.graph.initializer.append(numpy_helper.from_array(copy, "untied"))
                n.input[0] = "untied"

    return edit


def attribute(**attributes: int) -> Callable[[onnx.NodeProto], None]:
    def change(n: onnx.NodeProto) -> None:
        kept = [a for a in n.attribute if a.name not in attributes]
        del n.attribute[:]
        n.attribute.extend([*kept, *(onnx.helper.make_attribute(k, v) for k, v in attributes.items())])

    return change


def inside(
    op_type: str,
    scope: str,
    change: Callable[[onnx.NodeProto], None],
    operator: str = "",
    *others: np.ndarray,
    every: bool = False,
) -> Edit:
    """Change the first node of a type in an inner graph, or every one; `operator`: one more node behind it, which reads
    `others`."""

    def edit(model: onnx.ModelProto) -> None:
        for graph in _inner(model.graph):
            for i, n in enumerate(list(graph.node)):
                if n.op_type != op_type or not n.name.startswith(scope):
                    continue
                change(n)
                if operator:
                    old, n.output[0] = n.output[0], f"{n.output[0]}_before"
                    names = [f"{old}_{k}" for k in range(len(others))]
                    graph.initializer.extend(map(numpy_helper.from_array, others, names))
                    graph.node.insert(i + 1, onnx.helper.make_node(operator, [n.output[0], *names], [old]))
                if not every:
                    return

    return edit


def _inner(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for n in graph.node:
        for each in inner_graphs(n):
            yield each
            yield from _inner(each)


def number(old: int, new: int, name: str = "") -> Edit:
    """Another value for each scalar of int64 that has this one, or for the one of a name."""

    def edit(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            is_scalar = tensor.data_type == onnx.TensorProto.INT64 and not tensor.dims
            if is_scalar and name in ("", tensor.name) and int(numpy_helper.to_array(tensor)) == old:
                tensor.CopyFrom(numpy_helper.from_array(np.array(new, np.int64), tensor.name))

    return edit


def output_of(name: str, op_type: str, change: Callable[[onnx.NodeProto], None], inputs: int) -> Edit:
    """Change the node of a type that makes an output, which then reads only its first inputs."""

    def edit(model: onnx.ModelProto) -> None:
        for n in model.graph.node:
            if n.op_type == op_type and name in n.output:
                change(n)
                del n.input[inputs:]

    return edit
