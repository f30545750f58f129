"""Dynamic batching: a bounded queue in which clients take turns, and threads to compute batches and streams.

    submit -> Turns (at most max_queue sentences) -> a batch of equal work -> a thread runs it -> futures
    stream -> Turns, if max_batch streams run in each thread -> a thread's `Streams`, a step of each in turn -> pieces

`Turns` decides who is next, `Batcher` forms batches and runs them in threads, `Streams` writes texts side by side,
also between the steps of a batch, `streamed` hands out their pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from queue import SimpleQueue
from threading import Thread, get_ident
from typing import Any, Protocol

LARGEST_SHARE = 0.75
"""Largest share of the queue for a single client, so that other clients always find room."""

WIDE = 4
"""A batch has at most WIDE * max_batch hypotheses: wider batches would keep other requests waiting."""

AT_ONCE = 8
"""Items that a request adds to a batch in its turn, so that a short request needs a single batch."""

PASSED = 8
"""Number of batches that may pass a request over before it leads one of the next two. Without this limit, a client with
something in every batch would never come first, and the rest of its work would wait without bound. (Simulated at twice
the capacity with 8 clients and 7 kinds of work: waits of at most 14 s instead of 41.)"""


class OverloadError(Exception):
    """The queue is full. retry_after: seconds until it should have room."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(f"{message}; try again in {retry_after} s")
        self.retry_after = retry_after


class EndingError(Exception):
    """The server stops before this is computed."""


class Task(Protocol):
    """A function of a batch. Items whose tasks compare equal may share a call."""

    def __call__(self, payloads: list[Any], stopped: Any) -> list[Any]:
        """Compute a result per payload, in order, in a thread. `stopped()` turns true once nobody waits for any."""
        ...


# Who is next.
@dataclass
class QueuePlace:
    """A place in line: the longest wait comes first, but a client or request with a batch running comes after all
    others. So a request that arrives during a batch is in the next batch, even if the running batch's client has
    more."""

    since: int
    running: int = 0

    def key(self) -> tuple[bool, int]:
        return self.running > 0, self.since


@dataclass
class Client:
    """A sender of requests. size: waiting sentences."""

    name: Hashable
    place: QueuePlace
    requests: dict[Request, None] = field(default_factory=dict)
    size: int = 0


@dataclass(eq=False)
class Request:
    """Items submitted together for the same task, or streams (None). width: hypotheses per sentence; behind: batches
    taken before it came."""

    client: Client
    task: Task | None
    width: int
    place: QueuePlace
    behind: int
    items: dict[Item, None] = field(default_factory=dict)  # waiting, oldest first


@dataclass(eq=False)
class Item:
    """A payload in the queue. length: in tokens, since items of similar length share a batch; size: its sentences."""

    request: Request
    payload: Any
    length: int
    size: int
    arrived: float
    future: asyncio.Future
    seconds: float = 0.0
    """Computing time of a stream so far."""


