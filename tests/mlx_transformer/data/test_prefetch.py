"""Batches made ahead: the same, in order; errors and ends arrive where they belong; no thread is left."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from waiting import PATIENCE, until

from mlx_transformer.data import batches as prefetch
from mlx_transformer.data.batches import AHEAD, prefetched
from mlx_transformer.system.errors import UserError


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine may not come back to a thread that ends for a second."""
    monkeypatch.setattr(prefetch, "SECONDS", PATIENCE)


def test_the_same_items_in_order_and_no_thread_left():
    with prefetched(iter(range(50))) as items:
        assert list(items) == list(range(50))
        with pytest.raises(StopIteration):
            next(items)
    assert not threads()


def test_items_are_made_ahead_and_no_more_than_a_few():
    made = []

    def items():
        for i in itertools.count():
            made.append((i, threading.current_thread().name))
            yield i

    with prefetched(items()) as ahead:
        assert next(ahead) == 0
        until(lambda: len(made) == AHEAD + 2)  # one is out, one waits for room
        time.sleep(0.05)
        assert len(made) == AHEAD + 2
    assert {name for _, name in made} == {"batches"}
    assert not threads()


def test_an_error_comes_where_its_item_would_have_been():
    def items():
        yield 1
        yield 2
        raise UserError("the file has become shorter")

    with prefetched(items()) as ahead:
        assert (next(ahead), next(ahead)) == (1, 2)
        for _ in range(2):
            with pytest.raises(UserError, match="become shorter"):
                next(ahead)
    assert not threads()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_error_in_the_block_ends_the_thread(error):
    def work(items):
        raise error if next(items) == 1 else AssertionError

    with pytest.raises(error), prefetched(itertools.count(1)) as ahead:
        work(ahead)
    assert not threads()


def test_an_item_that_takes_long_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(prefetch, "SECONDS", 0.05)
    go_on = threading.Event()

    def items():
        assert go_on.wait(PATIENCE)
        yield 1

    with prefetched(items()):
        pass
    assert threads(), "the item is still being made"
    go_on.set()
    until(lambda: not threads())
