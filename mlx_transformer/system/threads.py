"""Calls side by side, each on a thread, for those that leave Python's lock alone: opening sessions, reading files.

`concurrent.futures` does as much and more, but brings `logging` with it: 5 ms to import, a sixth of what the code of
this project takes that opens a folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

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
