"""The facts about the graphs of an ONNX folder, read without their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from export.graph.protos import all_nodes, metadata_of, read_model

Value = tuple[str, str, str]  # name, element type, shape such as "batch_size x 8 x 64"


def describe_graphs(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return {file name: {"nodes": count, "opset": version, "inputs": [...], "outputs": [...], "metadata": {...}}} of
    FOLDER/*.onnx and FOLDER/onnx/*.onnx, in the order of their names, or of one file; inputs and outputs are (name,
    type, shape).

    Nodes inside the branches of If are counted. Raises `UserError` for a file that is no ONNX model.
    """
    folder = Path(folder)
    if folder.is_file():
        return {folder.name: _facts(folder)}
    files = sorted([*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")])
    return {str(file.relative_to(folder)): _facts(file) for file in files}


def _facts(file: Path) -> dict[str, Any]:
    model = read_model(file)
    weights = {tensor.name for tensor in model.graph.initializer}
    return {
        "nodes": sum(1 for _ in all_nodes(model.graph)),
        "opset": next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0),
        "inputs": [_value(value) for value in model.graph.input if value.name not in weights],
        "outputs": [_value(value) for value in model.graph.output],
        "metadata": metadata_of(model),
    }


def _value(value: onnx.ValueInfoProto) -> Value:
    tensor = value.type.tensor_type
    sizes = [d.dim_param or str(d.dim_value) if d.WhichOneof("value") else "?" for d in tensor.shape.dim]
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()  # pyright: ignore[reportArgumentType]
    return value.name, dtype, " x ".join(sizes) or "scalar"
