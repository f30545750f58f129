"""Who is next: clients take turns, and so do the requests of a client, whatever each of them has waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Protocol

AT_ONCE = 8
"""Sentences that a request has computed in its turn: one of a few is answered at once, and not one by one."""

PASSED = 8
"""Batches that may pass a request over, before it leads one of the next two. Clients that all have something in each
batch are level for ever, so that the rest of what they want would wait without a bound. (Simulated at twice the
capacity, 8 clients and 7 kinds of work: at most 14 s, instead of 41.)"""


class Task(Protocol):
    """The work that is done with items; items of equal tasks may share a call."""

    def __call__(self, payloads: list[Any], stopped: Any) -> list[Any]:
        """Return one result for each payload, in order. Runs in a thread; `stopped()` is true once nobody waits for
        them."""
        ...


@dataclass
class QueuePlace:
    """The place in a row: who waits for longest is first, and who is computed for now comes after all others. A request
    that arrives while a batch runs is therefore in the next one, even if who is in the running one has more."""

    since: int
    running: int = 0

    def key(self) -> tuple[bool, int]:
        return self.running > 0, self.since


@dataclass
class Client:
    """Somebody who sends requests. size: sentences that wait."""

    name: Hashable
    place: QueuePlace
    requests: dict[Request, None] = field(default_factory=dict)
    size: int = 0


@dataclass(eq=False)
class Request:
    """Items that were submitted together, for equal work. width: hypotheses that a sentence of it is computed with;
    behind: the batches that were taken before it came."""

    client: Client
    task: Task
    width: int
    place: QueuePlace
    behind: int
    items: dict[Item, None] = field(default_factory=dict)  # those that wait, the oldest first


@dataclass(eq=False)
class Item:
    """One payload in the queue. length: of its computation, so that neighbours share a batch; size: sentences in it."""

    request: Request
    payload: Any
    length: int
    size: int
    arrived: float
    future: asyncio.Future


class Turns:
    """Items that wait, and the order in which they are taken."""

    def __init__(self) -> None:
        self.clients: dict[Hashable, Client] = {}  # those that wait or are computed for
        self.size = 0  # sentences
        self._next = count()
        self._taken = 0  # batches

    def __iter__(self) -> Iterator[Item]:
        return (item for client in self.clients.values() for request in client.requests for item in request.items)

    def waiting(self, name: Hashable) -> int:
        """Return sentences of this client."""
        return self.clients[name].size if name in self.clients else 0

    def add(
        self, name: Hashable, task: Task, payloads: Sequence[Any], lengths: Sequence[int], size: int, width: int
    ) -> list[Item]:
        """Return a request of the client: payloads of `size` sentences each, whose results are the items' futures."""
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
        """Return the item whose turn it is."""
        waiting = [client for client in self.clients.values() if client.size]
        if not waiting:
            return None
        if self._taken % 2:
            oldest = min(
                (one for client in waiting for one in client.requests if one.items), key=lambda one: one.behind
            )
            if self._taken - oldest.behind > PASSED:
                return next(iter(oldest.items))
        requests = min(waiting, key=lambda client: client.place.key()).requests
        request = min((one for one in requests if one.items), key=lambda one: one.place.key())
        return next(iter(request.items))

    def like(self, task: Task) -> int:
        """Return sentences that wait for equal work."""
        requests = [request for client in self.clients.values() for request in client.requests]
        return sum(item.size for request in requests if request.task == task for item in request.items)

    def take(self, first: Item, limit: int) -> list[Item]:
        """`first` and others for equal work, at most `limit` sentences: one of each client in turn, up to
        `AT_ONCE` of each of its requests in turn, the nearest to `first` in length, which wastes the least padding."""
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
        """Note that a batch has been computed: those it was for are behind all who wait."""
        since = next(self._next)
        for place in _places(batch):
            place.running -= 1
            place.since = since
        for item in batch:
            self._forget(item.request)

    def drop(self, items: Sequence[Item]) -> None:
        """Forget items that still wait."""
        for item in items:
            if item in item.request.items:
                del item.request.items[item]
                self._count(item.request.client, -item.size)
                self._forget(item.request)

    def _in_turn(self, first: Item) -> Iterator[Item]:
        """Return all items for equal work, that of `first` in the first round."""

        def of_client(client: Client) -> Iterator[Item]:
            same = [one for one in client.requests if one.items and one.task == first.request.task]
            same.sort(key=lambda one: one.place.key())
            near = lambda item: (item is not first, abs(item.length - first.length))  # noqa: E731
            return _round_robin([iter(sorted(one.items, key=near)) for one in same], AT_ONCE)

        waiting = sorted((one for one in self.clients.values() if one.size), key=lambda one: one.place.key())
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
    """So many of each, then the next of each, as long as there are some."""
    while sources:
        left = []
        for source in sources:
            some = list(islice(source, at_once))
            yield from some
            if some:
                left.append(source)
        sources = left
