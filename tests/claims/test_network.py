"""What the notes claim about embeddings, norms, residuals, the feed-forward net, stacks, classifier and decoding."""

import json

import mlx.core as mx
import numpy as np
import pytest
from claims import feedforward, norms, stacks
from claims.table import ROWS, claimed
from imports import ROOT
from mlx import nn

from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.feedforward import FeedForward
from mlx_transformer.nn.norms import LayerNorm, RMSNorm


def tiny(seed: int = 0, **changes) -> Transformer:
    mx.random.seed(seed)
    return Transformer(TransformerConfig.preset("tiny", 24, **{"d_model": 32, "d_ff": 64, **changes}))


def test_an_embedding_is_a_one_hot_product() -> None:
    model = tiny(scale_embeddings=False)
    ids = mx.array([[5, 0, 23, 5]])
    one_hot = (ids[..., None] == mx.arange(24)).astype(mx.float32)
    assert mx.array_equal(model.embed_source(ids), one_hot @ model.embedding.weight).item()


@pytest.mark.parametrize(("row", "name"), list(zip(norms.TOKENS, ROWS[23].numbers, strict=False)))
def test_layer_norm_numbers(row: tuple[float, ...], name: str) -> None:
    norm, expected = LayerNorm(4, 1e-5), claimed(23, name).values
    assert claimed(23, name).holds(np.array(norm(mx.array([row])))[0])
    norm.weight, norm.bias = mx.array([1.0, 2.0, 3.0, 4.0]), mx.array([0.0, 10.0, 0.0, -10.0])  # learned gamma, beta
    learned = np.array(expected) * [1, 2, 3, 4] + [0, 10, 0, -10]
    np.testing.assert_allclose(np.array(norm(mx.array([row])))[0], learned, atol=4 * 5.1e-5)


def test_rms_norm_is_its_formula() -> None:
    norm = RMSNorm(4, 1e-3)
    norm.weight = mx.array([1.0, 2.0, 3.0, 4.0])
    x = np.array([[1.0, -2.0, 3.0, 0.5]])
    expected = x / np.sqrt(np.mean(x**2) + 1e-3) * [1, 2, 3, 4]
    np.testing.assert_allclose(np.array(norm(mx.array(x.astype(np.float32)))), expected, rtol=1e-6)


def test_layer_norm_ignores_batch_mates_and_batch_norm_does_not() -> None:
    mx.random.seed(0)
    sample, mates, others = (mx.random.normal((n, 6, 16)) for n in (1, 3, 3))
    padding = mx.zeros((1, 4, 16))
    layer_norm = LayerNorm(16, 1e-5)
    batch_norm = nn.BatchNorm(16)

    def alone_among(norm, others, pad=False):
        batch = mx.concatenate([sample, 5 * others])
        if pad:
            batch = mx.concatenate([batch, mx.repeat(padding, 4, axis=0)], axis=1)
        return np.array(norm(batch)[0, :6])

    reference = alone_among(layer_norm, mates)
    np.testing.assert_array_equal(reference, alone_among(layer_norm, others))
    np.testing.assert_array_equal(reference, alone_among(layer_norm, mates, pad=True))
    reference = alone_among(batch_norm, mates)
    assert np.abs(reference - alone_among(batch_norm, others)).max() > 0.05
    assert np.abs(reference - alone_among(batch_norm, mates, pad=True)).max() > 0.05


def test_feed_forward_is_its_formula() -> None:
    """Written as loops over positions, of the module's own weights: y = W_2 max(0, W_1 x + b_1) + b_2."""
    module, x = feedforward.base_feed_forward()
    found = np.array(module(x))
    up, down = (np.array(layer.weight, dtype=np.float64) for layer in (module.up_proj, module.down_proj))
    b_1, b_2 = (np.array(layer.bias, dtype=np.float64) for layer in (module.up_proj, module.down_proj))
    assert (up.shape, down.shape) == ((2048, 512), (512, 2048))
    for b, i in np.ndindex(2, 7):
        inner = up @ np.array(x[b, i], dtype=np.float64) + b_1
        inner[inner < 0] = 0
        assert claimed(25, "largest |FFN(x) - the formula in float64|").holds(
            [np.abs(down @ inner + b_2 - found[b, i]).max()]
        )


