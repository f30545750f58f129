"""What the notes claim about attention, heads and masks."""

import math

import mlx.core as mx
import numpy as np
import pytest
from claims import attention as study
from claims import worked_table
from claims.table import claimed
from mlx.utils import tree_flatten

from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.attention import Attention, attention, attention_weights, merge_heads, split_heads
from mlx_transformer.nn.masks import as_array, causal_mask, causal_padding_mask, padding_mask

SENTENCE = "YOUR CAT IS A LOVELY CAT".split()


def encoder(**changes) -> Transformer:
    mx.random.seed(3)
    options = dict(architecture="encoder", decoder_layers=0, encoder_layers=1, vocab_size=12, dropout=0.0)
    return Transformer(TransformerConfig(**{**options, "d_model": 512, "heads": 8, "d_ff": 64, **changes})).eval()


def ids_of(words: list[str]) -> list[list[int]]:
    vocabulary = sorted(set(words))
    return [[3 + vocabulary.index(word) for word in words]]


def test_scaled_dot_product_attention() -> None:
    mx.random.seed(0)
    q, k, v = (mx.random.normal((1, 1, 6, 512)) for _ in range(3))
    weights = attention_weights(q, k)
    assert weights.shape == (1, 1, 6, 6)
    np.testing.assert_allclose(np.array(weights.sum(-1)), 1, rtol=1e-6)
    Q, K, V = (np.array(a, dtype=np.float64)[0, 0] for a in (q, k, v))
    scores = np.exp(Q @ K.T / math.sqrt(512))
    expected = scores / scores.sum(axis=1, keepdims=True) @ V
    np.testing.assert_allclose(np.array(attention(q, k, v))[0, 0], expected, atol=1e-5)
    np.testing.assert_allclose(np.array(weights @ v)[0, 0], expected, atol=1e-5)


