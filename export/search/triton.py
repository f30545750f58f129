"""One file with the search as a model of NVIDIA's Triton Inference Server, for its ONNX Runtime backend.

    OUT/config.pbtxt      inputs, outputs and batching, in protobuf's text form; the model is named after its folder
    OUT/1/model.onnx      version 1: a file of `export_search`, weights beyond 2 GB beside it
    OUT/README.md         the model card

The config lists only inputs without a default: the backend counts inputs, and refuses a config with more. So Triton
always searches with the file's defaults, which come from the model's generation.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from export.graph.protos import read_model
from export.package.write import texts_of
from export.settings import ExportSettings
from mlx_transformer.core.card import Form, carried, write_card
from mlx_transformer.core.checkpoint import open_checkpoint, resolve
from mlx_transformer.core.outputs import Kind, claim
from mlx_transformer.system.durable import Target, replace_folder
from mlx_transformer.system.progress import Progress, no_progress

from .write import export_search

CONFIG = "config.pbtxt"
VERSION, FILE = "1", "model.onnx"
MAX_BATCH_SIZE = 64
EXTENSIONS = "libortextensions.so"
TYPES: dict[int, str] = {
    onnx.TensorProto.INT64: "TYPE_INT64",
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.STRING: "TYPE_STRING",
}
USE = """```sh
tritonserver --model-repository FOLDER-AROUND-THIS-ONE
curl localhost:8000/v2/models/{name}
```"""


def export_triton(
    checkpoint: str | Path,
    out: Target,
    settings: ExportSettings = ExportSettings(),
    *,
    text: bool = False,
    log: Callable[[str], None] = lambda _: None,
    watch: Progress = no_progress,
    **changes: Any,
) -> Path:
    """Write a folder for Triton's model repository; returns `out`.

    Arguments and errors are as in `export_search`. text: strings in and out, through onnxruntime-extensions' operators;
    Triton has to find their library as libortextensions.so. `out` is new or empty, or with `force` an earlier such
    folder to replace.
    """
    settings = replace(settings, **changes)
    output = claim(out, TRITON, settings.force, resolve(checkpoint), *texts_of(settings))
    out, opened = output.path, open_checkpoint(checkpoint)
    with replace_folder(output) as folder:
        file = export_search(checkpoint, folder / VERSION / FILE, settings, text=text, log=log, watch=watch)
        (folder / CONFIG).write_bytes(config_of(read_model(file).graph))
        form = Form("triton", ("onnxruntime", "triton", "transformer"), USE.format(name=out.name))
        write_card(folder, opened.config, form, carried(opened.folder, results=True), out)
    return out


def _holds_triton(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / VERSION / FILE).is_file()


TRITON = Kind("Triton model", _holds_triton, folder=True)


def config_of(graph: onnx.GraphProto) -> bytes:
    """The text of config.pbtxt for this graph."""
    return ("\n".join(_config(graph)) + "\n").encode()


def _config(graph: onnx.GraphProto) -> Iterator[str]:
    defaults = {tensor.name for tensor in graph.initializer}
    yield 'backend: "onnxruntime"'
    yield f'default_model_filename: "{FILE}"'
    yield f"max_batch_size: {MAX_BATCH_SIZE}"
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            if value.name not in defaults:
                yield from _tensor(kind, value)
    yield "dynamic_batching { }"
    if any(value.type.tensor_type.elem_type == onnx.TensorProto.STRING for value in graph.input):
        yield f'model_operations {{ op_library_filename: "{EXTENSIONS}" }}'


def _tensor(kind: str, value: onnx.ValueInfoProto) -> Iterator[str]:
    """Lines for one input or output, without the batch axis. Triton wants dims [1] for a scalar per row, and a
    reshape."""
    tensor = value.type.tensor_type
    sizes = [size.dim_value if size.HasField("dim_value") else -1 for size in tensor.shape.dim][1:]
    yield f"{kind} {{"
    yield f'  name: "{value.name}"'
    yield f"  data_type: {TYPES[tensor.elem_type]}"
    yield f"  dims: {sizes or [1]}"
    if not sizes:
        yield "  reshape { shape: [] }"
    yield "}"
