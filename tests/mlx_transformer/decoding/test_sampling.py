"""Samples follow the distribution that temperature, top-k and top-p leave, and depend on seed and row alone."""

from __future__ import annotations

import numpy as np
import pytest
from toy_model import Toy

from mlx_transformer.decoding.search import generate

DRAWS = 4000


def expected(logp, temperature=1.0, top_k=0, top_p=1.0):
    """Probabilities by the definitions, token by token."""
    p = {id: logp[id] / temperature for id in range(len(logp)) if id not in (0, 1)}
    order = sorted(p, key=lambda id: -p[id])
    order = order[:top_k] if top_k else order
    mass = {id: np.exp(p[id]) for id in order}
    mass = {id: m / sum(mass.values()) for id, m in mass.items()}
    if top_p < 1:
        reached, ids = 0.0, []
        for id in order:
            if reached >= top_p:
                break
            ids.append(id)
            reached += mass[id]
        mass = {id: mass[id] / reached for id in ids}
    return mass


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"top_p": 1e-6},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.7},
    ],
)
def test_frequencies(options):
    toy = Toy(vocab_size=12, seed=6, spread=1.0)
    drawn = generate(toy, [[3, 2]] * DRAWS, sample=True, seed=5, max_new_tokens=1, **options)
    counts = np.bincount([ids[0] if ids else 2 for ids in drawn], minlength=12)
    p = expected(toy.log_probabilities([3, 2], []), **options)
    assert set(np.flatnonzero(counts)) <= set(p)
    # Pearson's statistic has mean k-1 and variance 2(k-1): six standard deviations, and the seed is fixed.
    expected_counts = {id: DRAWS * share for id, share in p.items()}
    statistic = sum((counts[id] - n) ** 2 / n for id, n in expected_counts.items())
    freedom = len(p) - 1
    assert statistic <= freedom + 6 * np.sqrt(2 * freedom)


def test_long_samples_differ_by_row_and_seed():
    toy = Toy(vocab_size=20, spread=0.5, eos_bias=-9.0)
    first = generate(toy, [[3, 2]] * 8, sample=True, seed=1, max_new_tokens=20)
    assert len({tuple(ids) for ids in first}) == 8
    assert generate(toy, [[3, 2]] * 8, sample=True, seed=1, max_new_tokens=20) == first
    assert not set(map(tuple, generate(toy, [[3, 2]] * 8, sample=True, seed=2, max_new_tokens=20))) & set(
        map(tuple, first)
    )
