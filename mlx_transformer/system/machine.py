"""A Mac's own programs, asked and told: its fast cores, its battery, and to stay awake.

Calls side by side, each on a thread, for those that leave Python's lock alone: opening sessions, reading files.

`concurrent.futures` does as much and more, but brings `logging` with it: 5 ms to import, a sixth of what the code of
this project takes that opens a folder.

The version of this distribution, as it is installed. Imported when it is asked for: it costs a mail parser, 3 MB.

The machine that this process runs on: its memory, asked before it is taken, its cores, and the versions of what is
installed. A run that does not fit is one line of error, not a machine that swaps or a process that the system ends.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from .errors import UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SYSCTL, PMSET, CAFFEINATE = "/usr/sbin/sysctl", "/usr/bin/pmset", "/usr/bin/caffeinate"
ANSWER_SECONDS = 10


@functools.cache
def performance_cores() -> int | None:
    """Count the cores of a Mac's fastest kind; None elsewhere, and on one whose cores are all alike."""
    output = _output_of(SYSCTL, "-n", "hw.perflevel0.physicalcpu") if sys.platform == "darwin" else ""
    return int(output) if output.strip().isdecimal() and int(output) > 0 else None


def battery_line() -> str | None:
    """Return what a person should know who trains on battery; None for a machine that doesn't say it has one in use."""
    output = _output_of(PMSET, "-g", "batt") if sys.platform == "darwin" else ""
    if "'Battery Power'" not in output:
        return None
    charge = next((word.rstrip(";") for word in output.split() if word.rstrip(";").endswith("%")), "")
    return f"on battery{f', {charge}' if charge else ''}: plug in, for a run empties it, and may be slower until then"


@contextmanager
def keep_awake() -> Iterator[None]:
    """Keep a Mac from sleeping while nobody uses it, until the block or this process ends; a closed lid it sleeps
    under all the same. `UserError` where there is no caffeinate."""
    import subprocess  # what opens a model waits for no more than it needs

    try:
        process = subprocess.Popen(
            [CAFFEINATE, "-i", "-m", "-w", str(os.getpid())], stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise UserError(f"keep-awake needs a Mac's caffeinate ({error.strerror}); leave it out") from error
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _output_of(*command: str) -> str:
    """Return the output of a program, "" of one that fails, or isn't there."""
    import subprocess

    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS, check=True
        )
        return done.stdout.decode(errors="replace")
    return ""


T = TypeVar("T")


def side_by_side(calls: Iterable[Callable[[], T]], at_once: int) -> list[T]:
    """Return what the calls return, in their order. At most so many run at a time, one of them on the caller's thread.

    All are made, whatever becomes of some; then the exception of the first that failed is raised.
    """
    calls = list(calls)
    left, lock = enumerate(calls), threading.Lock()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def take() -> tuple[int, Callable[[], T]] | None:
        with lock:
            return next(left, None)

    def work() -> None:
        while (taken := take()) is not None:
            place, call = taken
            try:
                results[place] = call()
            except BaseException as error:  # whatever it is, it is the caller's to hear of
                errors[place] = error

    def work_aside(over: threading.Event) -> None:
        try:
            work()
        finally:
            over.set()

    others: list[tuple[threading.Thread, threading.Event]] = []
    try:
        for _ in range(min(at_once, len(calls)) - 1):
            over = threading.Event()
            thread = threading.Thread(target=work_aside, args=(over,))
            thread.start()
            others.append((thread, over))
        work()
        _wait_for(others)
    except BaseException:  # Ctrl-C: a library still at work on a thread would end the process by SIGABRT
        _wait_for(others)
        raise
    if errors:
        raise errors[min(errors)]
    return [results[place] for place in range(len(calls))]


def _wait_for(others: list[tuple[threading.Thread, threading.Event]]) -> None:
    """Wait for the end of their work first: where Ctrl-C meets `join`, Python before 3.13 takes a thread at work to be
    over, and doesn't wait for it any more."""
    for thread, over in others:
        over.wait()
        thread.join()


try:
    __version__ = version("mlx-transformer")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"


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
