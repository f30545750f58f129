"""The queue: equal work together, clients and requests in turn, bounds that hold, nothing computed for who left."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from combined import thinned
from serving import LINES, STREAM, Held, alone, call, check_mixed_requests, client
from waiting import PATIENCE, until

from export import OnnxTransformer, export_onnx
from export.serve.app import App
from export.serve.batching import PASSED, Batcher, EndingError, OverloadError, Turns
from export.serve.calls import ENDING, event
from mlx_transformer.decoding.steps import Stopped
from mlx_transformer.system.errors import UserError


def test_many_clients_share_batches(text_model):
    """Requests of three kinds at once: each gets its own answer, from the fewest batches that the first two leave."""
    requests = [({"text": LINES[i % len(LINES)]}, [{}, {"beam": 2}, {"max_new_tokens": 4}][i % 3]) for i in range(48)]
    full = [r["text"] for r, _ in requests if r["text"]]
    held = Held(text_model)
    with client(held, workers=2) as (http_, app), ThreadPoolExecutor(len(requests)) as pool:
        pending = [pool.submit(http_.post, "/translate", json={**text, **options}) for text, options in requests]
        until(lambda: len(held.calls) == 2)  # both workers have begun, with what was there
        until(lambda: app.batcher.waiting == len(full) - app.batcher.running)
        held.go.set()
        answers = [one.result().json() for one in pending]
        metrics = http_.get("/metrics").text
        assert app.batcher.waiting == 0
        assert list(app.batcher.turns) == []
    assert [a["translations"][0] for a in answers] == [text_model.translate([r["text"]], **o)[0] for r, o in requests]
    assert 'mlx_transformer_requests_total{path="/translate",status="200"} 48.0' in metrics
    assert "mlx_transformer_sentences_total 48.0" in metrics
    sentences = float(re.search(r"^mlx_transformer_batch_sentences_sum (.*)", metrics, re.M)[1])
    batches = float(re.search(r"^mlx_transformer_batch_sentences_count (.*)", metrics, re.M)[1])
    assert sentences == len(full) == 40  # without the empty lines
    assert batches <= 7  # two, then at most 16, 8 and 16 of a kind by eights


def test_threads_outlast_the_queue():
    """A thread that MLX has used must not end while the interpreter does; see `LastingThreads`."""
    done: list[str] = []

    async def served():
        batcher = Batcher(2, 0, 8)
        batcher.start()
        thread = await asyncio.get_running_loop().run_in_executor(batcher.pool, threading.current_thread)
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().run_in_executor(batcher.pool, lambda: 1 / 0)
        batcher.pool.submit(time.sleep, 0.05)
        batcher.pool.submit(done.append, "the last call")
        await batcher.stop()
        return thread

    thread = asyncio.run(served())
    assert done == ["the last call"]  # what was submitted has ended
    assert thread.is_alive()
    assert thread.daemon  # the process waits for none


def test_full_queue_and_disconnect(text_model):
    """One batch runs, the queue fills, the next request is told to come back; who leaves is never computed."""
    held = Held(text_model)
    with client(held, max_batch=2, max_queue=5) as (http_, app), ThreadPoolExecutor(8) as pool:
        first = pool.submit(http_.post, "/translate", json={"text": ["x", "one"]})
        until(lambda: app.batcher.running == 2)
        second = pool.submit(http_.post, "/translate", json={"text": ["x", "two", "three", "one"]})
        until(lambda: app.batcher.waiting == 4)
        for path in ("/translate", "/translate/stream"):
            answer = http_.post(path, json={"text": "x"})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert "try again" in answer.json()["error"]
        assert http_.get("/health").json() == {"status": "ready", "waiting": 4, "running": 2}
        held.go.set()
        assert first.result().json()["translations"] == text_model.translate(["x", "one"])
        assert second.result().json()["translations"] == text_model.translate(["x", "two", "three", "one"])
        assert http_.get("/health").json() == {"status": "ready", "waiting": 0, "running": 0}
    assert held.calls[0] == 2
    assert "x" not in held.calls
    assert max(c for c in held.calls if isinstance(c, int)) == 2, "max_batch"


def test_who_leaves_is_never_computed(text_model):
    held = Held(text_model)
    app = App(lambda: alone(held), Batcher(1, 0, 8))

    async def scene():
        async with app.lifespan(app.asgi):
            while app.shared.loaded is None:
                await asyncio.sleep(0.005)
            running = asyncio.create_task(call(app.asgi, "/translate", {"text": "x"}))
            while not app.batcher.running:
                await asyncio.sleep(0.005)
            gone = asyncio.Event()
            leaving = [asyncio.create_task(call(app.asgi, "/translate", {"text": "one"}, gone)) for _ in range(2)]
            while app.batcher.waiting != 2:
                await asyncio.sleep(0.005)
            gone.set()
            await asyncio.gather(*leaving)
            assert app.batcher.waiting == 0
            assert list(app.batcher.turns) == []
            held.go.set()
            assert (await running)[0] == 200

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))
    assert [c for c in held.calls if isinstance(c, int)] == [1], "only the first was searched"
    assert "mlx_transformer_dropped_requests_total 2.0" in app.metrics.text().decode()


def test_batches():
    """Equal work together, at most max_batch, the first with its nearest in length, and nobody waits forever."""
    calls = []

    def work(payloads, stopped):
        calls.append(payloads)
        return [-p for p in payloads]

    def other(payloads, stopped):
        return work(payloads, stopped)

    async def scene():
        batcher = Batcher(3, 0.01, 100)
        lengths = [5, 90, 6, 50, 4, 91, 5]
        jobs = [batcher.submit(work, lengths, lengths), batcher.submit(other, [7], [7])]
        batcher.start()
        results = [await batcher.results(job) for job in jobs]
        assert results == [[-n for n in lengths], [-7]]
        assert calls == [[5, 5, 6], [7], [90, 91, 50], [4]], "the other request is not behind all of the first"
        await batcher.stop()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))


def test_waiting_for_neighbours():
    """After two together one waits for a second, max_wait at most; after one alone it waits for nobody."""
    calls = []

    def work(payloads, stopped):
        calls.append(payloads)
        return payloads

    async def scene():
        batcher = Batcher(8, 3600, 100)
        batcher.start()
        await batcher.results(batcher.submit(work, [1, 2], [1, 1]))
        third = batcher.submit(work, [3], [1])
        await asyncio.sleep(0.02)  # it could begin now
        assert await batcher.results([*third, *batcher.submit(work, [4], [1])]) == [3, 4]
        batcher.max_wait, began = 0.05, time.monotonic()
        await batcher.results(batcher.submit(work, [5], [1]))
        assert time.monotonic() - began >= 0.05
        batcher.max_wait = 3600
        await batcher.results(batcher.submit(work, [6], [1]))
        assert calls == [[1, 2], [3, 4], [5], [6]]
        await batcher.stop()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))


def test_one_bad_item_spoils_no_other():
    def work(payloads, stopped):
        if 13 in payloads:
            raise UserError("thirteen")
        return payloads

    async def scene():
        batcher = Batcher(8, 0.01, 10)
        batcher.start()
        jobs = [batcher.submit(work, [n], [n]) for n in (1, 13, 2)]
        found = await asyncio.gather(*map(batcher.results, jobs), return_exceptions=True)
        assert found[0] == [1]
        assert found[2] == [2]
        assert str(found[1]) == "thirteen"
        left = [*batcher.submit(work, list(range(8)), [1] * 8), *batcher.submit(work, [8, 9], [1] * 2, client="b")]
        with pytest.raises(OverloadError, match="10 sentences are waiting"):
            batcher.submit(work, [1], [1])
        await batcher.stop()
        assert all(item.future.cancelled() for item in left)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))


@pytest.mark.parametrize("precision", thinned(["int8", "int4"], 2))
def test_neighbours_change_no_answer(text_folder, tmp_path, precision):
    """int8 is computed in batches, a scale a row; int4, whose products hang on the number of rows, one by one."""
    export_onnx(text_folder / "model", tmp_path / "onnx", precision=precision, target="cpu", force=True)
    model = OnnxTransformer(tmp_path / "onnx", threads=1)
    assert model.depends_on_batch == (precision == "int4")
    check_mixed_requests(model, count=24, clients=8)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "int8", "int8-weights"])
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_neighbours_change_none_of_many_answers(text_folder, tmp_path, target, precision):
    export_onnx(text_folder / "model", tmp_path / "onnx", precision=precision, target=target, force=True)
    check_mixed_requests(OnnxTransformer(tmp_path / "onnx", threads=1), count=666, clients=50)


def test_rows_that_depend_on_their_batch_are_searched_one_by_one(text_model):
    for depends, calls in ((True, [1, 1]), (False, [2])):
        held = Held(text_model, depends)
        held.go.set()
        with client(held) as (http_, _):
            http_.post("/translate", json={"text": ["one", "two"]})
        assert held.calls == calls


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
        while not self.go.wait(0.005):
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
        paths = ("/translate", STREAM, STREAM)
        others = [asyncio.create_task(call(app.asgi, path, {"text": "one"})) for path in paths]
        await becomes(lambda: (app.batcher.waiting, app.batcher.running) == (2, 2))
        app.batcher.give_up()
        told = json.dumps({"error": ENDING}, separators=(",", ":")).encode()
        assert await running == (503, told)
        for answer in others:  # a stream that has begun ends with the error
            status, body = await answer
            assert (status, body) == (503, told) or body.endswith(event({"error": ENDING}, "error").encode())
        assert await call(app.asgi, "/translate", {"text": "x"}) == (503, told)
        await becomes(endless.ended.is_set)
        with pytest.raises(EndingError):
            app.batcher.submit(Calls(), "x", [1])

    scene_of(endless, play, max_batch=1)


def test_streams_and_batches_wait_for_no_end_but_of_their_kind(text_model):
    """With one thread: a stream runs beside another and beside a batch that don't end, and a batch beside a stream; but
    no more streams than max_batch."""
    endless = Endless(text_model)

    class Mixed(Endless):
        def stream(self, line, **options):
            return endless.stream(line) if line == "two" else self.model.stream(line, **options)

    mixed, gone = Mixed(text_model), [asyncio.Event() for _ in range(3)]
    whole = event({"text": text_model.translate("one")}, "done").encode()

    async def play(app):
        ask = lambda path, text, gone=None: call(app.asgi, path, {"text": text}, gone)  # noqa: E731
        first = asyncio.create_task(ask(STREAM, "two", gone[0]))
        await becomes(lambda: app.batcher.running == 1)
        assert (await ask(STREAM, "one"))[1].endswith(whole)
        batch = asyncio.create_task(ask("/translate", "one"))
        await becomes(lambda: mixed.calls == [1])
        assert (await ask(STREAM, "one"))[1].endswith(whole)
        mixed.go.set()
        assert json.loads((await batch)[1]) == {"translations": [text_model.translate("one")]}
        second = asyncio.create_task(ask(STREAM, "two", gone[1]))
        await becomes(lambda: app.batcher.running == 2)
        third = asyncio.create_task(ask(STREAM, "one"))
        await becomes(lambda: app.batcher.waiting == 1)
        gone[0].set()
        await first
        assert (await third)[1].endswith(whole)
        gone[1].set()
        await second
        await becomes(lambda: app.batcher.running == 0)

    scene_of(mixed, play, max_batch=2)


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
