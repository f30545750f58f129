"""The machine that this process runs on: its memory, asked before it is taken, its cores, and the versions of what is
installed. A run that does not fit is one line of error, not a machine that swaps or a process that the system ends."""

from __future__ import annotations

import functools
import os
import sys
from contextlib import suppress
from pathlib import Path

from .errors import UserError
from .mac import performance_cores

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CGROUP = Path("/sys/fs/cgroup/memory.max")  # of a container on Linux
FEW = 1 << 24
"""Bytes that are never asked about: to ask takes a tenth of a millisecond, as long as a step of a small model."""
PACKAGES = (
    "mlx-transformer mlx mlx-cpu mlx-metal mlx-cuda-13 scipy-openblas32 numpy onnx onnx-ir onnxscript onnxruntime "
    "onnxruntime-gpu tokenizers safetensors sacrebleu"
).split()


def memory() -> int:
    """Return the bytes that this process may have at most: the machine's, the container's or the user's limit."""
    bounds = [1 << 62]
    with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        bounds.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):  # "max" is no limit
        bounds.append(int(CGROUP.read_text(encoding="ascii")))
    with suppress(ImportError, OSError, ValueError):
        import resource

        limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
        bounds += [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(size for size in bounds if size > 0)


def check_memory(needed: float, what: str, remedy: str, **options: Any) -> None:
    """Raise `UserError` ("what needs N GB ...: remedy") if that many bytes are more than there are at all.

    remedy: a template, as of `Text`, for `options`.
    """
    if needed > FEW and needed > (there := memory()):
        sizes = f"{needed / 1e9:,.1f} GB of memory, and there are {there / 1e9:,.1f} GB"
        raise UserError("{} needs {}: " + remedy, what, sizes, **options)


def usable_cores() -> int:
    """Count the cores that the system lets this process use: a container's cpuset or `taskset` may allow fewer than
    the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fast_cores() -> int:
    """Count the cores that work is split over evenly: on a Mac those of the fastest kind, as the others lag behind."""
    return min(usable_cores(), performance_cores() or usable_cores())


def versions() -> dict[str, str]:
    """Return {package: version} of the installed ones that a result depends on, with Python and the platform."""
    return dict(_versions())


@functools.cache  # a tenth of a second to read, and no process outlives an installation
def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata  # a mail parser and what that needs, 3 MB

    versions = {"python": sys.version.split()[0], "platform": platform.platform()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
