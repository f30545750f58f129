"""Target cpu: tokens and scores of MLX and of the portable graphs, whatever a search does with rows and buffers."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from certified import assert_beams
from combined import combined
from small_models import SIZES, encoder_decoder, random_weights
from waiting import PATIENCE

import export.runtime.sessions
from export import OnnxTransformer, export_onnx
from export.targets.cpu.runtime import POSITIONS, CpuDecoder
from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Sources
from mlx_transformer.system.errors import UserError

# Sentences end at different steps: a bias on eos, and weights of the classifier that leave it a chance.
ENDING = TransformerConfig(
    **{**SIZES, "max_positions": 150}, tie_embeddings="none", output_bias=True, norm_placement="pre", key_value_heads=2
)
TINY = TransformerConfig(**{**SIZES, "vocab_size": 9})  # a beam of 4 has more candidates than the vocabulary words
UNEQUAL = TransformerConfig(**{**SIZES, "d_model": 36}, d_k=6, d_v=10, positions="rotary", key_value_heads=2)
MANY_WORDS = TransformerConfig(**{**SIZES, "vocab_size": 16640})  # looked through in blocks
CONFIGS = {
    "ending": ENDING,
    "tiny vocabulary": TINY,
    "unequal": UNEQUAL,
    "two": encoder_decoder("two vocabularies"),
    "words": MANY_WORDS,
}


def weights_of(config, seed=0):
    weights = random_weights(config, seed)
    if config.output_bias:
        weights["output_proj.bias"][config.eos_id] = 2.5
    return weights


class Three:
    """One model in MLX, in portable graphs and for target cpu."""

    def __init__(self, folder, config):
        self.checkpoint = save_checkpoint(folder / "model", config, weights_of(config))
        self.config = config
        self.mlx = Transformer.load(self.checkpoint)
        self.portable = OnnxTransformer(export_onnx(self.checkpoint, folder / "portable"), threads=1)
        self.folder = export_onnx(self.checkpoint, folder / "cpu", target="cpu")
        self.cpu = OnnxTransformer(self.folder, threads=1)

    def rows(self, count=12, longest=14, seed=1):
        """Ragged, the first a single token."""
        rng = np.random.default_rng(seed)
        lengths = [1, *rng.integers(1, longest + 1, count - 1)]
        return [rng.integers(3, self.config.source_vocab_size, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: Three(tmp_path_factory.mktemp("rows"), config) for name, config in CONFIGS.items()}


def same(results, expected):
    assert [[h.ids for h in hs] for hs in results] == [[h.ids for h in hs] for hs in expected]
    for by_cpu, by_portable in zip(results, expected, strict=True):
        np.testing.assert_allclose([h.score for h in by_cpu], [h.score for h in by_portable], rtol=1e-4, atol=1e-4)


REQUESTS = [
    {},
    {"beam": 2, "n_best": 2, "min_new_tokens": 4},
    {"beam": 4, "n_best": 4},
    {"beam": 4, "early_stopping": True, "length_penalty": -0.5},
    {"beam": 8, "n_best": 8, "max_new_tokens": 5},
    {"beam": 3, "n_best": 3, "penalty_form": "length", "batch_tokens": 50},
    {"min_new_tokens": 6, "batch_tokens": 40},
    {"sample": True, "seed": 3, "temperature": 0.9},
    {"sample": True, "seed": 4, "top_k": 5, "top_p": 0.9},
]


@pytest.mark.parametrize(("name", "options"), combined(CONFIGS, REQUESTS, step=2), ids=str)
def test_searches(models, name, options):
    three = models[name]
    options = {"max_new_tokens": 30, **options}
    results = [model.search(three.rows(), **options) for model in (three.cpu, three.portable, three.mlx)]
    if "beam" in options:
        assert_beams(three.checkpoint, three.rows(), options, *results)
    else:
        same(results[0], results[1])
        same(results[2], results[1])
    best = {name: value for name, value in options.items() if name != "n_best"}
    assert three.cpu.generate(three.rows(), **best) == [hypotheses[0].ids for hypotheses in results[0]]


@pytest.mark.parametrize("options", [{}, {"beam": 4, "n_best": 2}, {"sample": True, "seed": 1}], ids=str)
def test_forced_prefixes(models, options):
    three = models["ending"]
    prefix = [[7, 9, 11][: i % 4] for i in range(12)]
    expected = three.portable.search(three.rows(), prefix, max_new_tokens=12, **options)
    same(three.cpu.search(three.rows(), prefix, max_new_tokens=12, **options), expected)
    assert all(h.ids[: len(p)] == p for p, hs in zip(prefix, expected, strict=True) for h in hs)


@pytest.mark.parametrize("beam", [1, 4])
def test_rows_leave_as_their_sentences_end(models, beam, monkeypatch):
    """And the beams of those that stay still read the right positions."""
    three, sizes = models["ending"], []

    def keep(self, rows):
        sizes.append((len(rows), int(self.past_length[0])))
        return original(self, rows)

    original = CpuDecoder.keep
    monkeypatch.setattr(CpuDecoder, "keep", keep)
    rows = three.rows(30, seed=5)
    options = {"beam": beam, "n_best": beam, "max_new_tokens": 60}
    same(three.cpu.search(rows, **options), three.mlx.search(rows, **options))
    assert len({position for _, position in sizes}) >= 3
    assert min(count for count, _ in sizes) < 15 * beam


@pytest.mark.parametrize("beam", [1, 3])
def test_buffers_grow(models, beam):
    """Past 32, 64 and 128 positions, after rows have left and beams have changed places."""
    three = models["ending"]
    assert 4 * POSITIONS < 140 < three.config.max_positions
    for length in (POSITIONS, POSITIONS + 1, 140):
        options = {"beam": beam, "n_best": beam, "min_new_tokens": length - 5, "max_new_tokens": length}
        results = three.cpu.search(three.rows(5), **options)
        same(results, three.portable.search(three.rows(5), **options))
        assert all(length - 6 <= len(h.ids) <= length for hs in results for h in hs)


def test_a_full_decoder(models):
    three = models["two"]  # 40 positions
    options = {"max_new_tokens": 40, "min_new_tokens": 40}
    assert three.cpu.generate(three.rows(3), **options) == three.portable.generate(three.rows(3), **options)
    with pytest.raises(UserError, match=r"max_new_tokens=41: source row 0 leaves room for 40 tokens"):
        three.cpu.generate(three.rows(3), max_new_tokens=41)
    with pytest.raises(UserError, match="source row 0: 41 tokens, the model takes at most 40"):
        three.cpu.generate([[5] * 41])


@pytest.mark.parametrize("name", CONFIGS)
def test_teacher_forced_logits_with_padding_anywhere(models, name):
    three = models[name]
    rng = np.random.default_rng(2)
    ids = rng.integers(3, three.config.source_vocab_size, (4, 9))
    mask = np.ones_like(ids)
    mask[1, 5:], mask[2, :4], mask[3, :2], mask[3, 6:] = 0, 0, 0, 0
    targets = rng.integers(3, three.config.vocab_size, (4, 7))
    logits = three.cpu.graphs.logits({"source_ids": ids}, mask, targets)
    expected = three.portable.decode(targets, three.portable.encode(ids, mask), mask)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    np.testing.assert_allclose(logits, np.array(three.mlx(*map(mx.array, (ids, targets, mask == 1)))), atol=2e-5)
    hidden = three.cpu.graphs.encode({"source_ids": ids}, mask)
    np.testing.assert_allclose(hidden[mask == 1], three.portable.encode(ids, mask)[mask == 1], atol=2e-5)


def test_beams_follow_any_parents(models):
    """Rows reordered at random: each beam's logits are those of its own history, fed token by token."""
    three, beams = models["ending"], 4
    rng = np.random.default_rng(3)
    sources = [np.array(row) for row in three.rows(3)]
    decoder, _ = three.cpu.graphs.start(Sources.of(three.config, ids=sources))
    tokens_so_far = np.full((len(sources), beams, 1), three.config.bos_id)
    decoder.repeat(beams)
    for t in range(POSITIONS + 6):
        if t:
            parents = rng.integers(0, beams, (len(sources), beams))
            decoder.reorder((parents + beams * np.arange(len(sources))[:, None]).reshape(-1))
            tokens_so_far = np.take_along_axis(tokens_so_far, parents[:, :, None], axis=1)
        if t == 20:  # the sentence in the middle leaves
            decoder.keep(np.array([*range(beams), *range(2 * beams, 3 * beams)]))
            tokens_so_far, sources = tokens_so_far[[0, 2]], [sources[0], sources[2]]
        tokens = rng.integers(3, three.config.vocab_size, (len(sources), beams))
        tokens_so_far = np.concatenate([tokens_so_far, tokens[:, :, None]], axis=2)
        logits = decoder.step(tokens.reshape(-1)).reshape(len(sources), beams, -1)
        for i, source in enumerate(sources):
            if t % 9 == 8:
                ids = np.repeat(source[None], beams, axis=0)
                mask = np.ones_like(ids)
                expected = three.portable.decode(tokens_so_far[i], three.portable.encode(ids, mask), mask)[:, -1]
                np.testing.assert_allclose(logits[i], expected, atol=2e-5)
    assert tokens_so_far.shape[2] > POSITIONS


