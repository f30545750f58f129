"""The cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """As many as the system lets it use: a container's cpuset or `taskset` may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
