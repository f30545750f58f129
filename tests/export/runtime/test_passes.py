"""Passes side by side: as many as a session has threads, each whole on one of them, and with the same bits."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from head_models import head_model
from random_models import write_model
from small_models import alone

from export import OnnxTransformer, export_onnx
from export.runtime import sessions as opening
from export.runtime import transformer as runtime_passes
from export.runtime.sessions import Session, run_aside
from export.runtime.transformer import SideBySide
from mlx_transformer.core.inputs import ONE_AT_A_TIME
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.system.errors import UserError

SOON = 30
"""Seconds that nothing here takes unless it waits for ever."""
RNG = np.random.default_rng(4)
ROWS = [RNG.integers(3, 50, n).tolist() for n in (60, 40, 33, 64, 9, 2, 51, 17, 64, 28)]
PACKAGES: dict[str, dict[str, Any]] = {
    "portable": {},
    "cpu": {"target": "cpu"},
    "int8": {"target": "cpu", "precision": "int8", "int8_scales": "token"},
}


@pytest.fixture(scope="module", params=PACKAGES)
def folder(request, tmp_path_factory) -> Path:
    made = {"embedding": TextEmbedding(normalize=True), "accept_loss": True, **PACKAGES[request.param]}
    return write_model(
        replace(alone("paper", "encoder"), max_positions=64), tmp_path_factory.mktemp("passes"), 3, **made
    )[1]


@pytest.fixture
def asides(monkeypatch) -> list[str]:
    """The files of the runs that were computed on a thread of their session."""
    begun: list[str] = []
    run_async = Session.run_async

    def counted(self: Session, *arguments: Any) -> None:
        begun.append(Path(self.file).stem)
        run_async(self, *arguments)

    monkeypatch.setattr(Session, "run_async", counted)
    return begun


def vectors(model: OnnxTransformer, rows: list[list[int]] = ROWS) -> np.ndarray:
    model.tokenizer = None
    return model.embedder().vectors(rows, of_text=False)


@pytest.mark.parametrize("threads", [2, 3])
def test_vectors_have_the_bits_of_one_thread(folder: Path, threads: int, asides: list[str], monkeypatch) -> None:
    opened = []
    plain = opening.open_session
    monkeypatch.setattr(opening, "open_session", lambda *a, **o: opened.append(a) or plain(*a, **o))
    model = OnnxTransformer(folder, threads=threads)
    several = vectors(model)
    assert asides
    assert len(opened) == 1, "the weights are in memory once"
    asides.clear()
    np.testing.assert_array_equal(np.stack([vectors(model, [row])[0] for row in ROWS]), several)
    np.testing.assert_array_equal(vectors(OnnxTransformer(folder, threads=1)), several)
    assert not asides, "a text alone shares its products among all threads"


def test_what_a_head_says_too(tmp_path: Path, asides: list[str]) -> None:
    folder = export_onnx(head_model("bert-classes", tmp_path / "model"), tmp_path / "onnx")
    texts = ["good", "bad film", "not", ("so", "it"), "film is", "a good film", "it was so bad"]
    found = OnnxTransformer(folder, threads=2).classify(texts)
    assert asides
    asides.clear()
    assert OnnxTransformer(folder, threads=1).classify(texts) == found
    assert not asides


def test_several_callers_at_once(folder: Path) -> None:
    """Who finds the threads busy with another's passes computes all of its own."""
    model, found = OnnxTransformer(folder, threads=2), {}
    expected = vectors(model)

    def call(i: int) -> None:
        found[i] = [vectors(model, ROWS[i:]) for _ in range(5)]

    callers = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(6)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(SOON)
    assert sorted(found) == [*range(6)]
    for i, several in found.items():
        for each in several:
            np.testing.assert_array_equal(each, expected[i:])


def in_another_thread(compute: Callable[[], Any]) -> Any:
    """Return what it gives in a thread whose runs are computed aside, or the exception."""
    found = []

    def go() -> None:
        run_aside()
        try:
            found.append(compute())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(SOON)
    return found[0]


def test_a_run_aside_fails_with_the_same_words(folder: Path, asides: list[str]) -> None:
    model = OnnxTransformer(folder, threads=2)
    ids = np.full((1, 4), 10**6)
    message = (
        rf"{folder}.*\.onnx: ONNX Runtime can't run it \(.*indices element out of data bounds.*export the model again"
    )
    run = lambda: model.graphs.encode({"source_ids": ids}, np.ones_like(ids))  # noqa: E731
    with pytest.raises(UserError, match=message):
        run()
    assert not asides
    error = in_another_thread(run)
    assert asides
    with pytest.raises(UserError, match=message):
        raise error


def test_a_session_of_one_thread_has_none_to_give(folder: Path) -> None:
    """As where ONNX Runtime takes the machine's cores, and there is one."""
    model = OnnxTransformer(folder, threads=1)
    assert model.passes is ONE_AT_A_TIME
    expected = vectors(model)
    model.passes = SideBySide(2)
    np.testing.assert_array_equal(vectors(model), expected)


def test_a_run_is_over_when_the_session_s_thread_is_out_of_python(folder: Path, monkeypatch) -> None:
    """Whoever closes the session then waits for no thread that waits for Python's lock."""
    run_async, left = Session.run_async, []

    def slow(self: Session, names: Any, feeds: Any, keep: Any, *others: Any) -> None:
        def still_there(*arguments: Any) -> None:
            keep(*arguments)
            time.sleep(0.2)
            left.append(True)

        run_async(self, names, feeds, still_there, *others)

    monkeypatch.setattr(Session, "run_async", slow)
    model, ids = OnnxTransformer(folder, threads=2), np.full((1, 4), 7)
    assert in_another_thread(lambda: model.encode(ids)).shape == (1, 4, model.config.d_model)
    assert left == [True]


