"""Core ML on trial: a graph's outputs on made-up inputs beside the CPU's, before anyone relies on them.

Core ML computes some graphs wrong on some machines, without a word: attention in batches of ten and more on GPUs of
macOS 26 (apple/coremltools#2650), look-ups by gather_nd (microsoft/onnxruntime#28598), float16 on macOS 15 (#32569). So
every graph runs a few times when a model is opened, all rows filled, and is held to the rule of `validate`
(`validate/rule.py`), in which float32's own error is measured; here it is taken to be the declared one, for there is no
float64 to measure it by. NumPy alone.

Shapes: B rows of the graph, S source and T target positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.interface import GRAPHS, Port, Request
from export.targets.session import Session
from mlx_transformer.core.inputs import INPUTS

from .shape import part_of

PROVIDER = "CoreMLExecutionProvider"

OPTIONS = {"ModelFormat": "MLProgram", "RequireStaticInputShapes": "0"}
"""The form that computes right. NeuralNetwork, the default, has no types: it is float16 on a GPU and the Neural Engine,
where an MLProgram is float32 if the graph is (coremltools' guide, "Typed Execution"). With static shapes required,
programs were computed wrong on macOS 15, without that right (microsoft/onnxruntime#32569); ours are static anyway."""

UNIT = 2.0**-24
# 100 random models of 2 to 16 layers, 32 to 512 wide, ONNX Runtime on an x86 CPU against float64: rms at most 17, max
# at most 92. With queries and keys three times as large, attention sharper than training makes it: 282 and 3,380.
NATURAL_RMS, NATURAL_MAX = 256, 2048
"""float32's own error, declared: in units of 2^-24 of the outputs' rms. Float16's is thousands of times what it is."""
RMS, MAX = 4.0, 8.0
"""How much larger a runtime's error may be, as in `validate`."""

RUNS = 4
"""Runs of a graph, each with other ids and positions: a decoder of one row reads one of either in a run."""


def with_options(providers: Sequence[Any]) -> list[Any]:
    """Return ONNX Runtime's execution providers, Core ML's with `OPTIONS`; options that it has already stay."""

    def options(name: str, chosen: Mapping[str, Any]) -> Any:
        return (name, {**OPTIONS, **chosen}) if name == PROVIDER else (name, chosen) if chosen else name

    return [options(entry, {}) if isinstance(entry, str) else options(*entry) for entry in providers]


def problem(request: Request, graph: str, session: Session, on_cpu: Session) -> str:
    """Say in a few words what is wrong with a graph's session beside the CPU's; empty if nothing is."""
    names = [entry.name for entry in on_cpu.get_outputs()]
    for feeds in inputs(request, graph):
        for name, got, expected in zip(names, session.run(names, feeds), on_cpu.run(names, feeds), strict=True):
            if message := difference(np.asarray(got), expected):
                part = part_of(name)
                return f"{graph}: {part[0] if part else name} {message}"
    return ""


def difference(got: NDArray, expected: NDArray) -> str:
    """Say in a few words how two arrays differ by more than float32 must."""
    if got.shape != expected.shape:
        return f"has the shape {got.shape}, not {expected.shape}"
    if not np.isfinite(got).all():
        return f"has {np.count_nonzero(~np.isfinite(got))} values of {got.size} that are no numbers"
    error = np.abs(np.subtract(got, expected, dtype=np.float64))
    rms, size = (float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) for x in (error, expected))
    largest, unit = float(error.max(initial=0.0)), UNIT * size
    if rms <= RMS * NATURAL_RMS * unit and largest <= MAX * NATURAL_MAX * unit:
        return ""
    return f"differs by up to {largest:.2g} (rms {rms:.2g}) in values of {size:.2g}"


def inputs(request: Request, graph: str) -> Iterator[dict[str, NDArray]]:
    """Draw `RUNS` times all inputs of a graph: ids from the whole vocabulary, positions from the whole length, the last
    ones first; sources of all lengths; buffers of random numbers."""
    ports = GRAPHS[graph](request).inputs
    for run in range(RUNS):
        rng = np.random.default_rng(run)
        yield {port.name: _drawn(request, port, run, rng) for port in ports}


def _drawn(request: Request, port: Port, run: int, rng: np.random.Generator) -> NDArray:
    """Draw one input of one run, by what flows there."""
    shape: Any = port.axes
    if port.dtype == "float32":
        return rng.standard_normal(shape, dtype=np.float32)
    if port.value == "source_mask":
        return (np.arange(shape[1]) < 1 + _spread(shape[1], (shape[0], 1), run)).astype(np.int64)
    if port.value in INPUTS:
        return _spread(INPUTS[port.value].size(request.config), shape, run)
    assert request.shape is not None
    counts = {"target_ids": request.config.vocab_size, "positions": request.shape.target}
    return _spread(counts[port.value], shape, run)


def _spread(count: int, shape: tuple[int, ...], run: int) -> NDArray[np.int64]:
    """Return numbers from count - 1 down to 0, evenly over all runs."""
    size = math.prod(shape)
    steps = np.linspace(count - 1, 0, size * RUNS).astype(np.int64)
    return steps[run::RUNS].reshape(shape)