class Turns:
    """Waiting items, and the order in which they are taken: clients take turns, and so do a client's requests."""

    def __init__(self) -> None:
        self.clients: dict[Hashable, Client] = {}  # waiting or running
        self.size = 0  # sentences
        self._next = count()
        self._taken = 0  # batches

    def __iter__(self) -> Iterator[Item]:
        return (item for client in self.clients.values() for request in client.requests for item in request.items)

    def waiting(self, name: Hashable) -> int:
        """Count a client's waiting sentences."""
        return self.clients[name].size if name in self.clients else 0

    def add(
        self, name: Hashable, task: Task | None, payloads: Sequence[Any], lengths: Sequence[int], size: int, width: int
    ) -> list[Item]:
        """Queue a request of payloads, each of `size` sentences. Their results are set in the items' futures."""
        now, loop, since = time.monotonic(), asyncio.get_running_loop(), next(self._next)
        client = self.clients.setdefault(name, Client(name, QueuePlace(since)))
        request = Request(client, task, width, QueuePlace(since), self._taken)
        items = [
            Item(request, payload, length, size, now, loop.create_future())
            for payload, length in zip(payloads, lengths, strict=True)
        ]
        request.items = dict.fromkeys(items)
        client.requests[request] = None
        self._count(client, sum(item.size for item in items))
        self._forget(request)
        return items

    def first(self) -> Item | None:
        """The item whose turn it is."""
        waiting = [client for client in self.clients.values() if client.size]
        if not waiting:
            return None
        if self._taken % 2:
            requests = [request for client in waiting for request in client.requests if request.items]
            oldest = min(requests, key=lambda request: request.behind)
            if self._taken - oldest.behind > PASSED:
                return next(iter(oldest.items))
        client = min(waiting, key=lambda client: client.place.key())
        request = min((request for request in client.requests if request.items), key=lambda r: r.place.key())
        return next(iter(request.items))

    def like(self, task: Task | None) -> int:
        """Count waiting sentences with an equal task."""
        requests = [request for client in self.clients.values() for request in client.requests]
        return sum(item.size for request in requests if request.task == task for item in request.items)

    def take(self, first: Item, limit: int) -> list[Item]:
        """Take `first` and others with an equal task, at most `limit` sentences.

        Clients take turns, then each client's requests, AT_ONCE items at a time; the nearest to `first` in length come
        first, since they waste the least padding.
        """
        batch, size = [first], first.size
        for item in self._in_turn(first):
            if item is first:
                continue
            if size + item.size > limit:
                break
            batch.append(item)
            size += item.size
        for item in batch:
            del item.request.items[item]
            self._count(item.request.client, -item.size)
        for place in _places(batch):
            place.running += 1
        self._taken += 1
        return batch

    def done(self, batch: list[Item]) -> None:
        """Note a computed batch: its clients and requests go to the end of the line."""
        since = next(self._next)
        for place in _places(batch):
            place.running -= 1
            place.since = since
        for item in batch:
            self._forget(item.request)

    def drop(self, items: Sequence[Item]) -> None:
        """Take items out of the queue, if they still wait."""
        for item in items:
            if item in item.request.items:
                del item.request.items[item]
                self._count(item.request.client, -item.size)
                self._forget(item.request)

    def _in_turn(self, first: Item) -> Iterator[Item]:
        def of_client(client: Client) -> Iterator[Item]:
            same = [request for request in client.requests if request.items and request.task == first.request.task]
            same.sort(key=lambda request: request.place.key())
            near = lambda item: (item is not first, abs(item.length - first.length))  # noqa: E731
            return _round_robin([iter(sorted(request.items, key=near)) for request in same], AT_ONCE)

        waiting = sorted((c for c in self.clients.values() if c.size), key=lambda client: client.place.key())
        return _round_robin([of_client(client) for client in waiting])

    def _count(self, client: Client, size: int) -> None:
        client.size += size
        self.size += size

    def _forget(self, request: Request) -> None:
        client = request.client
        if not request.items and not request.place.running:
            client.requests.pop(request, None)
        if not client.requests:
            self.clients.pop(client.name, None)


def _places(batch: list[Item]) -> list[QueuePlace]:
    requests = {id(item.request): item.request for item in batch}.values()
    clients = {id(request.client): request.client for request in requests}.values()
    return [*(request.place for request in requests), *(client.place for client in clients)]


def _round_robin(sources: list[Iterator[Item]], at_once: int = 1) -> Iterator[Item]:
    while sources:
        left = []
        for source in sources:
            some = list(islice(source, at_once))
            yield from some
            if some:
                left.append(source)
        sources = left


