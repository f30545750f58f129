"""The machine: memory, cores, a Mac's battery and sleep, calls on threads, versions of installed packages.

Importing this module costs 3 MB, as `importlib.metadata` loads a mail parser; import it where it is needed.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
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
LOADS, LOOKS, LOOK_SECONDS = Path("/proc/loadavg"), 9, 0.002


@functools.cache
def performance_cores() -> int | None:
    """The number of a Mac's performance cores; None on other systems and on Macs with a single kind of core."""
    output = _output_of(SYSCTL, "-n", "hw.perflevel0.physicalcpu") if sys.platform == "darwin" else ""
    return int(output) if output.strip().isdecimal() and int(output) > 0 else None


def battery_line() -> str | None:
    """A warning for training on battery; None unless macOS reports the battery in use."""
    output = _output_of(PMSET, "-g", "batt") if sys.platform == "darwin" else ""
    if "'Battery Power'" not in output:
        return None
    charge = next((word.rstrip(";") for word in output.split() if word.rstrip(";").endswith("%")), "")
    return f"on battery{f', {charge}' if charge else ''}: plug in, for a run empties it, and may be slower until then"


@contextmanager
def keep_awake() -> Iterator[None]:
    """Keep an idle Mac awake until the block or this process ends. It still sleeps when the lid is closed.

    Raises `UserError` if there is no `caffeinate` program.
    """
    import subprocess  # slow to import, and opening a model doesn't need it

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
    """The output of a program; "" if it fails or is missing."""
    import subprocess

    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS, check=True
        )
        return done.stdout.decode(errors="replace")
    return ""


T = TypeVar("T")


def side_by_side(calls: Iterable[Callable[[], T]], at_once: int) -> list[T]:
    """Run calls on threads, at most `at_once` at a time, and return their results in order.

    For calls that release Python's lock, such as reading files. One thread is the caller's own. All calls run even if
    some fail; then the error of the first failed call is raised. (`concurrent.futures` would do, but takes 5 ms to
    import, a sixth of the time to open a model.)
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
            except BaseException as error:  # raised below, on the caller's thread
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
    except BaseException:  # Ctrl-C: exiting while a library works on a thread would abort the process (SIGABRT)
        _wait_for(others)
        raise
    if errors:
        raise errors[min(errors)]
    return [results[place] for place in range(len(calls))]


def _wait_for(others: list[tuple[threading.Thread, threading.Event]]) -> None:
    """Wait for threads to end. Waits for their events first: if Ctrl-C interrupts `join`, Python before 3.13 takes the
    thread for finished while it still runs."""
    for thread, over in others:
        over.wait()
        thread.join()


try:
    __version__ = version("mlx-transformer")
except PackageNotFoundError:  # not installed, e.g. a plain source tree
    __version__ = "0+unknown"


CGROUP = Path("/sys/fs/cgroup/memory.max")  # the memory limit of a Linux container
FEW = 1 << 24
"""Bytes. Smaller amounts aren't checked: a check takes 0.1 ms, as long as a step of a small model."""
PACKAGES = (
    "mlx-transformer mlx mlx-cpu mlx-metal mlx-cuda-13 scipy-openblas32 numpy onnx onnx-ir onnxscript onnxruntime "
    "onnxruntime-gpu tokenizers safetensors sacrebleu"
).split()


def memory() -> int:
    """Bytes of memory available to this process: the smallest of the machine's, container's and user's limits."""
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
    """Raise `UserError` "WHAT needs N GB ...: REMEDY" if `needed` bytes exceed `memory()`. remedy: a template for
    `options` (`errors.Text`). An error is better than a machine that swaps, or a process killed by the system."""
    if needed > FEW and needed > (there := memory()):
        sizes = f"{needed / 1e9:,.1f} GB of memory, and there are {there / 1e9:,.1f} GB"
        raise UserError("{} needs {}: " + remedy, what, sizes, **options)


def usable_cores() -> int:
    """The number of cores this process may use; a container's cpuset or `taskset` may allow fewer than the machine
    has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fast_cores() -> int:
    """The number of cores to split equal work over: on a Mac only performance cores, as the others would lag behind."""
    return min(usable_cores(), performance_cores() or usable_cores())


def free_cores() -> int:
    """How many of the usable cores nobody else computes on right now; all of them on systems other than Linux.

    From the number of threads on the whole machine that run or wait for a core: the median of nine looks in 16 ms.
    """
    running: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        while len(running) < LOOKS:
            time.sleep(LOOK_SECONDS if running else 0)
            running.append(int(LOADS.read_text().split()[3].partition("/")[0]))  # "0.20 0.18 0.12 1/80 11206"
    others = sorted(running)[len(running) // 2] - 1 if running else 0  # but for this thread
    return max(min(usable_cores(), (os.cpu_count() or 1) - others), 0)


def versions() -> dict[str, str]:
    """{package: version} of installed packages that results depend on, plus "python" and "platform"."""
    return dict(_versions())


@functools.cache  # takes 0.1 s
def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata  # a mail parser and its imports, 3 MB

    versions = {"python": sys.version.split()[0], "platform": platform.platform()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
