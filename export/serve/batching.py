"""Requests that arrive together are computed together, and nothing waits without a bound.

submit -> turns (at most max_queue sentences) -> collect (equal work, in turn) -> a thread runs it -> futures
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from .turns import Item, Task, Turns

LARGEST_SHARE = 0.75
"""The share of the queue that one client may fill: there is always room for another."""


WIDE = 4
"""The most hypotheses in a batch, as a multiple of its sentences: wider batches keep others waiting."""


class OverloadError(Exception):
    """There is no room. `retry_after`: seconds until there should be some."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(f"{message}; try again in {retry_after} s")
        self.retry_after = retry_after


class EndingError(Exception):
    """The server ends before this could be computed."""


class LastingThreads(Executor):
    """Threads that last as long as the process.

    MLX keeps Python objects with each thread, and frees them at the very end of it, for which Python waits from 3.13 on
    alone: before, a thread that ends while the interpreter does aborts the process (status 134). One that never ends
    frees nothing.
    """

    def __init__(self, count: int):
        self._calls: SimpleQueue[tuple[Future, Callable[[], Any]]] = SimpleQueue()
        self._unfinished: set[Future] = set()
        for number in range(count):
            Thread(target=self._work, name=f"serve_{number}", daemon=True).start()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future:
        future: Future = Future()
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        self._calls.put((future, partial(function, *arguments, **options)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let submitted work end, but not the threads."""
        unfinished = list(self._unfinished)
        if cancel_futures:
            for future in unfinished:
                future.cancel()
        if wait:
            wait_for(unfinished)

    def _work(self) -> None:
        while True:
            self._run(*self._calls.get())

    def _run(self, future: Future, call: Callable[[], Any]) -> None:
        """Run a call in a frame of its own, so that a thread that waits holds no result."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:  # whoever waits for it deals with it
            future.set_exception(error)


class Batcher:
    """A queue and the threads that empty it. All methods are for the event loop that it was started in.

    max_batch: most sentences of a call, fewer of those with many hypotheses. max_wait: most seconds that the first item
    waits for neighbours when a thread is idle: for as many sentences as were about at the end of the last call, so that
    a single client never waits.
    max_queue: most sentences waiting. workers: calls that run at the same time.
    """

    def __init__(
        self,
        max_batch: int,
        max_wait: float,
        max_queue: int,
        workers: int = 1,
    ):
        self.max_batch, self.max_wait, self.max_queue, self.workers = max_batch, max_wait, max_queue, workers
        self._on_batch: Callable[[int, float], None] = lambda sentences, seconds: None
        self.share = math.ceil(LARGEST_SHARE * max_queue)  # of one client, in sentences
        self.turns = Turns()
        self.batches: list[list[Item]] = []  # that run
        self.running = 0  # sentences that a thread computes
        self.neighbours = 1  # sentences that were computed or waiting when the last call ended
        self.rate = 0.0  # sentences a second, lately
        self.ending = False
        self.arrival = asyncio.Event()
        self.collecting = asyncio.Lock()  # so that two idle threads don't wait for the same neighbours
        self.pool = LastingThreads(workers)
        self.tasks: list[asyncio.Task] = []

    @property
    def waiting(self) -> int:
        """Sentences in the queue."""
        return self.turns.size

    def report_to(self, on_batch: Callable[[int, float], None]) -> None:
        """Call `on_batch(sentences, seconds)` at the end of each call, from now on."""
        self._on_batch = on_batch

    def start(self) -> None:
        self.tasks = [asyncio.create_task(self._serve()) for _ in range(self.workers)]

    async def stop(self) -> None:
        """Compute nothing more; what runs ends first."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for item in self.turns:
            item.future.cancel()
        await asyncio.to_thread(self.pool.shutdown)

    def give_up(self) -> None:
        """Answer nothing more: what waits or runs ends with `EndingError`, running calls at their next step."""
        self.ending = True
        items = [*self.turns, *(item for batch in self.batches for item in batch)]
        for item in items:
            if not item.future.done():
                item.future.set_exception(EndingError())
        self.turns.drop(items)

    def submit(
        self,
        task: Task,
        payloads: Sequence[Any],
        lengths: Sequence[int],
        size: int = 1,
        client: Hashable = None,
        width: int = 1,
    ) -> list[Item]:
        """Queue payloads, of `size` sentences each, each of them computed with `width` hypotheses. `OverloadError` if
        there is no room for all of them."""
        total = size * len(payloads)
        if self.ending:
            raise EndingError
        if self.waiting + total > self.max_queue:
            raise OverloadError(f"{self.waiting} sentences are waiting already", self.seconds_to_empty())
        if self.turns.waiting(client) + total > self.share:
            raise OverloadError(f"{self.turns.waiting(client)} of your sentences are waiting", self.seconds_to_empty())
        items = self.turns.add(client, task, payloads, lengths, size, width)
        self.arrival.set()
        return items

    async def results(self, items: list[Item]) -> list[Any]:
        """Return what became of them. If this is cancelled, or one fails, those that don't run yet never will."""
        try:
            return await asyncio.gather(*(item.future for item in items))
        finally:
            self.drop(items)

    def drop(self, items: list[Item]) -> None:
        """Drop items that nobody waits for any more: they leave the queue, and a running call that is for them alone
        ends."""
        self.turns.drop(items)
        for item in items:
            if not item.future.cancel() and not item.future.cancelled():
                item.future.exception()  # seen, so that it is not reported as forgotten

    def seconds_to_empty(self) -> int:
        return min(60, max(1, round(self.waiting / self.rate))) if self.rate else 1

    async def _serve(self) -> None:
        while True:
            async with self.collecting:
                batch = await self._collect()
            sentences, began = sum(item.size for item in batch), time.monotonic()
            self.running += sentences
            self.batches.append(batch)
            try:
                await self._compute(batch)
            finally:
                self.turns.done(batch)
                self.batches.remove(batch)
                self.neighbours = self.running + self.waiting
                self.running -= sentences
            seconds = time.monotonic() - began
            if not all(item.future.cancelled() for item in batch):  # a mean in which the last five or so count
                self.rate += 0.2 * (sentences * self.workers / max(seconds, 1e-6) - self.rate)
            self._on_batch(sentences, seconds)

    async def _collect(self) -> list[Item]:
        """Return the item whose turn it is and those that may share its call, once they fill it or it has waited
        enough."""
        while True:
            self.arrival.clear()
            first = self.turns.first()
            if first is None:
                await self.arrival.wait()
                continue
            left = first.arrived + self.max_wait - time.monotonic()
            limit = max(1, min(self.max_batch, WIDE * self.max_batch // first.request.width))
            room = min(limit, self.neighbours - self.running)
            if left > 0 and self.turns.like(first.request.task) < room:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.arrival.wait(), left)
                continue
            return self.turns.take(first, limit)

    async def _compute(self, batch: list[Item]) -> None:
        """Run one call, hand out its results. If it fails for several, each runs alone: one spoils no other."""
        loop, task = asyncio.get_running_loop(), batch[0].request.task

        def stopped() -> bool:  # asked in the thread; futures are only looked at
            return all(item.future.done() for item in batch)

        if stopped():
            return
        try:
            results = await loop.run_in_executor(self.pool, task, [item.payload for item in batch], stopped)
        except Exception as error:
            if len(batch) > 1:
                for item in batch:
                    await self._compute([item])
            elif not batch[0].future.done():
                batch[0].future.set_exception(error)
            return
        for item, result in zip(batch, results, strict=True):
            if not item.future.done():
                item.future.set_result(result)
