"""Clients and requests take turns, a batch ends when all it is for have left, and the end is told to who waits."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from serving import STREAM, Held, alone, call, client
from waiting import PATIENCE, until

from export.serve.app import App
from export.serve.batching import PASSED, Batcher, EndingError, OverloadError, Turns
from export.serve.calls import ENDING
from mlx_transformer.generation.steps import Stopped


class Calls:
    """Work that waits to be let go; it notes what it was given."""

    def __init__(self):
        self.given, self.go = [], threading.Semaphore(0)

    def __call__(self, payloads, stopped):
        self.given.append("".join(payloads))
        assert self.go.acquire(timeout=PATIENCE)
        return payloads


def order(requests, max_batch=3, late=()):
    """The batches in which requests (client, work, payloads) are taken; those of `late` come while the first runs."""

    async def scene():
        batcher = Batcher(max_batch, 0, 100)
        works, jobs = {}, []
        given = Calls()

        def submit(name, work, payloads):
            work = works.setdefault(work, lambda payloads, stopped: given(payloads, stopped))
            jobs.append(batcher.submit(work, payloads, [1] * len(payloads), client=name))

        for request in requests:
            submit(*request)
        batcher.start()
        while not batcher.running:
            await asyncio.sleep(0.001)
        for request in late:
            submit(*request)
        for _ in range(100):
            given.go.release()
        await asyncio.gather(*map(batcher.results, jobs))
        assert batcher.turns.clients == {}, "nobody is remembered"
        assert batcher.waiting == 0
        await batcher.stop()
        return given.given

    return asyncio.run(asyncio.wait_for(scene(), PATIENCE))


@pytest.mark.parametrize("second", ["b", "a"], ids=["another client", "the same client"])
def test_a_later_request_is_in_the_batch_after_the_running_one(second):
    assert order([("a", 1, "ABCDEFGH")], late=[(second, 2, "x")]) == ["ABC", "x", "DEF", "GH"]
    equal = order([("a", 1, "ABCDEFGH")], late=[(second, 1, "x")])
    assert [len(batch) for batch in equal] == [3, 3, 3]
    assert "x" in equal[1]


def test_no_request_waits_for_ever_behind_neighbours():
    """Both clients ask for the same again and again, so both are in each batch, and neither waits longer."""

    async def scene():
        turns, waited = Turns(), 0
        turns.add("a", "usual", "A", [1], 1, 1)
        [rare] = turns.add("b", "rare", "R", [1], 1, 1)
        while rare in turns:
            turns.add("a", "usual", "A", [1], 1, 1)
            turns.add("b", "usual", "B", [1], 1, 1)
            batch = turns.take(turns.first(), 2)
            turns.done(batch)
            waited += 1
            assert waited <= PASSED + 3
        for item in turns:
            item.future.cancel()
        return waited

    assert asyncio.run(scene()) > 2, "it was passed over"


def test_clients_take_turns_whatever_they_have_sent():
    many = [("a", 1, letter) for letter in "ABCDEF"]
    assert order([*many, ("b", 1, "xy")], max_batch=2) == ["Ax", "By", "CD", "EF"]
    assert order([*many, ("b", 2, "xy"), ("c", 3, "z")], max_batch=2) == ["AB", "xy", "z", "CD", "EF"]


def test_a_request_of_a_few_sentences_is_not_torn_apart():
    """Two of five, as no batch holds both: one is answered after the first. A long one gives way after eight."""
    assert order([("a", 1, "ABCDE"), ("a", 1, "vwxyz")], max_batch=6) == ["ABCDEv", "wxyz"]
    assert order([("a", 1, "ABCDEFGHIJKLMNOP"), ("a", 1, "xyz")], max_batch=12) == ["ABCDEFGHxyzI", "JKLMNOP"]


def test_wide_searches_come_in_small_batches():
    """A batch of 8 sentences has 32 hypotheses at most, and one sentence at least."""

    async def scene(width):
        given, batcher = Calls(), Batcher(8, 0, 100)
        items = batcher.submit(given, "ABCDEFGH", [1] * 8, width=width)
        batcher.start()
        for _ in range(8):
            given.go.release()
        await batcher.results(items)
        await batcher.stop()
        return [len(batch) for batch in given.given]

    sizes = {width: asyncio.run(asyncio.wait_for(scene(width), PATIENCE)) for width in (1, 4, 16, 64)}
    assert sizes == {1: [8], 4: [8], 16: [2] * 4, 64: [1] * 8}


def test_one_client_does_not_fill_the_queue():
    async def scene():
        batcher = Batcher(4, 0, 8)
        batcher.submit(Calls(), "ABCDEF", [1] * 6, client="a")
        with pytest.raises(OverloadError, match="6 of your sentences are waiting; try again in 1 s"):
            batcher.submit(Calls(), "G", [1], client="a")
        items = batcher.submit(Calls(), "xy", [1] * 2, client="b")
        with pytest.raises(OverloadError, match="8 sentences are waiting already"):
            batcher.submit(Calls(), "z", [1], client="c")
        batcher.drop(items)
        assert batcher.waiting == 6
        assert len(batcher.submit(Calls(), "z", [1], client="c")) == 1
        await batcher.stop()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))


class Endless(Held):
    """A model that searches until nobody waits for it."""

    def __init__(self, model):
        super().__init__(model)
        self.ended = threading.Event()

    def generate(self, ids, share, **options):
        self.calls.append(len(ids))
        for _ in range(round(PATIENCE / 0.005)):
            if share.stopped():
                self.ended.set()
                raise Stopped
            if self.go.wait(0.005):
                return self.model.generate(ids, share=share, **options)
        raise AssertionError("nobody left")

    def stream(self, line, **options):
        while not self.go.is_set():
            yield "."


def scene_of(model, play, **settings):
    app = App(lambda: alone(model), Batcher(**{"max_batch": 4, "max_wait": 0, "max_queue": 16, **settings}))

    async def scene():
        async with app.lifespan(app.asgi):
            while app.shared.loaded is None:
                await asyncio.sleep(0.005)
            await play(app)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))


async def becomes(condition):
    while not condition():
        await asyncio.sleep(0.002)


def test_a_batch_ends_when_all_its_clients_have_left(text_model):
    endless = Endless(text_model)

    async def play(app):
        gone = [asyncio.Event(), asyncio.Event()]
        app.batcher.neighbours = 2  # so that the first waits for the second
        leaving = [asyncio.create_task(call(app.asgi, "/translate", {"text": "one"}, event)) for event in gone]
        await becomes(lambda: app.batcher.running == 2)
        gone[0].set()
        await leaving[0]
        await asyncio.sleep(0.05)
        assert not endless.ended.is_set(), "the other one waits for it"
        gone[1].set()
        await leaving[1]
        await becomes(endless.ended.is_set)
        await becomes(lambda: app.batcher.running == 0)
        app.batcher.max_wait = 0
        endless.go.set()
        assert (await call(app.asgi, "/translate", {"text": "one"}))[0] == 200

    scene_of(endless, play, max_wait=3600)
    assert endless.calls == [2, 1]


def test_a_stream_ends_when_its_client_has_left(text_model):
    endless = Endless(text_model)

    async def play(app):
        gone = asyncio.Event()
        leaving = asyncio.create_task(call(app.asgi, STREAM, {"text": "x"}, gone))
        await becomes(lambda: app.batcher.running == 1)
        gone.set()
        await leaving
        await becomes(lambda: app.batcher.running == 0)

    scene_of(endless, play)
    assert not endless.go.is_set()


def test_who_waits_is_told_of_the_end(text_model):
    """A second signal: a running request, a waiting one and a stream are answered; no new one is taken."""
    endless = Endless(text_model)

    async def play(app):
        running = asyncio.create_task(call(app.asgi, "/translate", {"text": "x"}))
        await becomes(lambda: app.batcher.running == 1)
        waiting = [asyncio.create_task(call(app.asgi, path, {"text": "one"})) for path in ("/translate", STREAM)]
        await becomes(lambda: app.batcher.waiting == 2)
        app.batcher.give_up()
        told = json.dumps({"error": ENDING}, separators=(",", ":")).encode()
        assert await running == (503, told)
        assert [await answer for answer in waiting] == [(503, told)] * 2
        assert await call(app.asgi, "/translate", {"text": "x"}) == (503, told)
        await becomes(endless.ended.is_set)
        with pytest.raises(EndingError):
            app.batcher.submit(Calls(), "x", [1])

    scene_of(endless, play)


def test_sampled_sentences_share_batches(text_model):
    """Drawn tokens depend on a sentence's place in its request, not on who is computed with it."""
    held = Held(text_model)
    settings = {"sample": True, "seed": 3, "min_new_tokens": 4, "max_new_tokens": 8}
    texts = [["one", "two", "three"], ["x", "one"], ["two"]]
    with client(held, max_batch=8) as (http_, app):
        first = [threading.Thread(target=http_.post, args=("/translate",), kwargs={"json": {"text": "x"}})]
        first[0].start()
        until(lambda: app.batcher.running == 1)
        found = {}

        def ask(i):
            answer = http_.post("/translate", json={"text": texts[i], **settings})
            found[i] = answer.json()["translations"]

        rest = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
        for thread in rest:
            thread.start()
        until(lambda: app.batcher.waiting == 6)
        held.go.set()
        for thread in first + rest:
            thread.join()
    assert held.calls == [1, 6]
    assert [found[i] for i in range(3)] == [text_model.translate(text, **settings) for text in texts]
