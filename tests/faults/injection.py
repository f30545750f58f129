"""Faults put into this process: the n-th thing that it does to the files below a folder is its last, or is refused.

Counted are files that are made, written, renamed, removed, flushed: by Python's audit events, by `open`, whose raw
files are ours, and by what writes elsewhere (`os.fsync`, an exchange of names). Nothing is ever taken back: this is for
a process that ends with its command.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

How = Literal["kill", "power", "full", "refuse"]
GROWING = {"make", "write", "mkdir", "fsync"}
"""What a full disk refuses. (A file system that allots blocks late says so when it flushes.)"""
MODES = os.O_CREAT | os.O_TRUNC


@dataclass
class Injection:
    """at: 1 for the first; 0 for none, to see what there is. kill: the process is killed there; of a write, half is
    done. power: and what no file was flushed of is lost, as when the machine goes out. full: half of a write is done,
    and from there on nothing may grow. refuse: that one call fails."""

    root: Path
    at: int = 0
    how: How = "kill"
    seen: list[tuple[str, str]] = field(default_factory=list)
    """(what, file below the root) of all that was counted."""
    _lock: Any = field(default_factory=threading.RLock)
    _busy: bool = False
    _flushed: dict[int, int] = field(default_factory=dict)
    """Bytes of each file, by its number, that the disk has."""

    def install(self) -> None:
        self.root = Path(os.path.realpath(self.root))
        for file in self._files():
            self._flushed[file.stat().st_ino] = file.stat().st_size
        sys.addaudithook(self._heard)
        opening, flush = io.open, os.fsync

        def open_(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
            if not set(mode) & set("wax+") or self._name(file) is None:
                return opening(file, mode, buffering, *more, **named)
            return _opened(self, file, mode, buffering, *more, **named)

        def fsync(handle: int) -> None:
            self.happens("fsync", os.readlink(f"/proc/self/fd/{handle}"))
            flush(handle)
            self._flushed[os.fstat(handle).st_ino] = os.fstat(handle).st_size

        builtins.open = io.open = open_  # type: ignore[assignment]
        os.fsync = fsync
        self._install_renames()

    def _install_renames(self) -> None:
        """Of a module that is imported already."""
        durable = sys.modules.get("mlx_transformer.system.durable")
        if durable is not None:
            rename = vars(durable)["_rename"]

            def renamed(first: Path, second: Path, how: tuple[int, int]) -> bool:
                self.happens("rename", second)
                return rename(first, second, how)

            vars(durable)["_rename"] = renamed

    def happens(self, what: str, file: Any, half: Callable[[], Any] | None = None) -> Any:
        """Count what is about to be done; half: does a part of it. Returns what `half` does, where it was done."""
        name = self._name(file)
        if name is None or self._busy:
            return None
        with self._lock:
            self.seen.append((what, name))
            if self.at == 0 or len(self.seen) < self.at:
                return None
            first = len(self.seen) == self.at
            if self.how in ("kill", "power"):
                self._kill(half)
            if (self.how == "refuse" and not first) or (self.how == "full" and what not in GROWING):
                return None
            if self.how == "full" and half is not None and first:
                self._busy = True
                try:
                    return half()
                finally:
                    self._busy = False
            number = errno.EIO if self.how == "refuse" else errno.ENOSPC
            named = (str(file),) if what not in ("write", "fsync") else ()  # as the system's own errors do
            raise OSError(number, os.strerror(number), *named)

    def _kill(self, half: Callable[[], Any] | None) -> None:
        self._busy = True
        try:
            if half is not None:
                half()
            for file in self._files() if self.how == "power" else ():
                if file.stat().st_size > (kept := self._flushed.get(file.stat().st_ino, 0)):
                    os.truncate(file, kept)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    def _files(self) -> list[Path]:
        return [path for path in self.root.rglob("*") if path.is_file() and not path.is_symlink()]

    def _forget(self, file: Any) -> None:
        """A file that goes; its number may be another's afterwards."""
        with suppress(OSError):
            self._flushed.pop(os.stat(file).st_ino, None)

    def _name(self, file: Any) -> str | None:
        """Below the root; None for what is elsewhere, or is a handle."""
        if not isinstance(file, str | bytes | os.PathLike):
            return None
        path = Path(os.path.abspath(os.fsdecode(file)))
        place = Path(os.path.realpath(path.parent))
        return str((place / path.name).relative_to(self.root)) if place.is_relative_to(self.root) else None

    def _heard(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            if isinstance(given[2], int) and given[2] & MODES:
                self.happens("make", given[0])
                if given[2] & os.O_TRUNC:
                    self._forget(given[0])
        elif event == "os.rename":
            self.happens("rename", _below(given[1], given[3]))
        elif event in ("os.remove", "os.rmdir"):
            self.happens(event[3:], _below(*given))
            self._forget(_below(*given))
        elif event == "os.mkdir":
            self.happens("mkdir", _below(given[0], given[2]))
        elif event == "os.truncate":
            self.happens("truncate", given[0])


def _below(path: Any, folder: int) -> Any:
    """A path that a call names by the handle of its folder, in full."""
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path) if folder >= 0 else path


def _opened(
    injection: Injection,
    file: Any,
    mode: str,
    buffering: int,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """As `open`, over a raw file whose writes are counted."""

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            data = memoryview(data).cast("B")
            done = injection.happens("write", file, lambda: super(Raw, self).write(data[: len(data) // 2]))
            return super().write(data) if done is None else done

        def truncate(self, size: int | None = None) -> int:
            injection.happens("truncate", file)
            return super().truncate(size)

    raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
    if buffering == 0:
        return raw
    buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    if "b" in mode:
        return buffered
    return io.TextIOWrapper(buffered, io.text_encoding(encoding), errors, newline)
