"""The next batches are made by a thread while the device works on this one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

AHEAD = 2  # batches
SECONDS = 1.0  # that an end waits for the batch under way; a process that ends doesn't


@contextmanager
def prefetched(items: Iterator[T]) -> Iterator[Iterator[T]]:
    """Give the same items in the same order, each made earlier: `with prefetched(batches) as batches: next(batches)`.

    Whatever the iterator raises is raised where its item would have been. It must not use MLX, whose streams belong to
    the threads that made them, and is never run by two threads. When the block ends, by an error or an interruption
    too, the thread ends with the item that it is at.
    """
    made: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(AHEAD)
    ended, last = threading.Event(), None

    def make() -> None:
        try:
            for item in items:
                made.put((item, None))
                if ended.is_set():
                    return
            end: BaseException = StopIteration()
        except BaseException as error:  # whatever it is, the thread that works must hear of it
            end = error
        made.put((None, end))

    def take() -> Any:
        nonlocal last
        item, last = (None, last) if last is not None else made.get()
        if last is not None:
            raise last
        return item

    # A daemon: a process that is to end at once doesn't wait for an epoch's plan.
    thread = threading.Thread(target=make, name="batches", daemon=True)
    thread.start()
    try:
        yield iter(take, object())
    finally:
        ended.set()
        while not made.empty():  # makes room for the one that the thread may wait with
            made.get_nowait()
        thread.join(SECONDS)