@pytest.mark.fast("{}", "{'sample': True, 'seed': 2}")
@pytest.mark.parametrize("options", [{}, {"beam": 4}, {"sample": True, "seed": 2}], ids=str)
def test_several_batches_at_a_time(models, options, monkeypatch):
    """On small models, one thread each; on larger ones one batch after the other."""
    three = models["ending"]
    rows = three.rows(40, seed=7)
    expected = three.cpu.generate(rows, **options)
    original = CpuDecoder.step

    def step(decoder, ids):
        """A thread's first one waits until every other thread has begun too."""
        if threading.get_ident() not in used:
            used.add(threading.get_ident())
            barrier.wait(timeout=PATIENCE)
        return original(decoder, ids)

    monkeypatch.setattr(CpuDecoder, "step", step)
    for small, threads in ((1e9, 3), (0, 1)):
        monkeypatch.setattr(export.runtime.sessions, "SMALL", small)
        model = OnnxTransformer(three.folder, threads=3)
        for batch_tokens in (8192, 150):
            used, barrier = set(), threading.Barrier(threads)
            assert model.generate(rows, batch_tokens=batch_tokens, **options) == expected
            assert len(used) == threads
    few = OnnxTransformer(three.folder, threads=3).generate(rows[:3], **options)
    assert few == three.portable.generate(rows[:3], **options)


def test_tokens_one_by_one(models):
    three = models["ending"]
    for row in three.rows(5):
        expected = three.portable.generate([row], max_new_tokens=40)[0]
        assert list(three.cpu.stream_ids(row, max_new_tokens=40)) == expected


@pytest.mark.parametrize("options", [{}, {"beam": 2}, {"sample": True}], ids=str)
def test_logits_that_are_not_finite(tmp_path, options):
    weights = weights_of(ENDING)
    weights["decoder.layers.1.feed_forward.up_proj.weight"][3] = 3e38  # finite, which its products are not
    save_checkpoint(tmp_path / "model", ENDING, weights)
    broken = OnnxTransformer(export_onnx(tmp_path / "model", tmp_path / "cpu", target="cpu"), threads=1)
    with pytest.raises(UserError, match="source row 0: the model's logits are not finite"):
        broken.generate([[5, 6, 7]], **options)