# Batches and threads.
class LastingThreads(Executor):
    """Threads for the lifetime of the process.

    MLX keeps Python objects with each thread and frees them when the thread ends. Before Python 3.13 a thread that ends
    while the interpreter shuts down aborts the process (status 134); a thread that never ends frees nothing.
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
        """Wait for submitted work; the threads stay."""
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
        # In a frame of its own, so that a waiting thread keeps no result in memory.
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:  # raised where the future is awaited
            future.set_exception(error)


@dataclass(eq=False)
class Stream:
    """A text that is written in pieces, each sent at once. An empty piece is a step without text."""

    begin: Callable[[], Iterator[str]]
    give: Callable[[str], Any]
    pieces: Iterator[str] | None = None

    def advance(self) -> bool:
        """Write the next piece; returns False after the last."""
        if self.pieces is None:
            self.pieces = self.begin()
        piece = next(self.pieces, None)
        if piece:
            self.give(piece)
        return piece is not None


class Streams:
    """The streams of a thread. Each takes a step in turn, also between the steps of a batch, so that no stream waits
    until another has ended.

    The event loop appends streams; the thread takes steps and removes ended streams. ended: called in the thread with
    the item and its error, if any.
    """

    def __init__(self, ended: Callable[[Item, Exception | None], None]):
        self.ended = ended
        self.running: list[Item] = []
        self.arrival = asyncio.Event()  # something to compute
        self.in_batch = False
        self.thread = 0

    def step(self) -> None:
        """Take a step of each stream whose client hasn't left."""
        for item in [*self.running]:
            began, more, error = time.monotonic(), False, None
            try:
                more = not item.future.done() and item.payload.advance()
            except Exception as raised:
                error = raised
            item.seconds += time.monotonic() - began
            if not more:
                item.payload.pieces = None  # frees its cache, in the thread to which an MLX array belongs
                self.running.remove(item)
                self.ended(item, error)

    def run(self, wanted: Callable[[], bool]) -> None:
        """Take steps until all streams have ended, or the thread is wanted."""
        self.step()
        while self.running and not wanted():
            self.step()

    def between(self, left: Callable[[], bool], task: Task, payloads: list[Any]) -> list[Any]:
        """Compute a batch, and between its steps a step of each stream. left: whether nobody waits for the batch."""
        self.thread = get_ident()

        def stopped() -> bool:
            if get_ident() == self.thread:  # a search may ask from other threads, too
                self.step()
            return left()

        return task(payloads, stopped)


