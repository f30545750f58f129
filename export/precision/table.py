"""Precisions that a model can be exported in: one table. `passes.py` makes each of them.

A precision's files have a suffix, by which transformers.js and Optimum find them: encoder_model_quantized.onnx. Ids and
masks stay int64, all other inputs and outputs float32: whoever runs one precision runs the others.

Nothing here imports onnx: `runtime/folder.py`, which runs models, needs the suffixes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlx_transformer.spec.errors import UserError

OPSET, IR_VERSION = 20, 9
STANDARD = ("portable", "cuda")
"""Targets whose blocks of integers are read by standard operators."""


@dataclass(frozen=True)
class Precision:
    """`dtype`: transformers.js's word for it. `opset`: of the portable files, and the file format that goes with it."""

    suffix: str
    dtype: str
    said: str
    opset: int = OPSET
    ir_version: int = IR_VERSION


PRECISIONS: dict[str, Precision] = {
    "float32": Precision("", "fp32", "as trained"),
    "float16": Precision("_fp16", "fp16", "weights and activations of sixteen bits"),
    "bfloat16": Precision("_bf16", "", "the same with float32's range; transformers.js has no name for it"),
    "int8": Precision("_quantized", "q8", "signed weights with a scale an output, dynamic activations"),
    "int8-weights": Precision("_int8", "int8", "weights of 8 bits in blocks, float32 activations", 21, 10),
    "int4": Precision("_q4", "q4", "weights of 4 bits in blocks, embeddings of 8, float32 activations", 21, 10),
    "packed": Precision("_packed", "fp32", "integers of a checkpoint quantised by MLX, in ONNX Runtime's operators"),
}


def check_precisions(names: str | Iterable[str]) -> list[str]:
    """The names, each once; `UserError` for one that isn't in the table."""
    chosen = list(dict.fromkeys([names] if isinstance(names, str) else names))
    unknown = [name for name in chosen if name not in PRECISIONS]
    if unknown or not chosen:
        said = f"precision {unknown[0]!r} is unknown" if unknown else "no precision given"
        raise UserError(f"{said}; choose from {', '.join(PRECISIONS)}")
    return chosen
