"""Graphs read from files, as protobuf messages: their nodes and tensors, changed copies, and models in one file."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import numpy_helper

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_protobuf
from mlx_transformer.system.protobuf import varint
from mlx_transformer.system.tensors import read_piece

COMPUTED = "/computed"
"""Suffix of the outputs that `cut` adds."""


def read_model(file: Path) -> onnx.ModelProto:
    """Read a model without its data files.

    Raises `UserError` if the file holds no ONNX model, an input or output of an unknown type, or a tensor with too few
    or too many numbers for its shape.
    """
    data = read_protobuf(file)
    try:
        model = onnx.load_from_string(data)
    except Exception as error:  # protobuf's DecodeError, which onnx does not export
        raise UserError(f"{file}: cannot be read as an ONNX model ({error}); export it again") from error
    for value in (*model.graph.input, *model.graph.output):
        if (kind := value.type.tensor_type.elem_type) not in onnx.TensorProto.DataType.values():
            raise UserError(f"{file}: {value.name} is of type {kind}, which ONNX doesn't have; export it again")
    for name, tensor in constants_of(model.graph).items():
        if tensor.data_location != onnx.TensorProto.EXTERNAL and not _fills_its_shape(tensor):
            raise UserError(f"{file}: the numbers of {name} don't fill its shape {list(tensor.dims)}; export it again")
    return model


def load_graph(file: Path) -> ir.Model:
    """Read a model as onnx_ir has it. Raises `UserError` if it can't, e.g. for names that are not UTF-8."""
    try:
        model = ir.load(file)
    except Exception as error:  # its own, protobuf's, and whatever damage leads to
        raise UserError(f"{file}: cannot be read as an ONNX model ({error}); export it again") from error
    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        if isinstance(value.const_value, ir.ExternalTensor):  # its own reader refuses files with several hard links
            value.const_value = _read_later(value.const_value, file.parent)
    return model


def _read_later(tensor: ir.ExternalTensor, folder: Path) -> ir.LazyTensor:
    place = {"location": str(tensor.location), "offset": tensor.offset or 0}
    place |= {} if tensor.length is None else {"length": tensor.length}
    shape = [*tensor.shape.numpy()]
    proto = onnx.TensorProto(data_type=tensor.dtype.value, dims=shape, data_location=onnx.TensorProto.EXTERNAL)
    for key, value in place.items():
        proto.external_data.add(key=key, value=str(value))
    read = lambda: ir.tensor(array_of(proto, folder), dtype=tensor.dtype)  # noqa: E731
    return ir.LazyTensor(read, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)


