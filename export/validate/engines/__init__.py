"""Engines: one small protocol for everything that can run a Transformer, so that a comparison knows none of them.

A runtime is asked for by name, with options after colons: "mlx:cpu", "mlx:gpu", "onnxruntime", "onnxruntime:cpu:none"
(no graph optimisation), "reference:float32". One that cannot run here raises `Unavailable`: exit status 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from numpy.typing import NDArray

from export.validate.cases import Case
from mlx_transformer.spec.checkpoint import Checkpoint
from mlx_transformer.spec.errors import UserError

Array = NDArray


class Unavailable(UserError):  # noqa: N818 - a state of the machine, not a mistake
    """A requested runtime that is not installed, or a device that is not there."""


class Engine(Protocol):
    """One runtime holding one model. Arrays are NumPy's, in the runtime's own precision."""

    name: str
    precision: str
    device: str

    def details(self) -> dict[str, str]:
        """Where and how it runs: versions, threads, providers, TF32."""
        ...

    def parameters(self) -> Iterator[tuple[str, str, Array]]:
        """(where, name, array) of every parameter it holds, `where` being a file or a model in memory."""
        ...

    def taps(self, case: Case) -> dict[str, Array]:
        """Every named point of one full pass, `logits` among them."""
        ...

    def logits(self, case: Case) -> Array:
        """Logits (B,L,V) of one full pass of the model as it is used, without taps."""
        ...

    def cached_logits(self, case: Case) -> dict[str, Array]:
        """The same logits with a cache: the first `case.prefill` tokens in one pass, then token by token. By name, for
        a runtime may have several ways of doing so; empty where there is nothing to cache (an encoder alone)."""
        ...

    def search(self, sources: Sequence[list[int]], beam: int, max_new_tokens: int) -> list[tuple[list[int], float]]:
        """Best output (ids without eos, score) of each source."""
        ...


def _mlx(options: Sequence[str], checkpoint: Checkpoint, onnx: Path | None, threads: int | None) -> Engine:
    from .mlx_engine import MlxEngine

    return MlxEngine(checkpoint, *options)


def _onnxruntime(options: Sequence[str], checkpoint: Checkpoint, onnx: Path | None, threads: int | None) -> Engine:
    from .onnxruntime_engine import OnnxRuntimeEngine

    if onnx is None:
        raise UserError("onnxruntime needs the folder of an exported model")
    return OnnxRuntimeEngine(checkpoint, onnx, *options, threads=threads)


def _reference(options: Sequence[str], checkpoint: Checkpoint, onnx: Path | None, threads: int | None) -> Engine:
    from .reference_engine import ReferenceEngine

    return ReferenceEngine(checkpoint.config, dict(checkpoint.tensors()), *options)


# How an engine is opened, and what may follow its name.
ENGINES: dict[str, tuple[Callable[..., Engine], tuple[str, ...]]] = {
    "mlx": (_mlx, ("device",)),
    "onnxruntime": (_onnxruntime, ("provider", "optimisation")),
    "reference": (_reference, ("precision",)),
}
DEFAULT = ("mlx", "onnxruntime")


def open_engine(name: str, checkpoint: Checkpoint, onnx: Path | None, threads: int | None = None) -> Engine:
    """The engine of a name such as "onnxruntime:cpu". `UserError` if it is unknown, `Unavailable` if it can't run.

    `threads`: of one operator in ONNX Runtime; default: the machine's cores. MLX and NumPy have no such setting.
    """
    kind, *options = name.split(":")
    if kind not in ENGINES:
        raise UserError(f"unknown runtime {name!r}: choose from {', '.join(ENGINES)}")
    make, known = ENGINES[kind]
    if len(options) > len(known):
        raise UserError(f"runtime {name!r}: {kind} takes only {':'.join((kind, *known))}")
    return make(options, checkpoint, onnx, threads)
