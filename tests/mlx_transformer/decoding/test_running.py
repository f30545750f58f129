"""A running batch: rows join and leave between steps, and each has the tokens that it has alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from random_models import write_model
from small_models import DECODER, SIZES
from toy_model import Toy

from export import OnnxTransformer, export_onnx
from mlx_transformer import load
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.positions import borders
from mlx_transformer.decoding.running import FEWEST, SLACK, NewToken, Prefixes, Running, position_bytes
from mlx_transformer.generation.stream import stream_tokens, write_tokens
from mlx_transformer.runtime.decoding import MlxArrays
from mlx_transformer.system.errors import UserError

pytestmark = pytest.mark.gpu_path

ROTARY = dict(positions="rotary", norm="rmsnorm", norm_placement="pre", gated=True, activation="silu")
LONG = dict(kind="longrope", short=[1.0] * 4, long=[3.0] * 4, length=30, attention_factor=1.2)
KINDS: dict[str, dict[str, Any]] = {
    "learned": dict(positions="learned"),
    "window": dict(**ROTARY, key_value_heads=2, query_key_norm=True, layer_pattern=[{"window": 5}, {}]),
    "relative": dict(positions="relative"),
    "longrope": dict(
        **ROTARY, rotary_scaling=dict(kind="longrope", short=[1.0] * 4, long=[3.0] * 4, length=30, attention_factor=1.2)
    ),
}
ALONE = ("relative", "longrope")
OPTIONS = [
    {},
    {"sample": True, "seed": 3, "temperature": 1.3, "top_k": 20},
    {"min_new_tokens": 4, "repetition_penalty": 1.2},
    {"sample": True, "seed": 2**40, "top_p": 0.9, "frequency_penalty": 0.5},
    {"suppressed": [7, 9], "no_repeat_ngram": 2},
]


@pytest.fixture(scope="module", params=KINDS)
def models(request, tmp_path_factory):
    config = TransformerConfig.from_dict({**SIZES, **DECODER, "max_positions": 64, **KINDS[request.param]})
    model, onnx = write_model(config, tmp_path_factory.mktemp("decoder"), 5)
    cpu = export_onnx(model, onnx.parent / "cpu", target="cpu")
    opened = {"onnx": OnnxTransformer(onnx, threads=1), "cpu": OnnxTransformer(cpu, threads=1), "mlx": load(model)[0]}
    return request.param, opened


def requests(count: int) -> list[tuple[dict[str, Any], int, int | None]]:
    """Arguments of `stream_tokens`, the turn in which each is asked for, and after how many tokens nobody reads on."""
    rng = np.random.default_rng(1)
    begun = rng.integers(5, 50, 40).tolist()
    found = []
    for i in range(count):
        ids = [*begun[: int(rng.choice([0, 3, 17, 30]))], *rng.integers(5, 50, int(rng.integers(1, 9))).tolist()]
        options = {**OPTIONS[i % len(OPTIONS)], "max_new_tokens": int(rng.integers(1, 20))}
        likeliest = [None, None, 2][i % 3]
        asked = dict(ids=ids, row=int(rng.integers(100)), likeliest=likeliest, **options)
        found.append((asked, int(rng.integers(12)), 2 if i % 5 == 4 else None))
    return found


def written(running: Running, asked: Sequence[tuple[dict[str, Any], int, int | None]]) -> list[list[NewToken]]:
    """The tokens of each request, asked for in turn, one at a time."""
    tokens: list[list[NewToken]] = [[] for _ in asked]
    streams: dict[int, Any] = {}
    turn = 0
    while len(streams) < len(asked) or any(streams.values()):
        for i, (request, begin, left) in enumerate(asked):
            if turn == begin:
                streams[i] = write_tokens(running, **request)
            if (stream := streams.get(i)) is None:
                continue
            token = next(stream, "end")
            if isinstance(token, NewToken):
                tokens[i].append(token)
            if token == "end" or len(tokens[i]) == left:
                stream.close()
                streams[i] = None
        turn += 1
    return tokens


def same(found, expected):
    assert [token.id for token in found] == [token.id for token in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_p == pytest.approx(other.log_p, abs=1e-4)
        assert [id for id, _ in one.likeliest] == [id for id, _ in other.likeliest]


@pytest.mark.fast("learned-mlx", "window-cpu", "relative-onnx", "longrope-cpu", "learned-onnx")
@pytest.mark.parametrize("runtime", ["onnx", "cpu", "mlx"])
def test_tokens_are_those_of_each_row_alone(models, runtime):
    kind, opened = models
    with opened[runtime].decoding() as model:
        assert model.joins == (kind not in ALONE)
        prefixes = Prefixes(model.config, 60 * position_bytes(model.config))
        running, asked = Running(model, chunk=4, prefixes=prefixes), requests(7)
        alone = [[*stream_tokens(model, **request)][:left] for request, _, left in asked]
        for given in (asked, asked[:4], [(request, 0, left) for request, _, left in asked]):
            for tokens, expected in zip(written(running, given), alone, strict=False):
                same(tokens, expected)
            assert not running.batches
            assert not running.reading
        if model.takes_back and not borders(model.config):
            guessing = [({**request, "speculate": 3}, begin, left) for request, begin, left in asked[:4]]
            for tokens, expected in zip(written(running, guessing), alone, strict=False):
                same(tokens, expected)
        assert 0 < prefixes.positions <= 60 if model.joins else not prefixes.kept


@pytest.mark.fast("relative-mlx", "window-cpu", "learned-onnx")
@pytest.mark.parametrize("runtime", ["onnx", "cpu", "mlx"])
def test_rows_apart_share_whole_chunks(models, runtime):
    _, opened = models
    with opened[runtime].decoding() as model:
        prefixes, asked = Prefixes(model.config, 2**20), requests(6)
        running = Running(model, chunk=16, prefixes=prefixes, apart=True, whole_chunks=True)
        for tokens, (request, _, left) in zip(written(running, asked), asked, strict=True):
            same(tokens, [*stream_tokens(model, **request)][:left])
        streams = [write_tokens(running, [*range(5, 40)], max_new_tokens=20, min_new_tokens=20) for _ in range(3)]
        tokens = [[next(stream) for stream in streams] for _ in range(12)][-1]
        assert None not in tokens
        assert [len(rows.outputs) for rows in running.batches] == [1, 1, 1]


def toy(arrays=None):
    return Toy(vocab_size=50, arrays=arrays, max_positions=999, **DECODER)


NEVER: dict[str, Any] = dict(suppressed=[2])


@pytest.mark.parametrize("arrays", [None, MlxArrays()], ids=["numpy", "mlx"])
def test_a_step_is_one_for_all_rows_and_none_waits_for_a_prompt(arrays):
    model = toy(arrays)
    running = Running(model, chunk=8)
    streams = [write_tokens(running, [5, 6 + i], max_new_tokens=40, **NEVER) for i in range(6)]
    for _ in range(4):
        tokens = [next(stream) for stream in streams]
    assert None not in tokens
    steps, turns = model.steps, running.turns
    long, short = (write_tokens(running, [5] * n, max_new_tokens=5, **NEVER) for n in (40, 7))
    first = {}
    for turn in range(12):
        assert None not in [next(stream) for stream in streams]
        for name, stream in (("long", long), ("short", short)):
            if next(stream, None) is not None:
                first.setdefault(name, turn)
    assert (model.steps - steps, running.turns - turns) == (12, 12)
    assert first["short"] <= 1 + 3
    assert first["long"] <= 5 + 3


def test_a_prompt_is_read_once_for_all_that_begin_with_it():
    model = toy()
    running = Running(model, chunk=8, prefixes=Prefixes(model.config, 2**20))
    system = [7, 8, 9, 10] * 8
    asked = [(dict(ids=[*system, 11 + i], max_new_tokens=3, **NEVER), 0, None) for i in range(5)]
    first = written(running, asked)
    assert model.read == len(system) + 5
    # The next turn of a chat: what was written is in the cache but for the last token, which nobody has fed.
    answer = [token.id for token in first[2]]
    written(running, [(dict(ids=[*asked[2][0]["ids"], *answer, 20, 21], max_new_tokens=1, **NEVER), 0, None)])
    assert model.read == len(system) + 5 + 1 + 2


def test_kept_caches_are_bounded_and_the_least_recently_used_goes():
    model = toy()
    prefixes = Prefixes(model.config, 50 * position_bytes(model.config))
    running = Running(model, prefixes=prefixes)
    texts = [[5 + i] * 20 for i in range(3)]
    for text in (texts[0], texts[1], texts[0], texts[2]):
        written(running, [(dict(ids=text, max_new_tokens=1, **NEVER), 0, None)])
    kept = [(ids[0], len(ids)) for ids, _ in prefixes.kept.values()]
    assert kept == [(5, 20), (7, 20)]
    written(running, [(dict(ids=[9] * 51, max_new_tokens=1, **NEVER), 0, None)])
    written(running, [(dict(ids=[9] * (FEWEST - 1), max_new_tokens=1, **NEVER), 0, None)])
    assert [len(ids) for ids, _ in prefixes.kept.values()] == [20, 20]  # too long, too short
    assert Prefixes(model.config, 0).most == 0


def test_a_failure_is_its_own_rows():
    model = toy()
    running = Running(model)
    good, bad = (write_tokens(running, [id, 6], max_new_tokens=9, **NEVER) for id in (5, 9))
    assert [next(good) is None, next(bad) is None] == [True, True]
    model.table[model.first_state([9, 6])] = np.nan
    alone = [token.id for token in stream_tokens(model, [5, 6], max_new_tokens=9, **NEVER)]
    tokens = [next(good)]
    with pytest.raises(UserError, match="not finite"):
        next(bad)
    assert [token.id for token in [*tokens, *good]] == alone

    def broken(ids):
        raise MemoryError("no room")

    one, other = (write_tokens(running, [id, 6], max_new_tokens=9, **NEVER) for id in (5, 7))
    while None in (next(one), next(other)):
        pass
    running.batches[0].decoder.step = broken
    for stream in (one, other):
        with pytest.raises(MemoryError):
            next(stream)
    assert [token.id for token in filter(None, write_tokens(running, [5, 6], max_new_tokens=9, **NEVER))] == alone


def test_rows_of_very_different_lengths_take_their_steps_apart():
    """Short rows are not padded to the longest: memory would grow as rows times its length."""
    model = toy()
    running = Running(model, chunk=1000)
    streams = [
        write_tokens(running, [5 + i] * n, max_new_tokens=30, **NEVER) for i, n in enumerate([900, *range(2, 12)])
    ]
    for _ in range(8):
        tokens = [next(stream) for stream in streams]
    assert None not in tokens
    lengths = [[output.length for output in rows.outputs] for rows in running.batches]
    assert len(lengths) == 2
    assert all(len(each) * max(each) <= 2 * sum(each) + SLACK * len(each) for each in lengths)
