"""The settings of the commands `serve` and `validate`: their names, types, bounds and defaults, and what each means.

One definition for the command line and for Python. The string under a field is its help, and what follows "unset:" says
what None stands for (`mlx_transformer/commands/settings.py`). Imports next to nothing: help needs no ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.fields import Bounds, check_fields

Count = Annotated[int, Bounds(at_least=1)]


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How a model is served. `UserError` for a value out of bounds."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one."""
    port: Annotated[int, Bounds(at_least=0, at_most=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    max_batch: Count = 32
    """Most sentences computed together."""
    max_wait_ms: Annotated[float, Bounds(at_least=0, at_most=60_000)] = 5.0
    """Longest wait of a sentence for others when nothing runs."""
    max_queue: Count = 1024
    """Most sentences waiting; beyond them requests get 503."""
    threads: Count | None = None
    """Threads of one ONNX Runtime operator; unset: one for each core."""
    workers: Count = 1
    """Batches computed at the same time, each with so many threads."""
    precision: str | None = None
    """Which of an ONNX folder's precisions; unset: float32, or the only one."""
    access_log: bool = False
    """Log every request."""
    verify: bool = True
    """Compare the files with the digests in their manifest."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class ValidateSettings:
    """What is compared, and where the report goes. `UserError` for a value out of bounds."""

    runtimes: str | Sequence[str] | None = None
    """Runtimes to judge, separated by commas; one that isn't there is exit 3, see --explain; unset: mlx,onnxruntime."""
    seed: int | None = None
    """Seed of the inputs; unset: fresh."""
    threads: int | None = None
    """Threads of one ONNX Runtime operator; unset: one for each core."""
    gradients: bool = False
    """Check MLX's gradients against finite differences too."""
    names: str | None = None
    """Inputs and outputs of somebody else's ONNX files: input_ids=NAME,logits=NAME; unset: Hugging Face's."""
    json: Path | str | None = None
    """Write the report to this file as JSON."""
    html: Path | str | None = None
    """Write the report to this file as a page."""
    verify: bool = True
    """Compare the files with the digests in their manifest."""


def _check(settings: object) -> None:
    if problems := check_fields(settings):
        raise UserError("; ".join(problems))
