"""Penalties by what was written, and min_p: by their definitions, on NumPy and on MLX, greedily and in beams."""

from __future__ import annotations

import numpy as np
import pytest
from toy_model import Toy

from export.search.metadata import inputs_of
from mlx_transformer.decoding.arrays import NumpyArrays
from mlx_transformer.decoding.greedy import likeliest
from mlx_transformer.decoding.options import Options
from mlx_transformer.decoding.search import generate, search
from mlx_transformer.decoding.steps import BANNED, banned_ids
from mlx_transformer.runtime.decoding import MlxArrays
from mlx_transformer.system.errors import UserError

ARRAYS = pytest.mark.parametrize("arrays", [NumpyArrays(), MlxArrays()], ids=["numpy", "mlx"])
ROWS = [[5, 6, 2], [7, 2], [3, 4, 5, 6, 2]]
PENALTIES = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.6},
    {"presence_penalty": -0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
]


def adjusted(scores, written, read, options):
    """The scores of the next token: transformers' penalty of all tokens read, then OpenAI's of those written."""
    scores = scores.astype(np.float64)
    for token in {*read, *written}:
        penalty = options.get("repetition_penalty", 1.0)
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for token in {*written}:
        scores[token] -= options.get("presence_penalty", 0) + options.get("frequency_penalty", 0) * written.count(token)
    scores[banned_ids(Toy(vocab_size=12).config)] = -np.inf
    return scores


@ARRAYS
@pytest.mark.parametrize("options", PENALTIES)
def test_greedy_search_is_that_of_the_definition(options, arrays):
    toy = Toy(vocab_size=12, arrays=arrays, spread=0.7)
    found = generate(toy, ROWS, max_new_tokens=9, batch_tokens=1 << 20, **options)
    for row, ids in zip(ROWS, found, strict=True):
        decoder, logits = toy.start(_sources(toy, row))
        written = []
        for _ in range(9):
            written.append(int(adjusted(np.asarray(logits)[0], written, [toy.config.bos_id], options).argmax()))
            if written[-1] == toy.config.eos_id:
                break
            logits = decoder.step(arrays.asarray(np.array(written[-1:], np.int32)))
        assert ids == [id for id in written if id != toy.config.eos_id]
    assert found != generate(toy, ROWS, max_new_tokens=9)


def _sources(toy, row):
    from mlx_transformer.core.inputs import Sources

    return Sources.of(toy.config, ids=[row])


@pytest.mark.parametrize("options", PENALTIES)
def test_a_beam_of_all_tokens_finds_the_best_of_all(options):
    """Each hypothesis is penalised by its own tokens: the score of the best is that of its tokens by themselves."""
    toy, limit = Toy(vocab_size=12, spread=0.7), 2
    [best] = search(toy, [[5, 2]], beam=12, n_best=1, max_new_tokens=limit, length_penalty=0, **options)

    def score(ids):
        decoder, logits = toy.start(_sources(toy, [5, 2]))
        total = 0.0
        for i, id in enumerate(ids):
            row = np.asarray(logits)[0].astype(np.float64)
            log_p = row - np.log(np.exp(row).sum())
            total += adjusted(log_p, list(ids[:i]), [toy.config.bos_id], options)[id]
            logits = decoder.step(np.array([id], np.int32))
        return total

    def whole(ids):
        return [*ids, toy.config.eos_id] if len(ids) < limit else ids

    every = [[a, b] for a in range(3, 12) for b in range(2, 12)] + [[2]]
    assert score(whole(best[0].ids)) == pytest.approx(best[0].score, abs=1e-4)
    assert best[0].score == pytest.approx(max(map(score, every)), abs=1e-4)


@ARRAYS
def test_min_p_keeps_tokens_by_the_likeliest_one(arrays):
    logits = np.log(np.array([[0.5, 0.24, 0.2, 0.06], [0.7, 0.1, 0.1, 0.1]], np.float32))
    for options, left in (
        ({"min_p": 0.45}, [[0, 1], [0]]),
        ({"min_p": 0.1}, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        ({"min_p": 0.1, "top_p": 0.6}, [[0, 1], [0]]),
        ({"min_p": 1.0}, [[0], [0]]),
        ({"min_p": 0.45, "temperature": 2.0}, [[0, 1, 2], [0]]),
    ):
        scores = arrays.numpy(likeliest(arrays, arrays.asarray(logits), Options(sample=True, **options)))
        assert [np.flatnonzero(row > BANNED / 2).tolist() for row in scores] == left, options


def test_refused():
    for options in ({"min_p": 0.1}, {"sample": True, "min_p": 1.1}, {"presence_penalty": 3}, {"frequency_penalty": -3}):
        with pytest.raises(UserError, match=next(reversed(options))):
            Options(**options)
    with pytest.raises(UserError, match=r"presence_penalty=0.5: no option of a model with the search inside"):
        inputs_of({"presence_penalty": 0.5})
