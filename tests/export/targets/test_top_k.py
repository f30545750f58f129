"""The k largest of a row by blocks: what a stable sort finds, equal values and all."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from combined import thinned
from ending_models import POST_NORM, made

from export.graph.builder import GraphBuilder
from export.search import SearchModel, export_search
from export.targets.cpu.graphs import MANY, block_size, largest, top_k

WIDTHS = [100, MANY, 16640, 37000, 58101, 32003]


def session(width, make):
    g = GraphBuilder("top_k")
    x = g.input("x", "rows", width)
    for name, (value, dtype) in make(g, x).items():
        g.output(name, value, "rows", "found", type=dtype)
    return ort.InferenceSession(ir.to_proto(g.model()).SerializeToString(), providers=["CPUExecutionProvider"])


def rows(width, ties):
    """Random values; with ties of so few kinds that each is there hundreds of times."""
    rng = np.random.default_rng(width)
    x = rng.standard_normal((7, width), np.float32)
    return np.round(x * 2) if ties else x


def best(width):
    """A session that takes x and count."""

    def make(g, x):
        values, places = top_k(g.op, x, g.builder.input("count", ir.DataType.INT64, [1]), width)
        return {"values": (values, ir.DataType.FLOAT), "places": (places, ir.DataType.INT64)}

    return session(width, make)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_stable_sort_s_first(width, ties):
    of, x = best(width), rows(width, ties)
    for count in (1, 11, 99):
        values, places = of.run(None, {"x": x, "count": np.array([count])})
        expected = np.argsort(-x, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(places, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis=1))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_but_what_is_banned(width, ties):
    def make(g, x):
        return {"places": (largest(g.op, x, g.input("bans", width), 3, width), ir.DataType.INT64)}

    of = session(width, make)
    x = rows(width, ties)
    for row in x:
        bans = np.zeros(width, np.float32)
        bans[np.argsort(-row, kind="stable")[:3]] = -1e9  # the worst case: the three that would have been first
        (places,) = of.run(None, {"x": x, "bans": bans})
        np.testing.assert_array_equal(places[:, 0], np.argmax(x + bans, axis=1))


def test_more_than_there_are_blocks():
    width = 16640
    count = width // block_size(width) + 9
    x = rows(width, ties=False)
    places = best(width).run(["places"], {"x": x, "count": np.array([count])})[0]
    np.testing.assert_array_equal(places, np.argsort(-x, axis=1, kind="stable")[:, :count])


def test_what_is_no_number_stays_none():
    """Of a row's log-probabilities all or none are numbers."""
    width = 37000
    x = rows(width, ties=False)
    x[2] = np.nan
    values = best(width).run(["values"], {"x": x, "count": np.array([4])})[0]
    assert np.isnan(values[2]).all()
    assert np.isfinite(np.delete(values, 2, axis=0)).all()


def test_blocks_are_only_where_they_help():
    assert block_size(MANY - 1) is None
    assert block_size(32003) is None  # a prime
    assert [block_size(width) for width in (32000, 37000, 58101)] == [64, 74, 107]


@pytest.mark.slow
@pytest.mark.parametrize("target", thinned(["cpu", "portable"], 2))
def test_in_a_search_graph(tmp_path, target):
    model, checkpoint = made(tmp_path, **POST_NORM, vocab_size=16640)
    graph = SearchModel(export_search(checkpoint, tmp_path / "search.onnx", target=target), threads=1)
    sources = [[5, 7, 16000, 2], [9, 2]]
    for options in ({}, {"beam": 4, "n_best": 4, "max_new_tokens": 9}, {"beam": 140, "max_new_tokens": 2}):
        results, expected = (x.search(sources, **options) for x in (graph, model))
        assert [[h.ids for h in row] for row in results] == [[h.ids for h in row] for row in expected]
