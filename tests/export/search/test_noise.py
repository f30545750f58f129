"""The noise of sampling: the published numbers of Philox, the same in a graph as on the host, and what a draw by blocks
makes of it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from export.graph.builder import GraphBuilder
from export.search import sampling as in_graph
from export.validate.reference.search import drawn
from mlx_transformer.decoding.arrays import NumpyArrays
from mlx_transformer.decoding.greedy import BLOCK, draw, gumbel, noise, philox

KNOWN = [  # Random123's kat_vectors: counter, key, result
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def run(g: GraphBuilder, outputs: list[ir.Value], dtype: ir.DataType, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    for i, value in enumerate(outputs):
        value.shape, value.type = None, ir.TensorType(dtype)
        g.builder.add_output(value, f"out{i}")
    session = ort.InferenceSession(ir.to_proto(g.model()).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def test_the_published_numbers():
    """All three at once: as rows of a batch on the host, one by one in the graph, where all rows share a key."""
    for counter, key, expected in KNOWN:
        words = np.array(counter, np.uint64)
        x, y = philox(words[0::2, None], words[1::2, None], np.array(key, np.uint64))
        assert (x[0, 0], y[0, 0], x[1, 0], y[1, 0]) == expected
        g = GraphBuilder("philox")
        names = {"x": (2, 1, 1), "y": (2, 1, 1), "key": (2,)}
        x, y, k = (g.builder.input(name, ir.DataType.INT64, shape) for name, shape in names.items())
        outputs = list(in_graph.philox(g.op, x, y, in_graph.round_keys(g.op, k)))
        inputs = {"x": words[0::2], "y": words[1::2], "key": np.array(key)}
        feeds = {name: inputs[name].astype(np.int64).reshape(shape) for name, shape in names.items()}
        x, y = (word.ravel() for word in run(g, outputs, ir.DataType.INT64, feeds))
        assert (x[0], y[0], x[1], y[1]) == expected


@pytest.mark.parametrize("seed", [0, 12345, (9 << 32) + 1, 2**63, 2**64 - 1])
def test_a_graph_has_the_host_s_noise(seed):
    g = GraphBuilder("noise")
    rows = np.array([0, 3, 70000])
    inputs = g.input("seed", dtype="int64"), g.input("t", dtype="int64"), g.input("rows", "rows", dtype="int64")
    keys = in_graph.round_keys(g.op, in_graph.words_of(g.op, inputs[0]))
    output = in_graph.gumbel(g.op, in_graph.counters(g.op, inputs[2], 190), inputs[1], keys)
    feeds = {"seed": np.array(seed, np.uint64).view(np.int64), "t": np.array(77), "rows": rows}
    (in_graph_noise,) = run(g, [output], ir.DataType.FLOAT, feeds)
    expected = gumbel(seed, 77, rows, 190)
    assert in_graph_noise.shape == (3, 192)
    np.testing.assert_allclose(in_graph_noise[:, :190], expected, rtol=1e-6, atol=1e-6)


def test_seed_step_and_row_decide():
    noise = gumbel(3, 5, np.array([0, 7, 2]), 50)
    np.testing.assert_array_equal(gumbel(3, 5, np.array([7]), 50)[0], noise[1])
    np.testing.assert_array_equal(gumbel(3, 5, np.array([7]), 13)[0], noise[1, :13])
    others = (4, 5, 7), (3, 6, 7), (3, 5, 8), (3 + (1 << 32), 5, 7)
    for seed, t, row in others:
        assert (gumbel(seed, t, np.array([row]), 50)[0] == noise[1]).sum() == 0


def test_numbers_are_uniform_and_independent():
    """In 64 equal parts, and neighbours along number, row and step in 16 x 16: Pearson's statistic of each has mean k
    and variance 2k; six standard deviations."""
    sample = np.stack([gumbel(11, t, np.arange(60), 400) for t in range(20)])
    u = np.exp(-np.exp(-sample.astype(np.float64)))
    assert np.isfinite(sample).all()
    _even(u, 64)
    for axis in range(3):
        first, second = (np.take(u, range(i, u.shape[axis] - 1 + i), axis) for i in (0, 1))
        _even((np.floor(first * 16) * 16 + np.floor(second * 16)) / 256 + 1 / 512, 256)
    assert sample.mean() == pytest.approx(0.5772, abs=0.01)
    assert sample.var() == pytest.approx(np.pi**2 / 6, abs=0.02)


def _even(u: np.ndarray, parts: int) -> None:
    counts = np.bincount((u * parts).astype(int).ravel(), minlength=parts)
    expected = u.size / parts
    assert ((counts - expected) ** 2 / expected).sum() < parts + 6 * np.sqrt(2 * parts)


@pytest.mark.fast("5", "128", "385")
@pytest.mark.parametrize("width", [5, BLOCK, 3 * BLOCK, 3 * BLOCK + 1, 1000])
def test_a_draw_by_blocks_is_a_draw(width):
    """Of the whole vocabulary, the tokens of a last block that isn't whole among them."""
    rng = np.random.default_rng(width)
    scores = rng.normal(size=width).astype(np.float32) * 2
    scores[-1] = scores.max()
    draws = 20000
    xp, rows = NumpyArrays(), np.arange(draws)
    tokens = draw(xp, np.broadcast_to(scores, (draws, width)), noise(5, 3, rows, width))
    p = np.exp(scores.astype(np.float64))
    expected = draws * p / p.sum()
    frequent = expected > 5
    counts = np.bincount(tokens, minlength=width)
    assert len(counts) == width
    counts, expected = (
        np.append(counts[frequent], counts[~frequent].sum()),
        np.append(expected[frequent], expected[~frequent].sum()),
    )
    counted = expected > 5
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[counted].sum()
    assert statistic < counted.sum() + 6 * np.sqrt(2 * counted.sum())


def test_the_judge_of_drawn_tokens_takes_the_same_decisions():
    """And tells how far another token falls behind: in its own block, or its block behind the best one."""
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(40, 300))
    scores[:, 3] = -np.inf
    gumbels = noise(8, 1, np.arange(40), 300)
    tokens = draw(NumpyArrays(), np.maximum(scores, -1e9).astype(np.float32), gumbels)
    rows = list(zip(scores, gumbels, tokens, strict=True))
    assert [drawn(*row) for row in rows] == [(t, 0.0) for t in tokens]
    for row, row_noise, token in rows:
        gaps = {other: drawn(row, row_noise, other)[1] for other in range(300)}
        assert min(gap for other, gap in gaps.items() if other != token) > 0
        assert gaps[3] == np.inf
