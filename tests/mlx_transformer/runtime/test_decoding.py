"""The search on MLX: the same decisions as on NumPy, and a cache that changes nothing."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from combined import combined, thinned
from mlx.utils import tree_map
from toy_model import Toy

from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.arrays import NumpyArrays, top_k
from mlx_transformer.decoding.search import search
from mlx_transformer.decoding.steps import Model
from mlx_transformer.device import deciding_as
from mlx_transformer.runtime.decoding import MlxArrays, MlxModel

pytestmark = pytest.mark.gpu_path

REQUESTS = [
    {},
    {"min_new_tokens": 4},
    {"beam": 4, "n_best": 4},
    {"beam": 3, "n_best": 2, "length_penalty": -0.5, "early_stopping": True},
    {"beam": 2, "n_best": 2, "length_penalty": 1.2, "min_new_tokens": 3},
    {"sample": True, "seed": 11},
    {"sample": True, "seed": 12, "temperature": 0.7, "top_k": 5, "top_p": 0.9},
]


def rows(count=24, vocab_size=8, seed=0, longest=9):
    rng = np.random.default_rng(seed)
    return [[*rng.integers(3, vocab_size, rng.integers(0, longest)).tolist(), 2] for _ in range(count)]


def like_a_gpu():
    """Finished rows are asked for every eighth step and dropped seldom."""
    with deciding_as("gpu"):
        return MlxArrays()


@pytest.mark.parametrize(
    ("arrays", "options"),
    combined([MlxArrays, like_a_gpu], REQUESTS, step=2),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_numpy_and_mlx_decide_alike(options, arrays):
    prefix = [[3, 5][: i % 3] for i in range(24)]
    for vocab_size, bias in ((8, 1.0), (3000, 5.0)):
        sources = rows(vocab_size=vocab_size)
        expected = search(Toy(vocab_size, 1, bias), sources, prefix, max_new_tokens=20, **options)
        results = search(Toy(vocab_size, 1, bias, arrays()), sources, prefix, max_new_tokens=20, **options)
        assert [[h.ids for h in hs] for hs in results] == [[h.ids for h in hs] for hs in expected]
        scores = [[h.score for hs in side for h in hs] for side in (results, expected)]
        np.testing.assert_allclose(*scores, rtol=1e-5)


@pytest.mark.parametrize(("width", "count"), [(7, 6), (900, 6), (4097, 6), (900, 130), (40_000, 130)])
def test_top_k_is_the_same(width, count):
    x = np.random.default_rng(width).integers(0, 50, (6, width)).astype(np.float32)
    expected = top_k(NumpyArrays(), x, count)
    for by_mlx, by_numpy in zip(top_k(MlxArrays(), mx.array(x), count), expected, strict=True):
        np.testing.assert_array_equal(np.array(by_mlx), by_numpy)


class Uncached(Model):
    """`nn.Transformer` that reads everything again at every step: what a cache has to agree with."""

    def __init__(self, model):
        self.model, self.config, self.arrays, self.extends_positions = model, model.config, NumpyArrays(), True

    def start(self, sources):
        self.sources = list(sources)
        first = [[self.config.bos_id]] if self.config.has_encoder else [[]]
        self.targets = np.array(first * len(sources), np.int64)
        return self, self.logits()

    def logits(self):
        results = []
        for source, target in zip(self.sources, self.targets, strict=True):
            if self.config.has_encoder:
                logits = self.model(mx.array(source[None]), mx.array(target[None]))
            else:
                logits = self.model(mx.array(np.concatenate([source, target])[None]))
            results.append(np.array(logits[0, -1]))
        return np.stack(results)

    def step(self, ids):
        self.targets = np.concatenate([self.targets, ids[:, None]], axis=1)
        return self.logits()

    def repeat(self, times):
        self.keep(np.repeat(np.arange(len(self.sources)), times))

    def reorder(self, rows):
        self.targets = self.targets[rows]

    def keep(self, rows):
        self.sources, self.targets = [self.sources[i] for i in rows], self.targets[rows]


CONFIGS = {
    "post-norm": {"scale_embeddings": False},
    "rotary grouped": {"positions": "rotary", "key_value_heads": 1, "norm": "rmsnorm", "norm_placement": "pre"},
    "learned": {"positions": "learned", "max_positions": 64},
    "decoder": {"architecture": "decoder", "encoder_layers": 0, "tie_embeddings": "target-output"},
    "decoder rotary": {"architecture": "decoder", "encoder_layers": 0, "tie_embeddings": "none", "positions": "rotary"},
    "decoder learned": {
        "architecture": "decoder",
        "encoder_layers": 0,
        "tie_embeddings": "none",
        "positions": "learned",
        "max_positions": 64,
    },
}


def model_of(changes, vocab_size=31):
    mx.random.seed(4)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "heads": 2, "d_ff": 48, "dropout": 0.3}
    return Transformer(TransformerConfig(vocab_size=vocab_size, **{**sizes, **changes}))


@pytest.mark.fast("decoder rotary")
@pytest.mark.parametrize("name", thinned(CONFIGS, 4))
def test_the_cache_changes_nothing(name):
    model = model_of(CONFIGS[name])
    sources = rows(4, 31, seed=2)
    for options in ({}, {"beam": 3, "n_best": 3, "length_penalty": 1.0}, {"sample": True, "seed": 3}):
        options = {"max_new_tokens": 8, "min_new_tokens": 2, **options}
        results = model.search(sources, **options)
        assert model.training
        expected = search(Uncached(model.eval()), sources, **options)
        model.train()
        assert [[h.ids for h in hs] for hs in results] == [[h.ids for h in hs] for hs in expected]
        scores = [[h.score for hs in side for h in hs] for side in (results, expected)]
        np.testing.assert_allclose(*scores, rtol=1e-4)


def test_dropped_rows_and_lazy_checks_change_nothing():
    model = model_of({"tie_embeddings": "none", "output_bias": True}).eval()
    bias = np.zeros(31, np.float32)
    bias[2] = 1.5  # so that outputs differ in length
    model.output_proj.bias = mx.array(bias)
    sources = rows(9, 31, seed=5)
    for options in ({"beam": 3}, {}):
        single = [model.search([source], max_new_tokens=20, **options)[0] for source in sources]
        assert len({len(hs[0].ids) for hs in single}) > 3
        adapted = MlxModel(model)
        for arrays in (MlxArrays(), like_a_gpu()):
            adapted.arrays = arrays
            results = search(adapted, sources, max_new_tokens=20, **options)
            assert [[h.ids for h in hs] for hs in results] == [[h.ids for h in hs] for hs in single]


def log_probabilities(model, source, ids):
    """(T, V) float64: of what follows each beginning of `ids`, all read at once."""
    if model.config.has_encoder:
        logits = model([source], [[model.config.bos_id, *ids[:-1]]])
    else:
        logits = model([[*source, *ids[:-1]]])[:, len(source) - 1 :]
    logits = np.array(logits[0], np.float64)
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


@pytest.mark.fast("learned-dtype3", "decoder rotary-dtype4")
@pytest.mark.parametrize(
    ("name", "dtype"), combined(["rotary grouped", "learned", "decoder rotary"], [mx.float16, mx.bfloat16])
)
def test_half_precision_generates_what_float32_would(name, dtype):
    """Of the same rounded weights, by the prefix chosen: no token is worse than the best by more than rounding, and a
    score is the sum of its tokens' log-probabilities. Measured: 2.2 epsilons a token at most."""
    changes = {**CONFIGS[name], "tie_embeddings": "none"}  # else a random model says the same token for ever
    model = model_of(changes).eval()
    model.set_dtype(dtype)
    exact = model_of(changes).eval()
    exact.update(tree_map(lambda x: x.astype(mx.float32), model.parameters()))
    sources, bound, length = rows(12, 31, seed=2), 8 * mx.finfo(dtype).eps, 12
    for options in ({}, {"beam": 4, "n_best": 4}):
        results = model.search(sources, min_new_tokens=length, max_new_tokens=length, length_penalty=0.0, **options)
        assert len({token for hs in results for h in hs for token in h.ids}) > 4
        for source, hypotheses in zip(sources, results, strict=True):
            for hypothesis in hypotheses:
                log_p = log_probabilities(exact, source, hypothesis.ids)
                chosen = log_p[np.arange(length), hypothesis.ids]
                assert abs(hypothesis.score - chosen.sum()) < length * bound
                if not options:  # greedy; the ids up to eos were not to be had
                    assert (chosen > log_p[:, 3:].max(axis=1) - 2 * bound).all()