class Batcher:
    """A queue and its threads. Call the methods from the event loop in which it was started.

    max_batch: most sentences of a batch (fewer with wide beams). max_wait: most seconds for which an idle thread waits
    for more sentences, until there are as many as when the last batch ended; so a single client never waits. max_queue:
    most waiting sentences. workers: threads; each computes a batch and up to `max_batch` streams at a time.
    """

    def __init__(self, max_batch: int, max_wait: float, max_queue: int, workers: int = 1):
        self.max_batch, self.max_wait, self.max_queue, self.workers = max_batch, max_wait, max_queue, workers
        self._on_batch: Callable[[int, float], None] = lambda sentences, seconds: None
        self.share = math.ceil(LARGEST_SHARE * max_queue)  # sentences per client
        self.turns, self.stream_turns = Turns(), Turns()
        self.batches: list[list[Item]] = []  # running
        self.streams = [Streams(self._ended_in_thread) for _ in range(workers)]
        self.running = 0  # sentences in batches and streams
        self.neighbours = 1  # sentences computed or waiting when the last batch ended
        self.rate = 0.0  # sentences a second, lately
        self.ending = self.stopping = False
        self.collecting = asyncio.Lock()  # or two idle threads would wait for the same neighbours
        self.pool = LastingThreads(workers)
        self.tasks: list[asyncio.Task] = []

    @property
    def waiting(self) -> int:
        """Sentences in the queue."""
        return self.turns.size + self.stream_turns.size

    def report_to(self, on_batch: Callable[[int, float], None]) -> None:
        """Call `on_batch(sentences, seconds)` after each batch from now on."""
        self._on_batch = on_batch

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.tasks = [asyncio.create_task(self._serve(streams)) for streams in self.streams]

    async def stop(self) -> None:
        """Start no more batches, wait for the running batches, and end all streams."""
        self.stopping = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for item in [*self.turns, *self._all_streams()]:
            item.future.cancel()
        await asyncio.to_thread(self.pool.shutdown)

    def _all_streams(self) -> list[Item]:
        return [*self.stream_turns, *(item for streams in self.streams for item in streams.running)]

    def give_up(self) -> None:
        """End all waiting and running items with `EndingError`; running calls stop at their next step."""
        self.ending = True
        items = [*self.turns, *(item for batch in self.batches for item in batch), *self._all_streams()]
        for item in items:
            if not item.future.done():
                item.future.set_exception(EndingError())
        self._forget(items)

    def submit(
        self,
        task: Task,
        payloads: Sequence[Any],
        lengths: Sequence[int],
        size: int = 1,
        client: Hashable = None,
        width: int = 1,
    ) -> list[Item]:
        """Queue payloads of `size` sentences each, searched with `width` hypotheses. `OverloadError` if they don't all
        fit."""
        self._check_room(size * len(payloads), client)
        items = self.turns.add(client, task, payloads, lengths, size, width)
        for streams in self.streams:
            streams.arrival.set()
        return items

    def stream(self, payloads: list[Stream], lengths: Sequence[int], size: int, client: Hashable) -> list[Item]:
        """Queue streams; arguments and errors as for `submit`."""
        self._check_room(size * len(payloads), client)
        items = self.stream_turns.add(client, None, payloads, lengths, size, 1)
        self._hand_out()
        return items

    def _check_room(self, total: int, client: Hashable) -> None:
        if self.ending:
            raise EndingError
        if self.waiting + total > self.max_queue:
            raise OverloadError(f"{self.waiting} sentences are waiting already", self.seconds_to_empty())
        own = self.turns.waiting(client) + self.stream_turns.waiting(client)
        if own + total > self.share:
            raise OverloadError(f"{own} of your sentences are waiting", self.seconds_to_empty())

    def _hand_out(self) -> None:
        """Give waiting streams to threads that have room, the clients in turn."""
        while (first := self.stream_turns.first()) is not None:
            streams = min(self.streams, key=lambda streams: (len(streams.running), streams.in_batch))
            if len(streams.running) >= self.max_batch:
                return
            self.stream_turns.done(self.stream_turns.take(first, first.size))
            self.running += first.size
            streams.running.append(first)
            streams.arrival.set()

    def _ended_in_thread(self, item: Item, error: Exception | None) -> None:
        self.loop.call_soon_threadsafe(self._ended, item, error)

    def _ended(self, item: Item, error: Exception | None) -> None:
        self._note([item], item.seconds)
        if not item.future.done():
            if error is None:
                item.future.set_result(None)
            else:
                item.future.set_exception(error)
        self._hand_out()

    async def results(self, items: list[Item]) -> list[Any]:
        """Await the results. If this is cancelled or an item fails, the unfinished items are dropped."""
        try:
            return await asyncio.gather(*(item.future for item in items))
        finally:
            self.drop(items)

    def drop(self, items: list[Item]) -> None:
        """Drop items of clients who have left: they leave the queue, and a running call stops once all of its items are
        dropped."""
        self._forget(items)
        for item in items:
            if not item.future.cancel() and not item.future.cancelled():
                item.future.exception()  # or asyncio would log it as never retrieved

    def _forget(self, items: list[Item]) -> None:
        self.turns.drop([item for item in items if not isinstance(item.payload, Stream)])
        self.stream_turns.drop([item for item in items if isinstance(item.payload, Stream)])

    def seconds_to_empty(self) -> int:
        return min(60, max(1, round(self.waiting / self.rate))) if self.rate else 1

    async def _serve(self, streams: Streams) -> None:
        loop = asyncio.get_running_loop()
        while True:
            streams.arrival.clear()
            # A thread with streams to write leaves the next batch to a thread that is collecting one.
            if streams.running and (not self.turns.size or self.collecting.locked()):
                await loop.run_in_executor(self.pool, streams.run, lambda: self.turns.size > 0 or self.stopping)
                continue
            if not self.turns.size:
                await streams.arrival.wait()
                continue
            async with self.collecting:
                batch = await self._collect(streams)
            if not batch:
                continue
            began = time.monotonic()
            self.running += sum(item.size for item in batch)
            self.batches.append(batch)
            streams.in_batch = True
            try:
                await self._compute(batch, streams)
            finally:
                streams.in_batch = False
                self.turns.done(batch)
                self.batches.remove(batch)
                self._note(batch, time.monotonic() - began)

    def _note(self, items: list[Item], seconds: float) -> None:
        """Note the end of a batch or of a stream."""
        sentences = sum(item.size for item in items)
        self.neighbours = self.running + self.waiting
        self.running -= sentences
        if not all(item.future.cancelled() for item in items):  # running mean of about five batches
            self.rate += 0.2 * (sentences * self.workers / max(seconds, 1e-6) - self.rate)
        self._on_batch(sentences, seconds)

    async def _collect(self, streams: Streams) -> list[Item]:
        """Take the next batch once it is full or its first item has waited long enough; [] if nothing waits."""
        while True:
            streams.arrival.clear()
            if (first := self.turns.first()) is None:
                return []
            left = 0 if streams.running else first.arrived + self.max_wait - time.monotonic()
            limit = max(1, min(self.max_batch, WIDE * self.max_batch // first.request.width))
            room = min(limit, self.neighbours - self.running)
            if left > 0 and self.turns.like(first.request.task) < room:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(streams.arrival.wait(), left)
                continue
            return self.turns.take(first, limit)

    async def _compute(self, batch: list[Item], streams: Streams) -> None:
        """Run a batch and hand out its results. If it fails, each item is run by itself: a bad item spoils no other."""
        loop, task = asyncio.get_running_loop(), batch[0].request.task

        def left() -> bool:  # called in the thread, which only looks at the futures
            return all(item.future.done() for item in batch)

        if left() or task is None:
            return
        try:
            payloads = [item.payload for item in batch]
            results = await loop.run_in_executor(self.pool, streams.between, left, task, payloads)
        except Exception as error:
            if len(batch) > 1:
                for item in batch:
                    await self._compute([item], streams)
            elif not batch[0].future.done():
                batch[0].future.set_exception(error)
            return
        for item, result in zip(batch, results, strict=True):
            if not item.future.done():
                item.future.set_result(result)


# Pieces.
async def streamed(
    batcher: Batcher,
    begins: Sequence[Callable[[], Iterator[str]]],
    *,
    lengths: Sequence[int],
    size: int,
    client: Hashable,
    done: Callable[[], None],
) -> AsyncIterator[tuple[int, str | None]]:
    """Wait for the first piece; then return an iterator over (number of the text, piece), with None after a text's last
    piece. Errors before the first piece are raised here.

    lengths, size: as in `Batcher.submit`. done: called after the last piece.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, str | None]]()

    def giving(i: int) -> Callable[[str], Any]:
        return lambda piece: loop.call_soon_threadsafe(queue.put_nowait, (i, piece))

    streams = [Stream(begin, giving(i)) for i, begin in enumerate(begins)]
    items = batcher.stream(streams, lengths, size, client)
    for i, item in enumerate(items):
        item.future.add_done_callback(lambda _, i=i: queue.put_nowait((i, None)))
    try:
        first = await queue.get()
        if first[1] is None:
            await items[first[0]].future
    except BaseException:
        batcher.drop(items)
        raise
    return _pieces(batcher, items, queue, first, done)


async def _pieces(
    batcher: Batcher,
    items: list[Item],
    queue: asyncio.Queue[tuple[int, str | None]],
    part: tuple[int, str | None],
    done: Callable[[], None],
) -> AsyncIterator[tuple[int, str | None]]:
    left = len(items)
    try:
        while True:
            if part[1] is None:
                await items[part[0]].future
                left -= 1
            yield part
            if not left:
                break
            part = await queue.get()
        done()
    finally:
        batcher.drop(items)
