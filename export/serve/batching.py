"""Requests that arrive together are computed together, and nothing waits without a bound.

submit -> queue (at most max_queue sentences) -> collect (equal work, near in length) -> a thread runs it -> futures
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol


class Work(Protocol):
    """What is done with items; items of equal works may share a call."""

    def __call__(self, payloads: list[Any]) -> list[Any]:
        """One result for each payload, in order. Runs in a thread."""
        ...


class OverloadError(Exception):
    """The queue is full. `retry_after`: seconds until there should be room."""

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} sentences are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(eq=False)
class Item:
    """One payload in the queue. length: of its computation, so that neighbours share a batch; size: sentences in it."""

    work: Work
    payload: Any
    length: int
    size: int
    arrived: float
    future: asyncio.Future


class Batcher:
    """A queue and the threads that empty it. All methods are for the event loop that it was started in.

    max_batch: most sentences of a call. max_wait: most seconds that the oldest item waits for company when a thread is
    idle; it waits for as many sentences as were about at the end of the last call, so that a single client never waits.
    max_queue: most sentences waiting. workers: calls that run at the same time.
    on_batch(sentences, seconds): told of each call that ended.
    """

    def __init__(
        self,
        max_batch: int,
        max_wait: float,
        max_queue: int,
        workers: int = 1,
        on_batch: Callable[[int, float], None] = lambda sentences, seconds: None,
    ):
        self.max_batch, self.max_wait, self.max_queue, self.workers = max_batch, max_wait, max_queue, workers
        self.on_batch = on_batch
        self.items: list[Item] = []  # the oldest first
        self.waiting = 0  # sentences in it
        self.running = 0  # sentences that a thread computes
        self.company = 1  # sentences that were computed or waiting when the last call ended
        self.rate = 0.0  # sentences a second, lately
        self.arrival = asyncio.Event()
        self.collecting = asyncio.Lock()  # so that two idle threads don't wait for the same company
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="serve")
        self.tasks: list[asyncio.Task] = []

    def start(self) -> None:
        self.tasks = [asyncio.create_task(self._serve()) for _ in range(self.workers)]

    async def stop(self) -> None:
        """End the threads; what they run ends first."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for item in self.items:
            item.future.cancel()
        await asyncio.to_thread(self.pool.shutdown)

    def submit(self, work: Work, payloads: Sequence[Any], lengths: Sequence[int], size: int = 1) -> list[Item]:
        """Queue payloads, of `size` sentences each. `OverloadError` if there is no room for all of them."""
        total = size * len(payloads)
        if self.waiting + total > self.max_queue:
            raise OverloadError(self.waiting, self.seconds_to_empty())
        loop, now = asyncio.get_running_loop(), time.monotonic()
        items = [
            Item(work, payload, length, size, now, loop.create_future())
            for payload, length in zip(payloads, lengths, strict=True)
        ]
        self.items += items
        self.waiting += total
        self.arrival.set()
        return items

    async def results(self, items: list[Item]) -> list[Any]:
        """What became of them. If this is cancelled, or one fails, those that don't run yet never will."""
        try:
            return await asyncio.gather(*(item.future for item in items))
        finally:
            self.drop(items)

    def drop(self, items: list[Item]) -> None:
        """Out of the queue, those that are still in it; nobody waits for the others any more."""
        mine = set(items)
        there = [item for item in self.items if item in mine]
        if there:
            self.items = [item for item in self.items if item not in mine]
            self.waiting -= sum(item.size for item in there)
        for item in items:
            item.future.cancel()

    def seconds_to_empty(self) -> int:
        return min(60, max(1, round(self.waiting / self.rate))) if self.rate else 1

    async def _serve(self) -> None:
        while True:
            async with self.collecting:
                batch = await self._collect()
            sentences, began = sum(item.size for item in batch), time.monotonic()
            self.running += sentences
            try:
                await self._compute(batch)
            finally:
                self.company = self.running + self.waiting
                self.running -= sentences
            seconds = time.monotonic() - began
            # A mean in which the last five or so count.
            self.rate += 0.2 * (sentences * self.workers / max(seconds, 1e-6) - self.rate)
            self.on_batch(sentences, seconds)

    async def _collect(self) -> list[Item]:
        """The oldest item and those that may share its call, once they fill it or the oldest has waited long enough."""
        while True:
            self.arrival.clear()
            if not self.items:
                await self.arrival.wait()
                continue
            oldest = self.items[0]
            like = [item for item in self.items if item.work == oldest.work]
            left = oldest.arrived + self.max_wait - time.monotonic()
            if left > 0 and sum(item.size for item in like) < min(self.max_batch, self.company - self.running):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.arrival.wait(), left)
                continue
            # The nearest in length waste the least padding; the oldest is always among them, so none waits forever.
            like.sort(key=lambda item: (item is not oldest, abs(item.length - oldest.length)))
            batch, size = like[:1], oldest.size
            for item in like[1:]:
                if size + item.size > self.max_batch:
                    break
                batch.append(item)
                size += item.size
            taken = set(batch)
            self.items = [item for item in self.items if item not in taken]
            self.waiting -= size
            return batch

    async def _compute(self, batch: list[Item]) -> None:
        """Run one call, hand out its results. If it fails for several, each runs alone: one spoils no other."""
        loop, work = asyncio.get_running_loop(), batch[0].work
        try:
            results = await loop.run_in_executor(self.pool, work, [item.payload for item in batch])
        except Exception as error:
            if len(batch) > 1:
                for item in batch:
                    if not item.future.done():
                        await self._compute([item])
            elif not batch[0].future.done():
                batch[0].future.set_exception(error)
            return
        for item, result in zip(batch, results, strict=True):
            if not item.future.done():
                item.future.set_result(result)
