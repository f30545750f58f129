"""Damage done to ONNX graphs: to what a protobuf parser still reads."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import onnx
from damage import NUMBERS, TEXTS, in_bytes

SIZES = [number for number in NUMBERS if isinstance(number, int) and -(2**63) <= number < 2**63]
SMALL = [number for number in SIZES if -(2**31) <= number < 2**31]


def in_graph(random: Random, path: Path) -> None:
    """To the file's bytes, or to one or two of its entries."""
    data = path.read_bytes()
    if random.random() < 0.2:
        path.write_bytes(in_bytes(random, data))
        return
    model = onnx.load_from_string(data)
    for _ in range(random.choice([1, 1, 1, 2])):
        random.choice([_tensor, _tensor, _location, _location, _node, _node, _attribute, _interface, _whole])(
            random, model
        )
    path.write_bytes(model.SerializeToString())


def _text(random: Random) -> str:
    return random.choice([text for text in TEXTS if text != "\ud800"])


def _tensor(random: Random, model: onnx.ModelProto) -> None:
    """Shape, type or contents of an initializer."""
    if not model.graph.initializer:
        return
    tensor = random.choice(model.graph.initializer)
    how = random.randrange(5)
    if how == 0 and tensor.dims:
        tensor.dims[random.randrange(len(tensor.dims))] = random.choice(SIZES)
    elif how == 1:
        tensor.dims.append(random.choice(SIZES))
    elif how == 2:
        tensor.data_type = random.choice([*range(25), 99, -1])
    elif how == 3:
        tensor.name = random.choice([_text(random), random.choice(model.graph.initializer).name])
    elif tensor.raw_data:
        tensor.raw_data = in_bytes(random, tensor.raw_data)
    else:
        model.graph.initializer.remove(tensor)


def _location(random: Random, model: onnx.ModelProto) -> None:
    """Where a tensor's data lies in which file."""
    outside = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if not outside:
        return
    entry = random.choice(random.choice(outside).external_data)
    paths = ["../../../../etc/passwd", "/etc/passwd", "/dev/zero", "", ".", "nothing", "model.onnx", "a\0b", "x" * 5000]
    numbers = [*map(str, SIZES), "", "x", "1e9", "0x10", "-0"]
    entry.value = random.choice(paths if entry.key == "location" else numbers)
    if random.random() < 0.1:
        entry.key = random.choice(["location", "offset", "length", "checksum", ""])


def _node(random: Random, model: onnx.ModelProto) -> None:
    """A node that is gone, is another, or is wired otherwise."""
    if not model.graph.node:
        return
    node, other = random.choice(model.graph.node), random.choice(model.graph.node)
    how = random.randrange(6)
    if how == 0:
        model.graph.node.remove(node)
    elif how == 1:
        node.op_type = random.choice([other.op_type, "Expand", "Range", "Tile", "Loop", "If", "Pow", "Nothing", ""])
    elif how == 2 and node.input:
        node.input[random.randrange(len(node.input))] = random.choice([*other.input, *other.output, "", "nothing"])
    elif how == 3 and node.output:
        node.output[0] = random.choice([*other.output, "", "nothing"])
    elif how == 4:
        node.domain = random.choice(["com.microsoft", "ai.onnx", "nothing", ""])
    else:
        node.input.append(random.choice([*other.output, "nothing"]))


def _attribute(random: Random, model: onnx.ModelProto) -> None:
    """A number of a node."""
    found: list[Any] = [attribute for node in model.graph.node for attribute in node.attribute]
    if not found:
        return
    attribute = random.choice(found)
    if attribute.ints:
        attribute.ints[random.randrange(len(attribute.ints))] = random.choice(SIZES)
    elif attribute.HasField("t"):
        attribute.t.raw_data = in_bytes(random, attribute.t.raw_data)
    elif attribute.HasField("f"):
        attribute.f = random.choice([0.0, -1.0, 1e38, 1e-38, float("nan"), float("inf")])
    else:
        attribute.i = random.choice(SIZES)


def _interface(random: Random, model: onnx.ModelProto) -> None:
    """An input or an output: gone, renamed, of another type or shape."""
    values = random.choice([model.graph.input, model.graph.output])
    if not values:
        return
    value = random.choice(values)
    how = random.randrange(4)
    if how == 0:
        values.remove(value)
    elif how == 1:
        value.name = random.choice([_text(random), random.choice(values).name])
    elif how == 2:
        value.type.tensor_type.elem_type = random.choice([*range(24), 99])
    elif value.type.tensor_type.shape.dim:
        value.type.tensor_type.shape.dim[0].dim_value = random.choice(SIZES)


def _whole(random: Random, model: onnx.ModelProto) -> None:
    """Versions, metadata."""
    how = random.randrange(3)
    if how == 0:
        model.ir_version = random.choice(SIZES)
    elif how == 1 and model.opset_import:
        model.opset_import[0].version = random.choice([0, 1, 7, 13, 99, -1, *SMALL])
    elif model.metadata_props:
        entry = random.choice(model.metadata_props)
        entry.value = random.choice(
            [_text(random), "null", "5", "[" * 90_000, "{}", "[]", entry.value[:-3], "é" + entry.value]
        )