def sentence_weights(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Attention weights (6, 6) of the first head, and its input (6, 512), for the worked sentence."""
    model = encoder(positions=kind)
    seen = {}
    model.encode(ids_of(SENTENCE), tap=seen.__setitem__)
    x = seen["encoder.embedding"]
    heads = model.encoder.layers[0].self_attention
    weights = heads.weights(x, heads.keys_values(x)[0])
    assert weights.shape == (1, 8, 6, 6)
    return np.array(weights)[0, 0], np.array(x)[0]


def test_worked_table_of_your_cat_is_a_lovely_cat() -> None:
    plain, x = sentence_weights("none")
    assert x.shape == (6, 512)
    np.testing.assert_allclose(plain[1], plain[5], rtol=1e-5)  # both CATs
    placed, _ = sentence_weights("sinusoidal")
    assert np.abs(placed[1] - placed[5]).max() > 1e-3
    lines = worked_table.attention_table(SENTENCE, SENTENCE, placed).splitlines()
    assert lines[0].split() == [*SENTENCE, "sum"]
    assert [line.split()[0] for line in lines[1:]] == SENTENCE
    assert [line.split()[-1] for line in lines[1:]] == ["1.000"] * 6
    assert lines[2].split()[1] == f"{placed[1, 0]:.3f}"
    assert len({len(line) for line in lines}) == 1
    with pytest.raises(ValueError, match="words ask for"):
        worked_table.attention_table(SENTENCE, SENTENCE[:5], placed)


def test_the_table_of_the_notes_is_of_no_symmetric_scores() -> None:
    """Any symmetric scores leave nothing, positions or not; other keys than queries do, and rounding hardly does."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(6, 8))
    for keys, symmetric in ((x, True), (x @ rng.normal(size=(8, 8)), False)):
        scores = np.exp(x @ keys.T / math.sqrt(8))
        weights = scores / scores.sum(axis=1, keepdims=True)
        assert (worked_table.asymmetry(weights) < 1e-12) == symmetric
        loop = weights[4, 3] * weights[3, 2] * weights[2, 4] - weights[4, 2] * weights[2, 3] * weights[3, 4]
        assert (abs(loop) < 1e-12) == symmetric
    rounded = [np.array(worked_table.NOTES) + rng.uniform(-5e-4, 5e-4, (6, 6)) for _ in range(200)]
    moved = max(
        abs(worked_table.asymmetry(weights) - claimed(16, "of the notes' table").values[0]) for weights in rounded
    )
    assert 0.004 < moved < claimed(16, "of it explained by rounding to three decimals, at most").values[0] + 1e-3
    assert np.argmax(worked_table.NOTES, axis=1).tolist() == list(range(6))


def test_attention_itself_has_no_parameters() -> None:
    module = Attention(TransformerConfig(vocab_size=8))
    named = dict(tree_flatten(module.parameters()))
    assert set(named) == {f"{part}_proj.weight" for part in ("query", "key", "value", "output")}
    # Without projections, on rows of equal norm, every word looks most at itself.
    mx.random.seed(1)
    x = mx.random.normal((1, 1, 6, 512))
    x = x / mx.linalg.norm(x, axis=-1, keepdims=True) * math.sqrt(512)
    weights = attention_weights(x, x)[0, 0]
    assert mx.argmax(weights, axis=-1).tolist() == [0, 1, 2, 3, 4, 5]


def test_scores_are_divided_by_the_root_of_d_k() -> None:
    scaled = claimed(18, "112 / sqrt(64), from the odds of two weights")
    assert scaled.holds([112 / math.sqrt(64)])
    # Two keys whose products with q are 112 and 0: the weights' odds are exp(14).
    q = mx.zeros((1, 1, 1, 64)).at[..., 0].add(112)
    k = mx.zeros((1, 1, 2, 64)).at[:, :, 0, 0].add(1)
    first, second = attention_weights(q, k)[0, 0, 0].tolist()
    assert scaled.holds([math.log(first / second)])


def test_products_have_variance_d_k_and_kill_the_gradient_unscaled() -> None:
    mx.random.seed(0)
    kept, lost = [], []
    for d_k in (4, 64, 1024):
        q, k = mx.random.normal((1, 1, 256, d_k)), mx.random.normal((1, 1, 64, d_k))
        products = q @ k.swapaxes(-1, -2)
        np.testing.assert_allclose(mx.var(products).item(), d_k, rtol=0.2)
        np.testing.assert_allclose(mx.var(products).item() / d_k, mx.var(products / math.sqrt(d_k)).item(), rtol=1e-4)

        def slope(q, scale):  # size of the softmax's Jacobian on its diagonal: w (1 - w)
            w = attention_weights(q * scale, k)  # noqa: B023
            return mx.mean(mx.sum(w * (1 - w), axis=-1)).item()

        kept.append(slope(q, 1.0))
        lost.append(slope(q, math.sqrt(d_k)))  # undoes the scale
    assert claimed(18, "gradient of the scaled softmax, d_k = 1024 / 4").holds([kept[2] / kept[0]])
    assert lost[0] > lost[1] > lost[2]
    assert lost[2] < kept[2] / 10


def test_attention_alone_is_blind_to_order() -> None:
    mx.random.seed(0)
    config = TransformerConfig(vocab_size=8, d_model=64, heads=4)
    module, x = Attention(config), mx.random.normal((1, 6, 64))
    order = mx.array([3, 0, 5, 1, 4, 2])

    def attend(x):
        return module.attend(x, *module.keys_values(x), None)

    np.testing.assert_allclose(np.array(attend(x[:, order])), np.array(attend(x)[:, order]), atol=1e-6)


def test_lion_kills_deer_needs_positions() -> None:
    lion, kills, deer = 3, 4, 5
    outputs = {}
    for kind in ("none", "sinusoidal"):
        model = encoder(positions=kind)
        outputs[kind] = np.array(model.encode([[lion, kills, deer], [deer, kills, lion]]))
    for word, (here, there) in {"lion": (0, 2), "kills": (1, 1), "deer": (2, 0)}.items():
        np.testing.assert_allclose(outputs["none"][0, here], outputs["none"][1, there], atol=1e-5, err_msg=word)
        assert np.abs(outputs["sinusoidal"][0, here] - outputs["sinusoidal"][1, there]).max() > 1e-2, word


def test_heads_split_one_projection() -> None:
    config = TransformerConfig(vocab_size=8)  # the paper's 512 / 8
    assert claimed(20, "d_k and d_v of the paper's base model").holds([config.d_k, config.d_v])
    mx.random.seed(0)
    module, x = Attention(config), mx.random.normal((2, 5, 512))
    k, v = module.keys_values(x)
    q = module.query_proj(x)
    heads = []
    for h in range(8):  # each head on its own 64 columns
        own = slice(64 * h, 64 * (h + 1))
        scores = q[..., own] @ module.key_proj(x)[..., own].swapaxes(1, 2) / 8
        heads.append(mx.softmax(scores, axis=-1) @ module.value_proj(x)[..., own])
    looped = module.output_proj(mx.concatenate(heads, axis=-1))
    np.testing.assert_allclose(np.array(module.attend(x, k, v, None)), np.array(looped), atol=1e-5)
    assert mx.array_equal(merge_heads(split_heads(x, 8)), x).item()


def test_many_heads_cost_as_much_as_one() -> None:
    def multiplications(heads: int) -> int:
        module, x = Attention(TransformerConfig(vocab_size=8, heads=heads)), mx.zeros((1, 10, 512))
        k, v = module.keys_values(x)
        q = split_heads(module.query_proj(x), heads)
        weights = module.weights(x, k)
        projections = sum(10 * weight.size for _, weight in tree_flatten(module.parameters()))
        scores = weights.size * q.shape[-1]  # each score is a product over d_k
        mixed = weights.size * v.shape[-1]
        return projections + scores + mixed

    assert multiplications(8) == multiplications(1) == multiplications(16)


def test_a_masked_weight_is_exactly_zero() -> None:
    mx.random.seed(0)
    q = mx.random.normal((2, 3, 5, 16))
    tokens = mx.array([[True, True, True, False, False], [False, True, True, True, True]])
    for mask in ("causal", causal_mask(5, 5), padding_mask(tokens), causal_padding_mask(tokens)):
        allowed = np.broadcast_to(np.array(as_array(mask, 5, 5)), (2, 3, 5, 5))
        weights = np.array(attention_weights(q, q, mask))
        assert not weights[~allowed].any()
        assert (weights[allowed] > 0).all()
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
        np.testing.assert_allclose(np.array(attention(q, q, q, mask)), weights @ np.array(q), atol=1e-5)
    assert np.array(causal_mask(3, 3)).tolist() == [[True, False, False], [True, True, False], [True] * 3]
    assert np.array(causal_mask(2, 4)).tolist() == [[True, True, True, False], [True] * 4]


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_a_future_token_changes_no_earlier_output(placement: str) -> None:
    config = TransformerConfig.preset("tiny", 30, d_model=32, d_ff=32, norm_placement=placement)
    model = Transformer(config).eval()
    source = [[5, 6, 7, 2]]
    one, other = [[1, 10, 11, 12, 13]], [[1, 10, 11, 20, 21]]
    a, b = np.array(model(source, one)), np.array(model(source, other))
    np.testing.assert_array_equal(a[:, :3], b[:, :3])
    assert np.abs(a[:, 3:] - b[:, 3:]).max() > 1e-2


def test_a_dictionary_look_up_in_the_limit() -> None:
    mx.random.seed(0)
    k = mx.random.normal((1, 1, 6, 64))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    v = mx.random.normal((1, 1, 6, 64))
    asked = mx.array([4, 0, 2])
    found = {scale: attention(k[:, :, asked] * scale, k, v) for scale in (1.0, 1e6)}
    assert mx.array_equal(found[1e6], v[:, :, asked]).item()
    assert mx.abs(found[1.0] - v[:, :, asked]).max().item() > 0.1  # softly, all values are mixed


@pytest.mark.usefixtures("on_cpu")
def test_cross_attention_reads_its_memory() -> None:
    """Memory x gives what self-attention of x gives, x itself being the query in both; the weights alone don't."""
    found = study.special_case()
    same, other = found.values()
    assert claimed(52, "largest |self-attention of x - cross-attention of x with memory x|").holds([same])
    assert not claimed(52, "largest |self-attention of x - cross-attention of x with memory x|").holds([other])