def _fills_its_shape(tensor: onnx.TensorProto) -> bool:
    try:
        if tensor.HasField("raw_data"):
            bits = math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth
            return len(tensor.raw_data) == -(-bits // 8)
        if tensor.data_type == onnx.TensorProto.STRING:  # to_array would decode the bytes, which needn't be UTF-8
            return len(tensor.string_data) == math.prod(tensor.dims)
        return list(numpy_helper.to_array(tensor).shape) == list(tensor.dims)
    except (ValueError, TypeError, KeyError):  # an unknown type, or a wrong number of values
        return False


def metadata_of(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


class Wiring:
    """Which node makes a value of a graph, and which nodes read it."""

    def __init__(self, graph: onnx.GraphProto):
        self.nodes = list(graph.node)
        self.maker = {output: node for node in graph.node for output in node.output}

    def last(self, scope: str) -> str | None:
        """The output of the last node within a module, e.g. "encoder.layers.0"; None if there is no such node."""
        outputs = [node.output[0] for node in self.nodes if node.name.startswith(f"{scope}/")]
        return outputs[-1] if outputs else None

    def first(self, scope: str, operator: str) -> onnx.NodeProto | None:
        """The first node of this operator within a module; None if there is no such node."""
        nodes = (node for node in self.nodes if node.name.startswith(f"{scope}/") and node.op_type == operator)
        return next(nodes, None)

    def readers(self, value: str | None) -> list[onnx.NodeProto]:
        return [node for node in self.nodes if value in node.input]

    def behind(self, value: str, operator: str) -> str:
        """The first input of the node that makes the value, if it is of this operator; otherwise the value itself."""
        maker = self.maker.get(value)
        return maker.input[0] if maker is not None and maker.op_type == operator else value


def inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The branches of an If, or the body of a Loop."""
    yield from (attribute.g for attribute in node.attribute if attribute.HasField("g"))


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes of a graph, each followed by the nodes of its branches."""
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from all_nodes(inner)


def reached(outputs: Iterable[str], edges: Iterable[tuple[Iterable[str], Iterable[str]]]) -> set[str]:
    """The outputs and all values they depend on. edges: the inputs and the outputs of each node."""
    maker = {output: inputs for inputs, made in edges for output in made}
    nodes, open_values = set(), list(outputs)
    while open_values:
        value = open_values.pop()
        if value not in nodes:
            nodes.add(value)
            open_values += maker.get(value, ())
    return nodes


def edges_of(graph: onnx.GraphProto) -> Iterator[tuple[list[str], Sequence[str]]]:
    """The inputs of each node, those read inside its branches too, and its outputs."""
    for node in graph.node:
        inside = (name for inner in inner_graphs(node) for each in all_nodes(inner) for name in each.input)
        yield [*node.input, *inside], node.output


def initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The initializers of a graph and of the graphs within it."""
    yield from graph.initializer
    for node in graph.node:
        for inner in inner_graphs(node):
            yield from initializers(inner)


def constants_of(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """The constants of a graph and the graphs within it, by name: initializers, and tensors of Constant nodes."""
    made = (node for node in all_nodes(graph) if node.op_type == "Constant" and node.attribute[0].HasField("t"))
    return {t.name: t for t in initializers(graph)} | {node.output[0]: node.attribute[0].t for node in made}


def arrays_of(model: onnx.ModelProto, folder: Path, names: Container[str]) -> dict[str, NDArray]:
    """The initializers of these names as arrays; their data files are in `folder`."""
    tensors = (tensor for tensor in initializers(model.graph) if tensor.name in names)
    return {tensor.name: array_of(tensor, folder) for tensor in tensors}


def array_of(tensor: onnx.TensorProto, folder: Path) -> NDArray:
    """A tensor's numbers; its data file, if any, is in `folder`. Unlike onnx's readers it takes a data file with
    several hard links, and leaves the tensor as it is."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        tensor = deepcopy(tensor)
        load_data(tensor, folder)
    return numpy_helper.to_array(tensor)


def load_data(tensor: onnx.TensorProto, folder: Path) -> None:
    """Put the numbers of a data file into the tensor. Raises `UserError` if the file is elsewhere, or too short."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    file, begin = place["location"], int(place.get("offset", 0))
    if Path(file).is_absolute() or ".." in Path(file).parts:
        raise UserError(f"{folder}: {tensor.name} is in {file}, outside the folder; export the model again")
    size = int(place.get("length", (folder / file).stat().st_size - begin))
    tensor.raw_data = read_piece(folder / file, begin, size, np.dtype(np.uint8)).tobytes()
    tensor.ClearField("data_location")
    del tensor.external_data[:]


def data_files_of(model: onnx.ModelProto) -> Iterator[str]:
    """The data file of each initializer outside the model's own file; names may repeat."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                yield entry.value


def add_taps(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy in which the values of these names are outputs too; unknown names are ignored."""
    tapped = deepcopy(model)
    present = {output for node in model.graph.node for output in node.output}
    outputs = {output.name for output in model.graph.output}
    for name in names:
        if name in present - outputs:
            tapped.graph.output.append(onnx.ValueInfoProto(name=name))  # of any type
    return tapped


def outputs_as_float32(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy with the outputs of these names cast to float32; inside the graph their types stay."""
    copy = deepcopy(model)
    inside = {name: f"{name}/narrow" for name in names}
    _rename(copy.graph, inside)
    for name, narrow in inside.items():
        copy.graph.node.append(onnx.helper.make_node("Cast", [narrow], [name], to=onnx.TensorProto.FLOAT))
    for output in copy.graph.output:
        if output.name in inside:
            output.CopyFrom(onnx.helper.make_tensor_value_info(output.name, onnx.TensorProto.FLOAT, None))
    return copy


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename values in a graph's nodes and in its branches."""
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(value, value) for value in values]
        for attribute in node.attribute:
            _rename(attribute.g, names)


def cut(model: onnx.ModelProto, points: Mapping[str, str]) -> onnx.ModelProto:
    """A copy cut at the points, {value: point}. Each value becomes an input; its computed value becomes the
    output POINT/computed, e.g. "encoder.norm/computed". All other outputs are removed."""
    copy = deepcopy(model)
    graph, names = copy.graph, {value: point for point, value in points.items()}
    for node in graph.node:
        for k, output in enumerate(node.output):
            if output in names:
                node.output[k] = names[output] + COMPUTED
    del graph.output[:], graph.value_info[:]
    for value, point in names.items():
        graph.output.append(onnx.helper.make_tensor_value_info(point + COMPUTED, onnx.TensorProto.FLOAT, None))
        graph.input.append(onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, None))
    return copy


def constant_part(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The part of a graph computing the value `name`, which must not depend on any input."""
    needed = reached([name], ((node.input, node.output) for node in model.graph.node))
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    part.graph.name = name
    part.graph.node.extend(node for node in model.graph.node if needed & {*node.output})
    part.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    part.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return part


def outside(tensor: onnx.TensorProto, file: str, offset: int, length: int) -> onnx.TensorProto:
    """A tensor of this name, type and shape whose numbers are `length` bytes of a data file, from byte `offset` on."""
    placed = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    placed.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": file, "offset": offset, "length": length}.items():
        placed.external_data.add(key=key, value=str(value))
    return placed


def with_values(model: onnx.ModelProto, values: Mapping[str, onnx.TensorProto]) -> onnx.ModelProto:
    """A copy with these tensors in place of its own, and of the nodes of the outermost graph that compute them."""
    copy = deepcopy(model)
    graph = copy.graph
    nodes = [node for node in graph.node if not values.keys() & {*node.output}]
    edges = [(inputs, outputs) for inputs, outputs in edges_of(graph) if not values.keys() & {*outputs}]
    needed = reached([output.name for output in graph.output], edges)
    tensors = [tensor for tensor in graph.initializer if tensor.name in needed - values.keys()]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(node for node in nodes if needed & {*node.output})
    graph.initializer.extend([*tensors, *(values[name] for name in values if name in needed)])
    return copy


INITIALIZER, GRAPH, RAW_DATA = b"\x2a", b"\x3a", b"\x4a"
"""Protobuf tags of the length-delimited fields GraphProto.initializer, ModelProto.graph and TensorProto.raw_data."""
PIECE = 1 << 20
"""Bytes copied at a time."""


def write_inside(model: onnx.ModelProto, folder: Path, out: Path) -> None:
    """Write a model with its initializers, which are in data files of `folder`, into one file.

    The outermost graph's initializers are copied piece by piece: to serialise the whole message takes three times their
    memory. Inner graphs hold only vectors, which are loaded. `model` is changed: it loses its graph.
    """
    graph, heads, tensors = model.graph, [], [*model.graph.initializer]
    for tensor in (each for node in graph.node for inner in inner_graphs(node) for each in initializers(inner)):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            load_data(tensor, folder)
    outside = [tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL]
    del graph.initializer[:]
    graph.initializer.extend(tensor for tensor in tensors if tensor.data_location != onnx.TensorProto.EXTERNAL)
    for tensor in outside:
        place = {entry.key: entry.value for entry in tensor.external_data}
        del tensor.external_data[:]
        tensor.ClearField("data_location")
        offset, length = int(place["offset"]), int(place["length"])
        head = tensor.SerializeToString(deterministic=True) + RAW_DATA + varint(length)
        heads.append((INITIALIZER + varint(len(head) + length) + head, folder / place["location"], offset, length))
    rest = graph.SerializeToString(deterministic=True)
    model.ClearField("graph")
    size = len(rest) + sum(len(head) + length for head, *_, length in heads)
    with out.open("wb") as file:
        file.write(model.SerializeToString(deterministic=True) + GRAPH + varint(size) + rest)
        for head, source, offset, length in heads:
            file.write(head)
            with source.open("rb") as data:
                data.seek(offset)
                while length:
                    piece = data.read(min(PIECE, length))
                    file.write(piece)
                    length -= len(piece)