@pytest.mark.fast("cpu")
def test_a_model_may_go_as_soon_as_it_has_answered(folder: Path) -> None:
    for _ in range(20):
        several = vectors(OnnxTransformer(folder, threads=2, verify=False))
        gc.collect()
        assert np.isfinite(several).all()


class Watched:
    """`compute` for `in_parallel`: which ran, how many at the same time, and on which thread."""

    def __init__(self, wait: Callable[[int], object] = lambda i: None):
        self.wait, self.lock = wait, threading.Lock()
        self.running = self.most = 0
        self.begun: list[int] = []
        self.by: dict[int, int] = {}

    def __call__(self, i: int) -> int:
        with self.lock:
            self.begun.append(i)
            self.by[i] = threading.get_ident()
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            self.wait(i)
        finally:
            with self.lock:
                self.running -= 1
        return i


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 40])
def test_each_pass_is_computed_once(threads: int, count: int) -> None:
    compute = Watched()
    assert sorted(SideBySide(threads).in_parallel(compute, range(count))) == [*range(count)]
    assert sorted(compute.begun) == [*range(count)]


@pytest.mark.parametrize("threads", [2, 3])
def test_as_many_as_threads_run_at_the_same_time(threads: int) -> None:
    together = threading.Barrier(threads, timeout=SOON)  # one after the other they would wait in vain
    compute = Watched(lambda i: i >= threads or together.wait())
    assert sorted(SideBySide(threads).in_parallel(compute, [0, *range(threads, 20), *range(1, threads)])) == [
        *range(20)
    ]
    assert compute.most == threads


def test_the_longest_and_the_last_are_the_caller_s(monkeypatch) -> None:
    """Whom the other threads help when they have none of their own."""
    begun, others_done = threading.Event(), threading.Event()
    monkeypatch.setattr(runtime_passes, "perf_counter", lambda: 0.0)

    def wait(i: int) -> None:
        if i == 0:
            begun.set()
            assert others_done.wait(SOON)
        assert begun.wait(SOON)
        if i == 2:
            others_done.set()

    compute = Watched(wait)
    assert sorted(SideBySide(2).in_parallel(compute, range(5))) == [*range(5)]
    mine = threading.get_ident()
    assert [i for i in range(5) if compute.by[i] == mine] == [0, 1]


@pytest.mark.parametrize(("seconds", "shared"), [(1, False), (9, True)])
def test_the_last_is_computed_aside_if_the_caller_has_just_begun(seconds: float, shared: bool, monkeypatch) -> None:
    now, begun = [0.0], {i: threading.Event() for i in range(4)}
    monkeypatch.setattr(runtime_passes, "perf_counter", lambda: now[0])

    def wait(i: int) -> None:
        begun[i].set()
        if i == 0:
            assert begun[3].wait(SOON)
            now[0] = 10  # the caller's second pass begins
        if i == 1:
            now[0] += seconds
            ready.set()
            assert begun[2].wait(0.2 if shared else SOON) != shared
        if i == 3:
            assert ready.wait(SOON)

    ready, compute = threading.Event(), Watched(wait)
    assert sorted(SideBySide(2).in_parallel(compute, range(4))) == [*range(4)]
    assert (compute.by[2] == threading.get_ident()) == shared


def test_an_error_aside_is_the_caller_s_and_no_other_pass_begins() -> None:
    failed = threading.Event()

    def wait(i: int) -> None:
        if i == 9:
            failed.set()
            raise UserError("no")
        assert failed.wait(SOON)
        time.sleep(0.05)  # the other thread says that it failed after it has

    compute = Watched(wait)
    with pytest.raises(UserError, match="no"):
        list(SideBySide(2).in_parallel(compute, range(10)))
    assert set(compute.begun) <= {0, 1, 9}


@pytest.mark.parametrize("error", [UserError("no"), KeyboardInterrupt()])
def test_an_error_of_the_caller_s_waits_for_those_that_run(error: BaseException) -> None:
    begun = threading.Event()

    def wait(i: int) -> None:
        if i == 0:
            assert begun.wait(SOON)
            raise error
        begun.set()
        time.sleep(0.1)

    compute = Watched(wait)
    with pytest.raises(type(error)):
        list(SideBySide(2).in_parallel(compute, range(10)))
    assert compute.running == 0
    assert len(compute.begun) < 5


def test_who_takes_no_more_results_ends_the_passes() -> None:
    compute = Watched(lambda i: time.sleep(0.02))
    results: Iterator[int] = SideBySide(2).in_parallel(compute, range(100))
    next(results)
    del results
    begun = len(compute.begun)
    assert compute.running == 0
    time.sleep(0.1)
    assert len(compute.begun) == begun < 20


def test_a_call_does_not_wait_for_another_s_passes() -> None:
    passes, first, released = SideBySide(2), threading.Event(), threading.Event()

    def held(i: int) -> int:
        first.set()
        assert released.wait(SOON)
        return i

    other = threading.Thread(target=lambda: [*passes.in_parallel(held, range(4))], daemon=True)
    other.start()
    assert first.wait(SOON)
    time.sleep(0.05)  # for the pool's one thread to have a pass too
    assert sorted(passes.in_parallel(lambda i: i, range(6))) == [*range(6)]
    released.set()
    other.join(SOON)
    assert not other.is_alive()
