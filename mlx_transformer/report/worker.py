"""Run a model in its own process, to measure its translations, their time and the process's peak memory."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mlx_transformer.system.errors import UserError

KILL_AFTER_SECONDS = 10.0  # how long to wait for a process to end


@dataclass(frozen=True)
class Served:
    """An opened model. facts: rows for the page, e.g. its format and runtime. size: bytes of its files."""

    translator: Any
    """A `generation.verbs.TextVerbs`."""
    facts: dict[str, str] = field(default_factory=dict)
    size: int = 0
    array_memory: Callable[[], int] | None = None
    """Returns the peak bytes of the runtime's arrays; None if the runtime doesn't count them."""


class Worker:
    """The parent's handle on a model's process. Errors of the process are raised in the parent."""

    def __init__(self, name: str, opened: Callable[[], Served]):
        """Start the process. `opened` is pickled and opens the model there, at the first question."""
        context = multiprocessing.get_context("spawn")  # a fork would share this process's memory and threads
        self.name = name
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, opened), daemon=True)
        with _signals_blocked(), _script_left_alone():
            self.process.start()
        theirs.close()

    def ask(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Call a function of `ANSWERS` in the process, e.g. `ask("translate", lines)`, and return its result."""
        try:
            self.connection.send((what, arguments, named))
            value, error = self.connection.recv()
        except (EOFError, OSError) as gone:
            self.process.join(KILL_AFTER_SECONDS)
            raise self._ended() from gone
        if error is not None:
            raise error
        return value

    def _ended(self) -> Exception:
        status = self.process.exitcode
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            return UserError(f"{self.name}: the system has ended its process ({name}), perhaps for lack of memory")
        return RuntimeError(f"{self.name}: its process has ended with status {status}")

    def close(self) -> None:
        """Kill the process."""
        self.connection.close()
        self.process.kill()
        self.process.join(KILL_AFTER_SECONDS)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block Ctrl-C in processes that start now, since the parent is interrupted and ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # started by the first process otherwise, which would unblock Ctrl-C again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _script_left_alone() -> Iterator[None]:
    """Keep processes that start now from running the user's script again.

    `spawn` does so, to find definitions in the script. A short script has no `if __name__ == "__main__"`, so each
    process would start further processes.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _serve(connection: Connection, opened: Callable[[], Served]) -> None:
    """The process's main loop: open the model and answer questions until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    served: Served | None = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            what, arguments, named = connection.recv()
            try:
                if served is None:
                    served = opened()
                connection.send((ANSWERS[what](served, *arguments, **named), None))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                if not isinstance(error, UserError):
                    error.add_note(traceback.format_exc())
                connection.send((None, error))


def describe(served: Served) -> tuple[dict[str, str], int]:
    """Return the model's facts and the bytes of its files."""
    return served.facts, served.size


def check(served: Served, lines: Sequence[str], overlong: str) -> list[int]:
    """Return the numbers of lines too long for the model. With overlong="error", raises UserError for the first."""
    served.translator.check_lines(lines, overlong)
    if (tokenizer := served.translator.tokenizer) is None:
        return []
    rows, most = tokenizer.source.encode_batch(lines), served.translator.config.max_positions
    return [i for i, ids in enumerate(rows, 1) if lines[i - 1].strip() and len(ids) > most]


def translate(served: Served, lines: Sequence[str], **options: Any) -> tuple[list[str], float, list[int] | None]:
    """Return (translations, seconds, tokens of each translation including eos; None without a tokenizer)."""
    begin = time.perf_counter()
    outputs = served.translator.n_best(lines, scored=False, **options)
    seconds = time.perf_counter() - begin
    texts = [best[0].text for best in outputs]
    tokenizer = served.translator.tokenizer
    return texts, seconds, None if tokenizer is None else [len(ids) for ids in tokenizer.encode_batch(texts)]


def log_p(served: Served, source: Sequence[str], target: Sequence[str]) -> list[float | None] | None:
    """Return log p of each target given its source; None for pairs that are too long, and for empty sources.

    Returns None if the runtime can't compute probabilities of given outputs.
    """
    if not served.translator.has_steps:
        return None
    translator = served.translator.translator
    tokenizer, most = translator.tokenizer, translator.most
    pairs = list(zip(tokenizer.source.encode_batch(source), tokenizer.encode_batch(target), strict=True))
    fits = [i for i, pair in enumerate(pairs) if source[i].strip() and max(map(len, pair)) <= most]
    from mlx_transformer.generation.settings import with_languages

    languages = with_languages(served.translator.generation, {}, lines=source)
    sources, targets = ([pairs[i][side] for i in fits] for side in (0, 1))
    values = served.translator.log_probabilities(sources, targets, **languages)
    by_pair: list[float | None] = [None] * len(pairs)
    for i, row in zip(fits, values, strict=True):
        by_pair[i] = float(np.sum(row, dtype=np.float64))
    return by_pair


def memory(served: Served) -> tuple[int | None, int | None]:
    """Return (peak bytes of this process, peak bytes of the runtime's arrays); None where unknown."""
    return peak_memory(), None if served.array_memory is None else served.array_memory()


ANSWERS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (describe, check, translate, log_p, memory)}


def peak_memory() -> int | None:
    """Peak memory of this process in bytes; None on Windows.

    Linux reads VmHWM, since ru_maxrss there includes the parent's peak.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
