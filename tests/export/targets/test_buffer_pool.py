"""Memory lent to one batch after the other: never to two at once, never more than was needed at one time."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from combined import thinned
from ending_models import POST_NORM, made, rows
from waiting import PATIENCE

from export import OnnxTransformer, export_onnx
from export.targets.cpu import step_graph as buffer_pool
from export.targets.cpu.step_graph import BufferPool


@pytest.fixture(autouse=True)
def pooled_whatever_the_size(monkeypatch):
    monkeypatch.setattr(buffer_pool, "SMALL", 0)


def held(pool):
    pool._settle()
    return pool._lent + sum(buffer.size for buffer in pool._free)


def lent(pool):
    pool._settle()
    return pool._lent


def test_what_is_given_back_is_lent_again():
    pool = BufferPool()
    first = pool.take((4, 6))
    assert first.shape == (4, 6)
    assert first.dtype == np.float32
    address = first.ctypes.data
    pool.give_back([first])
    assert pool.take((3, 5)).ctypes.data == address  # a smaller one, of the same memory


def test_what_is_lent_is_lent_once():
    pool = BufferPool()
    arrays = [pool.take((8,)) for _ in range(5)]
    for i, array in enumerate(arrays):
        array[:] = i
    assert [set(array) for array in arrays] == [{0}, {1}, {2}, {3}, {4}]


def test_the_smallest_that_is_large_enough():
    pool = BufferPool()
    large, small = pool.take((100,)), pool.take((10,))
    addresses = large.ctypes.data, small.ctypes.data
    pool.give_back([large, small])
    assert pool.take((9,)).ctypes.data == addresses[1]
    assert pool.take((9,)).ctypes.data == addresses[0]


def test_it_holds_no_more_than_was_lent_at_one_time():
    pool = BufferPool()
    rng = np.random.default_rng(0)
    most = 0
    for _ in range(200):
        arrays = [pool.take((int(rng.integers(1, 1000)),)) for _ in range(rng.integers(1, 9))]
        most = max(most, lent(pool))
        assert held(pool) <= most
        pool.give_back(arrays)
        assert held(pool) <= most
    assert lent(pool) == 0


def test_from_several_threads():
    pool = BufferPool()

    def use(i):
        for _ in range(300):
            array = pool.take((64,))
            array[:] = i
            assert (array == i).all()
            pool.give_back([array])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(8)))
    assert lent(pool) == 0


def test_given_back_by_a_finalizer_in_the_middle_of_taking(monkeypatch):
    """As the garbage collector may do it: nobody waits for himself."""
    pool = BufferPool()
    first = pool.take((10,))
    trim = pool._trim

    def collected():
        pool.give_back([first])
        trim()

    monkeypatch.setattr(pool, "_trim", collected)
    taking = threading.Thread(target=pool.take, args=[(10,)], daemon=True)
    taking.start()
    taking.join(PATIENCE)
    assert not taking.is_alive()
    assert lent(pool) == 10


@pytest.mark.parametrize("beam", thinned([4, 1], 2))
def test_a_decoder_gives_its_memory_back(tmp_path, beam):
    """Also one that grows, drops rows, or is left in the middle by an error."""
    _, checkpoint = made(tmp_path, **POST_NORM)
    model = OnnxTransformer(export_onnx(checkpoint, tmp_path / "onnx", target="cpu"), threads=1)
    memory = model.graphs.memory
    expected = model.generate(rows(), beam=beam)
    gc.collect()
    assert lent(memory) == 0
    assert held(memory) > 0
    stream = model.stream_ids(rows()[0], min_new_tokens=5)
    next(stream)
    assert lent(memory) > 0
    stream.close()
    gc.collect()
    assert lent(memory) == 0
    for buffer in memory._free:
        buffer[:] = np.nan  # whatever is in it
    assert model.generate(rows(), beam=beam) == expected


def test_small_ones_are_left_to_the_allocator(monkeypatch):
    monkeypatch.setattr(buffer_pool, "SMALL", 10)
    pool = BufferPool()
    pool.give_back([pool.take((3, 3)), pool.take((2, 5))])
    assert held(pool) == 10
