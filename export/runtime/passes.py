"""Passes side by side on the threads of one session, where its operators would otherwise share each product among them.

An operator waits for the last of its threads, hundreds of times a pass; passes that run side by side wait once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import inf
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from mlx_transformer.generation.passes import ONE_AT_A_TIME, Passes
from mlx_transformer.system.machine import fast_cores

from .sessions import CPU, check_providers, run_aside

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")
W = TypeVar("W")

JUST_BEGUN = 0.25
"""The share of a pass of which a thread may be behind the caller's and still compute the last pass alone. Two threads
that share passes take 0.6 of the time for each: to share the rest of the caller's, and then the last, takes longer than
the last alone if two thirds or more of the caller's are left."""


class SideBySide(Passes):
    """As many passes as a session has threads: one on the caller's, which is helped by those without a pass of their
    own, the others on a thread each of the session. No more cores are busy, and the weights are in memory once."""

    def __init__(self, threads: int):
        """threads: those of the session, the caller's among them."""
        self.at_once = threads

    def in_parallel(self, compute: Callable[[W], T], work: Sequence[W]) -> Iterator[T]:
        """Run `compute` on all work, the longest first in the list, in any order. If one fails, no other begins, and
        its exception is raised when those that run are over."""
        if len(work) < 2:
            yield from map(compute, work)
            return
        from concurrent.futures import wait  # with `logging`: who has one pass at a time does without

        left, lock, results = deque(work), threading.Lock(), SimpleQueue[T]()
        begun = perf_counter()  # the caller's pass that runs

        def take() -> list[W]:
            nonlocal begun
            with lock:
                begun = perf_counter()
                return [left.popleft()] if left else []

        def take_aside(seconds: float) -> list[W]:
            # The last one is over earlier if all threads share first what the caller is at, and then this; unless the
            # caller has only begun.
            with lock:
                apart = len(left) > 1 or (left and perf_counter() - begun < JUST_BEGUN * seconds)
                return [left.pop()] if apart else []

        def stop() -> None:
            with lock:
                left.clear()

        def aside() -> None:
            try:
                seconds = inf
                while part := take_aside(seconds):
                    at = perf_counter()
                    results.put(compute(*part))
                    seconds = perf_counter() - at
            except BaseException:
                stop()
                raise

        others = [self.pool.submit(aside) for _ in range(min(self.at_once, len(work)) - 1)]
        try:
            while part := take():
                yield compute(*part)
                while not results.empty():
                    yield results.get()
            for other in _begun(others):
                other.result()
            while not results.empty():
                yield results.get()
        finally:
            stop()
            wait(_begun(others))

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """The threads that wait for those of the session; kept, as it takes time to begin one."""
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(self.at_once - 1, initializer=run_aside)


def passes_of(threads: int | None, providers: Sequence[Any] | None) -> Passes:
    """Return how passes run in a session with so many threads (None: the machine's cores) and these providers."""
    cores = threads or fast_cores()
    return SideBySide(cores) if cores > 1 and check_providers(providers) == [CPU] else ONE_AT_A_TIME


def _begun(futures: Sequence[Future[None]]) -> list[Future[None]]:
    """Return those that have begun, and keep the others from it: their threads are busy with another call's passes."""
    return [future for future in futures if not future.cancel()]
