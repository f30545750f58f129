"""Run OpenBLAS with a single thread while several libraries compute in turn.

NumPy's OpenBLAS, MLX and ONNX Runtime each have a thread pool, and an idle pool spins for a while in case more work
comes. Measured on two busy cores with a small model: 18 to 26 s, and 4 to 8 s with a single BLAS thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Names in plain builds, and in the wheels of NumPy and SciPy, with 32 and 64 bit integers.
SETTERS = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]


@contextmanager
def one_blas_thread() -> Iterator[int]:
    """Give every OpenBLAS in this process a single thread, and restore its number of threads at the end.

    Yields how many were found. Does nothing outside Linux: the libraries are found in /proc (and macOS uses
    Accelerate).
    """
    before = [(library, name, get()) for library, name, get in _openblas()]
    try:
        for library, name, _ in before:
            getattr(library, name)(1)
        yield len(before)
    finally:
        for library, name, threads in before:
            getattr(library, name)(threads)


def _openblas() -> Iterator[tuple[ctypes.CDLL, str, ctypes._CFuncPtr]]:  # type: ignore[name-defined]
    """Yield (library, name of its function to set threads, function to get them)."""
    try:
        mappings = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return
    paths = {line.split(maxsplit=5)[5] for line in mappings if "openblas" in line.lower()}
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in SETTERS:
            if hasattr(library, name):
                yield library, name, getattr(library, name.replace("_set_", "_get_"))
