"""One text whose pieces are handed out while a thread of the server computes them, as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_transformer.generation.steps import Stopped

from .batching import Batcher
from .turns import Item

EVENTS = "text/event-stream"
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(eq=False)
class StreamTask:
    """Work on one stream of text: begins it and hands over each piece; its output is as bounded as a translation is."""

    give: Callable[[str], Any]

    def __call__(self, payloads: list[Callable[[], Iterator[str]]], stopped: Callable[[], bool]) -> list[None]:
        for begin in payloads:
            for piece in begin():  # in the thread that computes, for MLX's streams are each of one thread
                if stopped():
                    raise Stopped
                self.give(piece)
        return [None] * len(payloads)


async def streamed(
    batcher: Batcher,
    begin: Callable[[], Iterator[str]],
    *,
    length: int,
    size: int,
    client: Hashable,
    done: Callable[[], None],
) -> AsyncIterator[str]:
    """Return the pieces, once it is their turn and the first is there: what fails before that is raised here.

    length, size: as `Batcher.submit` has them. done: called after the last.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[str | None]()
    work = StreamTask(partial(loop.call_soon_threadsafe, queue.put_nowait))
    [item] = batcher.submit(work, [begin], [length], size, client)
    item.future.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        first = await queue.get()
        if first is None:
            await item.future
    except BaseException:
        batcher.drop([item])
        raise
    return _pieces(batcher, item, queue, first, done)


async def _pieces(
    batcher: Batcher, item: Item, queue: asyncio.Queue[str | None], piece: str | None, done: Callable[[], None]
) -> AsyncIterator[str]:
    try:
        while piece is not None:
            yield piece
            piece = await queue.get()
        await item.future
        done()
    finally:
        batcher.drop([item])


def event(data: Any, kind: str | None = None) -> str:
    """Write one event."""
    return (f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
