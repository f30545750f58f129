"""The next batches are made by a thread while the device works on this one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

AHEAD = 2  # batches
SECONDS = 1.0  # that an end waits for the batch under way; a process that ends doesn't


class Prefetched(Iterator[T], Generic[T]):
    """`with Prefetched(batches) as batches: next(batches)`: the same items in the same order, each made earlier.

    Whatever the iterator raises is raised where its item would have been. It must not use MLX, whose streams belong to
    the threads that made them, and is never run by two threads. When the block ends, by an error or an interruption
    too, the thread ends with the item that it is at.
    """

    def __init__(self, items: Iterator[T], ahead: int = AHEAD):
        self._items, self._made = items, queue.Queue[tuple[T | None, BaseException | None]](ahead)
        self._ended = threading.Event()
        self._last: BaseException | None = None
        # A daemon: a process that is to end at once doesn't wait for an epoch's plan.
        self._thread = threading.Thread(target=self._make, name="batches", daemon=True)

    def __enter__(self) -> Prefetched[T]:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        while not self._made.empty():  # makes room for the one that the thread may wait with
            self._made.get_nowait()
        self._thread.join(SECONDS)

    def __next__(self) -> T:
        if self._last is None:
            item, self._last = self._made.get()
            if self._last is None:
                return item  # type: ignore[return-value]
        raise self._last

    def _make(self) -> None:
        try:
            for item in self._items:
                self._made.put((item, None))
                if self._ended.is_set():
                    return
            last: BaseException = StopIteration()
        except BaseException as error:  # whatever it is, the thread that works must hear of it
            last = error
        self._made.put((None, last))
