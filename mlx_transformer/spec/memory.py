"""How much memory there is, asked before it is taken: what does not fit is one line of error, not a machine that swaps
or a process that the system ends."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .errors import UserError

CGROUP = Path("/sys/fs/cgroup/memory.max")  # of a container on Linux


def memory() -> int:
    """Bytes that this process may have at most: the machine's, the container's or the user's limit."""
    found = [1 << 62]
    with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):  # "max" is no limit
        found.append(int(CGROUP.read_text(encoding="ascii")))
    with suppress(ImportError, OSError, ValueError):
        import resource

        limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
        found += [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(size for size in found if size > 0)


def check_memory(needed: float, what: str, remedy: str) -> None:
    """`UserError` ("what needs N GB ...: remedy") if that many bytes are more than there are at all."""
    if needed > (there := memory()):
        raise UserError(f"{what} needs {needed / 1e9:,.1f} GB of memory, and there are {there / 1e9:,.1f} GB: {remedy}")
