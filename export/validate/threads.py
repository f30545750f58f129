"""One BLAS thread while several libraries compute in turn.

NumPy's OpenBLAS, MLX and ONNX Runtime each have a pool of threads, and an idle pool keeps the cores busy for a while in
case more work comes. Measured on two cores with other work: 18 to 26 s for a small model, 4 to 8 with one BLAS thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Plain builds, and those of NumPy's and SciPy's wheels with 64 and 32 bit integers.
SETTERS = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]


@contextmanager
def one_blas_thread() -> Iterator[int]:
    """Set every OpenBLAS of this process to one thread, and back; yields how many there are. Only Linux can list a
    process's libraries this way (and macOS has Accelerate): elsewhere nothing happens."""
    before = [(library, name, get()) for library, name, get in _openblas()]
    try:
        for library, name, _ in before:
            getattr(library, name)(1)
        yield len(before)
    finally:
        for library, name, threads in before:
            getattr(library, name)(threads)


def _openblas() -> Iterator[tuple[ctypes.CDLL, str, ctypes._CFuncPtr]]:  # type: ignore[name-defined]
    """Yield (library, name of the function that sets its threads, function that gets them)."""
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
