"""One input, one process: forked from one that has imported everything, watched, and judged by how it ended."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SECONDS, BYTES = 20, 3 << 30
"""After so long on a processor, or with so much memory, a process is ended."""

WAITING = 6
"""So many times as long by the clock: who waits for ever needs no processor, and on a busy machine nobody gets one."""

GUILTY = 99
"""Status of a process whose damage, not whose command, went wrong."""

OUTPUTS = ("out", "error")  # files of standard output and standard error


@dataclass(frozen=True)
class Ended:
    """How a process ended. peak: bytes of memory. killed: "" or why we ended it."""

    status: int
    out: bytes
    error: str
    seconds: float
    peak: int
    killed: str = ""


class Child:
    """A fork that prepares (damage; what goes wrong there is ours) and then runs. Its outputs are files in `folder`."""

    def __init__(self, folder: Path, prepare: Callable[[], Callable[[], int]]):
        self.folder, self.begin = folder, time.monotonic()
        for name in OUTPUTS:
            (folder / name).write_bytes(b"")  # a kill may come before the fork's first line
        self.process = os.fork()
        if not self.process:
            self._run(prepare)

    def _run(self, prepare: Callable[[], Callable[[], int]]) -> None:
        status = GUILTY
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            for number, name in enumerate(OUTPUTS, 1):
                os.dup2(os.open(self.folder / name, os.O_WRONLY), number)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            run = prepare()
            status = run()
            gc.collect()  # what is torn down may speak
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:  # not even an exit may go on in the copy of the caller
            traceback.print_exc()
        finally:
            os._exit(status if isinstance(status, int) else GUILTY)

    def end(self) -> None:
        """With all that it has begun."""
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)

    def ended(self) -> Ended | None:
        """None as long as it runs."""
        found, status, usage = os.wait4(self.process, os.WNOHANG)
        seconds, killed = time.monotonic() - self.begin, ""
        if not found:
            hangs = seconds > SECONDS and (seconds > WAITING * SECONDS or _worked(self.process) > SECONDS)
            killed = "hang" if hangs else "memory" if _resident(self.process) > BYTES else ""
            if not killed:
                return None
            self.end()
            _, status, usage = os.wait4(self.process, 0)
        out, error = ((self.folder / name).read_bytes() for name in OUTPUTS)
        peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return Ended(os.waitstatus_to_exitcode(status), out, error.decode(errors="replace"), seconds, peak, killed)


def _resident(process: int) -> int:
    try:
        pages = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):  # gone, or no Linux
        return 0
    return int(pages) * resource.getpagesize()


def _worked(process: int) -> float:
    """Seconds that its threads have had of processors."""
    try:
        times = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    except OSError:  # gone, or no Linux
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def import_all() -> None:
    """What any command imports, so that no fork does; nothing of it begins a thread that a fork would miss."""
    for name in (
        *("mlx_transformer.commands.app", "mlx_transformer.commands.quickstart", "mlx_transformer.commands.info"),
        *(
            "mlx_transformer.training.trainer",
            "mlx_transformer.runtime.transformer",
            "mlx_transformer.convert",
            "sacrebleu",
        ),
        *("export.validate.compare", "export.search.runtime", "export.runtime.transformer", "export.search.write"),
        *("export.package.write", "export.package.plan", "mlx_transformer.generation.stream", "onnxruntime", "onnx"),
        *("export.validate.engines.mlx_engine", "export.validate.engines.opaque_engines", "export.web.write"),
        *("mlx_transformer.commands.looking", "export.explain"),
    ):
        importlib.import_module(name)
    gc.freeze()  # a fork that collects garbage would else copy all of it
