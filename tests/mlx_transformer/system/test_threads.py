"""Calls side by side: results in their order, no more at once than allowed, the first error in the order of calls."""

from __future__ import annotations

import signal
import sys
import threading
import time
from functools import partial

import pytest
from waiting import PATIENCE

from mlx_transformer.system.machine import side_by_side


def test_results_are_in_the_order_of_the_calls_and_no_thread_is_left():
    before = threading.active_count()
    first, second = threading.Event(), threading.Event()

    def slow() -> str:
        second.set()
        assert first.wait(PATIENCE)
        return "slow"

    def fast() -> str:
        assert second.wait(PATIENCE)
        first.set()
        return "fast"

    assert side_by_side([slow, fast, str], 2) == ["slow", "fast", ""]
    assert threading.active_count() == before


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_so_many_at_a_time_and_no_more(at_once: int):
    together, most, running, lock = threading.Barrier(at_once), 0, 0, threading.Lock()

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(PATIENCE)  # fails unless so many are at it
        with lock:
            running -= 1

    side_by_side([call] * (4 * at_once), at_once)
    assert most == at_once


def test_one_at_a_time_is_the_callers_thread():
    assert side_by_side([threading.current_thread] * 3, 1) == [threading.current_thread()] * 3
    assert side_by_side([], 5) == []


@pytest.mark.parametrize("at_once", [1, 2])
def test_all_are_made_and_then_the_first_error_in_their_order_is_raised(at_once: int):
    made = []

    def call(number: int) -> None:
        made.append(number)
        if number % 2:
            raise ValueError(f"number {number}")

    with pytest.raises(ValueError, match="number 1"):
        side_by_side([partial(call, number) for number in range(6)], at_once)
    assert sorted(made) == [0, 1, 2, 3, 4, 5]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_waits_for_what_runs():
    """What a library computes on a thread can't be left behind by a process that ends."""
    main, begun, done = threading.main_thread(), threading.Event(), list[bool]()
    assert threading.current_thread() is main

    def call() -> None:
        if threading.current_thread() is main:
            assert begun.wait(PATIENCE)
            return
        begun.set()
        time.sleep(0.05)  # until the caller waits
        signal.pthread_kill(main.ident or 0, signal.SIGINT)
        time.sleep(0.1)
        done.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            side_by_side([call, call], 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [True]