@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_commutes_with_permutations(gated: bool) -> None:
    mx.random.seed(0)
    network = FeedForward(TransformerConfig(vocab_size=8, d_model=32, heads=4, d_ff=64, gated=gated)).eval()
    x = mx.random.normal((2, 7, 32))
    order = mx.array([6, 2, 0, 5, 1, 3, 4])
    np.testing.assert_allclose(np.array(network(x[:, order])), np.array(network(x)[:, order]), atol=1e-6)
    changed = np.array(network(x.at[:, 3].add(1.0)) - network(x))
    assert np.abs(changed[:, [0, 1, 2, 4, 5, 6]]).max() < 1e-6
    assert np.abs(changed[:, 3]).max() > 1e-2


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary", "none"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_changes_a_result(kind: str, side: str) -> None:
    model = tiny(positions=kind).eval()
    source, target = [5, 6, 7, 8, 2], [1, 9, 10, 11]
    alone = np.array(model([source], [target]))
    pad, fill = [0] * 3, [9] * 3  # padding positions may hold anything
    mask = [[False] * 3 + [True] * 5] if side == "left" else [[True] * 5 + [False] * 3]
    mask.append([True] * 8)
    for filling in (pad, fill):
        row = filling + source if side == "left" else source + filling
        padded = np.array(model([row, [7] * 8], [[*target, 0, 0], [1] * 6], mask))
        np.testing.assert_allclose(padded[:1, :4], alone, atol=2e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")  # queries too short for a gradient on a GPU
def test_a_two_plus_two_stack_trains() -> None:
    """It learns to copy five random words out of nine: the loss falls from log(9) and more to almost nothing."""
    first, last = stacks.copying_losses()
    assert claimed(26, "loss of a 2+2 stack that copies five words of nine, first step").holds([first])
    assert claimed(26, "after 150 steps").holds([last])


def test_the_page_of_explain_tells_of_this_training() -> None:
    """To what other machines round otherwise: the first steps, and how both maps look."""
    told = json.loads((ROOT / "export/explain/walk/training.json").read_text(encoding="utf-8"))
    found = stacks.training_shown()
    assert (told["layer"], told["head"], told["words"]) == (found["layer"], found["head"], found["words"])
    np.testing.assert_allclose(told["losses"][:20], found["losses"][:20], rtol=1e-2)
    np.testing.assert_allclose(told["losses"], found["losses"], atol=0.3)
    np.testing.assert_allclose(told["before"], found["before"], atol=1e-3)
    assert np.argmax(told["after"], axis=1).tolist()[:5] == [0, 1, 2, 3, 4]
    assert np.argmax(found["after"], axis=1).tolist()[:5] == [0, 1, 2, 3, 4]


def test_the_classifier_gives_word_probabilities() -> None:
    model = tiny().eval()
    source, target = [[5, 6, 7, 2]], [[1, 9, 10]]
    logits = model(source, target)
    np.testing.assert_allclose(
        np.array(logits), np.array(model.hidden(source, target) @ model.embedding.weight.T), atol=1e-5
    )
    probabilities = mx.softmax(logits, axis=-1)
    assert probabilities.shape == (1, 3, 24)
    np.testing.assert_allclose(np.array(probabilities.sum(-1)), 1, rtol=1e-6)
    assert mx.array_equal(mx.argmax(probabilities, -1), mx.argmax(logits, -1)).item()


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_greedy_decoding_step_by_step(placement: str) -> None:
    """From the start token on: cached steps, uncached steps and the teacher-forced pass over the result agree."""
    model = tiny(norm_placement=placement, positions="rotary").eval()
    source = mx.array([[5, 6, 7, 8, 2], [9, 10, 2, 0, 0]])
    mask = np.array([[True] * 5, [True] * 3 + [False] * 2])
    memory = model.encode(source, mask)
    cache = model.start(memory, mask)
    tokens, stepped, end = mx.array([[1], [1]]), [], 12
    while tokens.shape[1] < end and not mx.all(mx.any(tokens == model.config.eos_id, axis=1)).item():
        logits = model.step(tokens[:, -1:], cache)
        np.testing.assert_allclose(
            np.array(logits[:, -1]), np.array(model.decode(tokens, memory, mask)[:, -1]), atol=2e-5
        )
        stepped.append(logits)
        tokens = mx.concatenate([tokens, mx.argmax(logits, axis=-1)], axis=1)
    forced = np.array(model.decode(tokens[:, :-1], memory, mask))
    np.testing.assert_allclose(np.array(mx.concatenate(stepped, axis=1)), forced, atol=2e-5)
    assert np.array_equal(forced.argmax(-1), np.array(tokens[:, 1:]))


def test_greedy_generation_runs_from_the_start_to_the_end_token() -> None:
    """Each generated token is the most probable one of the teacher-forced pass; the end token ends its row."""
    model = tiny(1, output_bias=True, tie_embeddings="none", norm_placement="pre").eval()
    pad, bos, eos = model.config.pad_id, model.config.bos_id, model.config.eos_id
    model.output_proj.bias[eos] = 2.5  # so that some rows end by themselves
    sources = [[5, 6, 7, eos], [9, 10, 11, 12, 13, eos], [20, eos], [7, 7, 8, eos]]
    outputs = model.generate(sources, max_new_tokens=9)
    ended = 0
    for source, output in zip(sources, outputs, strict=True):
        logits = np.array(model([source], [[bos, *output]]))[0]
        logits[:, [pad, bos]] = -np.inf  # never generated
        expected = logits.argmax(-1).tolist()
        assert expected[: len(output)] == output
        assert eos not in output
        if len(output) < 9:
            assert expected[len(output)] == eos
            ended += 1
    assert 0 < ended < 4
