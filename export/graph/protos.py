"""Graphs read from files: their parts, who makes and who reads each value, and copies that show more values."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_protobuf

COMPUTED = "/computed"
"""Ends the names of the outputs that `cut` makes."""


def read_model(file: Path) -> onnx.ModelProto:
    """Read a model without its data files.

    Raises `UserError` for a file that holds no model, for an input or output of an unknown type, and for a tensor whose
    numbers don't fill its shape.
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


def _fills_its_shape(tensor: onnx.TensorProto) -> bool:
    try:
        if tensor.HasField("raw_data"):
            bits = math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth
            return len(tensor.raw_data) == -(-bits // 8)
        if tensor.data_type == onnx.TensorProto.STRING:  # of bytes, which needn't be UTF-8
            return len(tensor.string_data) == math.prod(tensor.dims)
        return list(numpy_helper.to_array(tensor).shape) == list(tensor.dims)
    except (ValueError, TypeError, KeyError):  # a type without numbers, or another number of them
        return False


def metadata_of(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


class Wiring:
    """Who makes and who reads each value of a graph."""

    def __init__(self, graph: onnx.GraphProto):
        self.nodes = list(graph.node)
        self.maker = {output: node for node in graph.node for output in node.output}

    def last(self, scope: str) -> str | None:
        """Return the output of the last node within a module."""
        outputs = [node.output[0] for node in self.nodes if node.name.startswith(f"{scope}/")]
        return outputs[-1] if outputs else None

    def first(self, scope: str, operator: str) -> onnx.NodeProto | None:
        """Return the first node of a type anywhere within a module."""
        nodes = (node for node in self.nodes if node.name.startswith(f"{scope}/") and node.op_type == operator)
        return next(nodes, None)

    def readers(self, value: str | None) -> list[onnx.NodeProto]:
        return [node for node in self.nodes if value in node.input]

    def behind(self, value: str, operator: str) -> str:
        """Return the value before the node that makes this one, if that is of the type; otherwise the value itself."""
        maker = self.maker.get(value)
        return maker.input[0] if maker is not None and maker.op_type == operator else value


def inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the branches and bodies of a node."""
    yield from (attribute.g for attribute in node.attribute if attribute.HasField("g"))


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph, each followed by those of its branches."""
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from all_nodes(inner)


def reached(outputs: Iterable[str], edges: Iterable[tuple[Iterable[str], Iterable[str]]]) -> set[str]:
    """Return every value from which a way leads to the outputs. edges: what each node reads, and what it makes."""
    maker = {output: inputs for inputs, made in edges for output in made}
    nodes, open_values = set(), list(outputs)
    while open_values:
        value = open_values.pop()
        if value not in nodes:
            nodes.add(value)
            open_values += maker.get(value, ())
    return nodes


def edges_of(graph: onnx.GraphProto) -> Iterator[tuple[list[str], Sequence[str]]]:
    """Yield what each node of a graph reads, its branches too, and what it makes."""
    for node in graph.node:
        inside = (name for inner in inner_graphs(node) for each in all_nodes(inner) for name in each.input)
        yield [*node.input, *inside], node.output


def initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers of a graph and of the graphs within it."""
    yield from graph.initializer
    for node in graph.node:
        for inner in inner_graphs(node):
            yield from initializers(inner)


def constants_of(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return by name what is constant in a graph and in those within it: initializers, and tensors that nodes are."""
    made = (node for node in all_nodes(graph) if node.op_type == "Constant" and node.attribute[0].HasField("t"))
    return {t.name: t for t in initializers(graph)} | {node.output[0]: node.attribute[0].t for node in made}


def arrays_of(model: onnx.ModelProto, folder: Path, names: Container[str]) -> dict[str, NDArray]:
    """Return those initializers of a model by name, from data files of `folder` too."""
    tensors = (tensor for tensor in initializers(model.graph) if tensor.name in names)
    return {tensor.name: numpy_helper.to_array(tensor, str(folder)) for tensor in tensors}


def data_files_of(model: onnx.ModelProto) -> Iterator[str]:
    """Yield the name of the data file of each initializer that is in one."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                yield entry.value


def add_taps(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a copy of a graph in which the values of these names (those that it has) are outputs as well."""
    tapped = deepcopy(model)
    present = {output for node in model.graph.node for output in node.output}
    outputs = {output.name for output in model.graph.output}
    for name in names:
        if name in present - outputs:
            tapped.graph.output.append(onnx.ValueInfoProto(name=name))  # of whatever type it is
    return tapped


def outputs_as_float32(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a copy of a graph whose outputs of these names are cast to float32; inside it they stay what they are."""
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
    """Rename values that a graph's nodes write and read, those of its branches too."""
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(value, value) for value in values]
        for attribute in node.attribute:
            _rename(attribute.g, names)


def cut(model: onnx.ModelProto, points: Mapping[str, str]) -> onnx.ModelProto:
    """Return a copy whose outputs are POINT/computed, with an input for the value of every point."""
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
    """Return the part of a graph that computes this value, which doesn't depend on any input."""
    needed = reached([name], ((node.input, node.output) for node in model.graph.node))
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    part.graph.name = name
    part.graph.node.extend(node for node in model.graph.node if needed & {*node.output})
    part.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    part.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return part


INITIALIZER, GRAPH, RAW_DATA = b"\x2a", b"\x3a", b"\x4a"
"""How the fields begin, in the bytes of a GraphProto, a ModelProto and a TensorProto, that are bytes of a length."""
PIECE = 1 << 20
"""Bytes that are copied together."""


def write_inside(model: onnx.ModelProto, folder: Path, out: Path) -> None:
    """Write a model whose initializers lie in data files of `folder` as one file, which holds them: the outermost piece
    by piece, where a message that is serialised as a whole takes three times their memory. Graphs within have vectors
    alone. The model loses its graph."""
    graph, heads, tensors = model.graph, [], [*model.graph.initializer]
    for tensor in (each for node in graph.node for inner in inner_graphs(node) for each in initializers(inner)):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            load_external_data_for_tensor(tensor, str(folder))
            tensor.ClearField("data_location")
            del tensor.external_data[:]
    outside = [tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL]
    del graph.initializer[:]
    graph.initializer.extend(tensor for tensor in tensors if tensor.data_location != onnx.TensorProto.EXTERNAL)
    for tensor in outside:
        place = {entry.key: entry.value for entry in tensor.external_data}
        del tensor.external_data[:]
        tensor.ClearField("data_location")
        offset, length = int(place["offset"]), int(place["length"])
        head = tensor.SerializeToString(deterministic=True) + RAW_DATA + _varint(length)
        heads.append((INITIALIZER + _varint(len(head) + length) + head, folder / place["location"], offset, length))
    rest = graph.SerializeToString(deterministic=True)
    model.ClearField("graph")
    size = len(rest) + sum(len(head) + length for head, *_, length in heads)
    with out.open("wb") as file:
        file.write(model.SerializeToString(deterministic=True) + GRAPH + _varint(size) + rest)
        for head, source, offset, length in heads:
            file.write(head)
            with source.open("rb") as data:
                data.seek(offset)
                while length:
                    piece = data.read(min(PIECE, length))
                    file.write(piece)
                    length -= len(piece)


def _varint(value: int) -> bytes:
    """Return a number as protobuf has it: seven bits a byte, the lowest first."""
    digits = []
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])
