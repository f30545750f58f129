"""Scaled dot-product attention and its heads."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.attention import Attention, attention, attention_weights, split_heads
from mlx_transformer.nn.layers import DecoderLayer, no_tap
from mlx_transformer.nn.parameters import named_parameters

from .cost import multiplications
from .drawing import SERIES, canvas, draw_key, heat_map, label_cells, logarithmic, write_cells
from .measure import largest, number
from .row import Found, Row, above, below, equal
from .sentences import RIVER, looks, read, translator

WIDTHS = (4, 16, 64, 256, 1024)


def scaled_dot_product() -> Found:
    mx.random.seed(0)
    q, k, v = (mx.random.normal((1, 1, 6, 512)) for _ in range(3))
    weights = np.array(attention_weights(q, k))[0, 0]
    Q, K, V = (np.array(a, dtype=np.float64)[0, 0] for a in (q, k, v))
    scores = np.exp(Q @ K.T / math.sqrt(512))
    expected = scores / scores.sum(axis=1, keepdims=True) @ V
    words, made = boxes()
    return {
        "shape of the weights of (6, 512)": weights.shape,
        "sums of its rows": weights.sum(axis=1).tolist(),
        "largest error of the fused kernel beside float64": np.abs(np.array(attention(q, k, v))[0, 0] - expected).max(),
        "On the river bank, a head of layer 1: bank to river": made["softmax"][
            words.index("bank"), words.index("river")
        ],
    }


def boxes() -> tuple[list[str], dict[str, np.ndarray]]:
    """Words, and what stands in each box from their vectors to a head's output: of the translator that ships, the head
    of layer 1 that looks most from bank to river."""
    trained = translator()
    source, target, _ = read(trained, RIVER)
    seen: dict[str, mx.array] = {}
    trained.model([source], [target], tap=seen.__setitem__)
    x, module = seen["encoder.embedding"], trained.model.encoder.layers[0].self_attention
    head = int(looks(trained, RIVER, "bank", "river")[0].argmax())
    q, k, v = (each[:, head : head + 1] for each in (module.queries(x), *module.keys_values(x)))
    products, weights = q @ k.swapaxes(-1, -2), attention_weights(q, k)
    made = {
        "X, the words": x[None],
        "Q = X W_Q": q,
        "K = X W_K": k,
        "V = X W_V": v,
        "Q K^T": products,
        "÷ √16": products / math.sqrt(q.shape[-1]),
        "softmax": weights,
        "times V": weights @ v,
    }
    return trained.words(source), {name: np.array(values)[0, 0] for name, values in made.items()}


def draw_boxes() -> Any:
    """From the words' vectors to a head's output: linear maps, scores, scale, softmax, times V."""
    words, made = boxes()
    figure, panels = canvas(4, 2, width=10.4, height=4.6)
    for axes, (title, values) in zip(panels, made.items(), strict=True):
        heat_map(axes, values, signed=title != "softmax", most=1.0 if title == "softmax" else None)
        square = values.shape == (len(words), len(words))
        label_cells(axes, words, words if square else [], size=7)
        if square:
            write_cells(axes, [[f"{value:.2f}" for value in row] for row in values], size=6)
        else:
            axes.set_xlabel(f"{values.shape[1]} features", fontsize=7.5)
        axes.set_title(title)
        draw_key(axes)
    return figure


def special_case() -> Found:
    """A decoder layer whose two attentions have the same weights: self-attention, and cross-attention by memory."""
    mx.random.seed(0)
    layer = DecoderLayer(TransformerConfig(vocab_size=8, d_model=64, heads=4, d_ff=64, dropout=0.0))
    layer.cross_attention.update(layer.self_attention.parameters())
    x, other = mx.random.normal((1, 6, 64)), mx.random.normal((1, 6, 64))
    itself = layer.attend_self(x, mask=None, rotation=None, past=None, tap=no_tap)

    def crossed(memory: mx.array) -> mx.array:
        return layer.attend_cross(x, cross=layer.cross_attention.keys_values(memory), mask=None, tap=no_tap)

    return {
        "largest |self-attention of x - cross-attention of x with memory x|": largest(itself - crossed(x)),
        "the same with another memory": largest(itself - crossed(other)),
    }


def without_parameters() -> Found:
    parameters = dict(named_parameters(Attention(TransformerConfig(vocab_size=8))))
    others = sum(value.size for name, value in parameters.items() if "_proj." not in name)
    mx.random.seed(1)
    x = mx.random.normal((1, 1, 6, 512))
    x = x / mx.linalg.norm(x, axis=-1, keepdims=True) * math.sqrt(512)
    unequal = mx.array([[1, 0], [3, 0.5], [0, 1]])[None, None]
    return {
        "parameters beside the projections": others,
        "where each of six rows looks most": mx.argmax(attention_weights(x, x)[0, 0], axis=-1).tolist(),
        "where (1, 0), (3, 0.5) and (0, 1) do": mx.argmax(attention_weights(unequal, unequal)[0, 0], axis=-1).tolist(),
        "share of rows that look most at themselves, fresh projections": _own_share(),
    }


def _own_share() -> float:
    """Rows of heads with fresh projections whose largest weight is on the diagonal, over sixteen sentences."""
    mx.random.seed(0)
    module, x = Attention(TransformerConfig(vocab_size=8)), mx.random.normal((16, 9, 512))
    weights = module.weights(x, module.keys_values(x)[0])
    return number(mx.mean((mx.argmax(weights, axis=-1) == mx.arange(9)).astype(mx.float32)))


def root_of_width() -> Found:
    widths, variances, kept, lost = saturation()
    q = mx.zeros((1, 1, 1, 64)).at[..., 0].add(112)
    k = mx.zeros((1, 1, 2, 64)).at[:, :, 0, 0].add(1)  # the products are 112 and 0
    first, second = np.array(attention_weights(q, k)[0, 0, 0], dtype=np.float64)
    return {
        "112 / sqrt(64), from the odds of two weights": math.log(first / second),
        "Var(q · k) / d_k, d_k = 4, 16, 64, 256, 1024": (variances / widths).tolist(),
        "gradient of the scaled softmax, d_k = 1024 / 4": kept[-1] / kept[0],
        "of the unscaled": lost[-1] / lost[0],
    }


def saturation() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """By d_k of random queries and keys: d_k, the products' variance, and the sum of w (1 - w), the diagonal of the
    softmax's Jacobian, with the scale and without it."""
    mx.random.seed(0)
    variances, kept, lost = [], [], []
    for d_k in WIDTHS:
        q, k = mx.random.normal((1, 1, 256, d_k)), mx.random.normal((1, 1, 64, d_k))
        variances.append(number(mx.var(q @ k.swapaxes(-1, -2))))
        for slopes, scale in ((kept, None), (lost, 1.0)):
            w = attention_weights(q, k, scale=scale)
            slopes.append(number(mx.mean(mx.sum(w * (1 - w), axis=-1))))
    return np.array(WIDTHS, dtype=np.float64), np.array(variances), np.array(kept), np.array(lost)


ASKED = (4, 0, 2)


def dictionary() -> tuple[mx.array, mx.array]:
    """Six keys of length 1 and their values, (1, 1, 6, 64) each."""
    mx.random.seed(0)
    k = mx.random.normal((1, 1, 6, 64))
    return k / mx.linalg.norm(k, axis=-1, keepdims=True), mx.random.normal((1, 1, 6, 64))


def look_up() -> Found:
    k, v = dictionary()
    asked = mx.array(ASKED)
    far = [largest(attention(k[:, :, asked] * s, k, v) - v[:, :, asked]) for s in (1e6, 1.0)]
    return {"error of the value that is asked for, scores times a million": far[0], "times one": far[1]}


def draw_look_ups() -> Any:
    """Each query is one of the keys: from a mean of all values to that of the one, as its scores grow."""
    k, _ = dictionary()
    figure, panels = canvas(len(ASKED), width=8.4, height=2.2)
    for axes, key in zip(panels, ASKED, strict=True):
        rows = [np.array(attention_weights(k[:, :, key : key + 1] * times, k))[0, 0, 0] for times in GROWN]
        heat_map(axes, np.stack(rows), most=1.0)
        label_cells(axes, [f"x {times:g}" for times in GROWN], [f"{n + 1}" for n in range(6)])
        axes.set(title=f"the query is key {key + 1}", xlabel="key")
    draw_key(panels[-1])
    return figure


GROWN = (1.0, 8.0, 32.0, 1e6)
"""The factor of a look-up's scores."""


def many_heads() -> Found:
    config = TransformerConfig(vocab_size=8)
    return {
        "d_k and d_v of the paper's base model": [config.d_k, config.d_v],
        "multiplications of 1, 8 and 16 heads / those of one": [
            multiplications(heads, 10) / multiplications(1, 10) for heads in (1, 8, 16)
        ],
        "largest |split heads - a loop over heads|": loop_difference(),
        "features of a sub-layer of 8 heads of 64": config.heads * config.d_v,
        "largest difference of two heads that share W": shared_projections(),
    }


def shared_projections() -> float:
    """Eight heads whose columns of W_Q, W_K and W_V are those of the first."""
    mx.random.seed(0)
    module, x = Attention(TransformerConfig(vocab_size=8)), mx.random.normal((2, 5, 512))
    for projection in (module.query_proj, module.key_proj, module.value_proj):
        projection.weight = mx.tile(projection.weight[:64], (8, 1))
    heads = attention(split_heads(module.query_proj(x), 8), *module.keys_values(x))
    return largest(heads - heads[:, :1])


def eight_heads() -> tuple[Attention, mx.array, list[mx.array]]:
    """An attention, its input (2, 5, 512), and what each head makes of its own columns, (2, 5, 64) each."""
    mx.random.seed(0)
    module, x = Attention(TransformerConfig(vocab_size=8)), mx.random.normal((2, 5, 512))
    heads = []
    for h in range(8):
        own = slice(64 * h, 64 * (h + 1))
        scores = module.query_proj(x)[..., own] @ module.key_proj(x)[..., own].swapaxes(1, 2) / 8
        heads.append(mx.softmax(scores, axis=-1) @ module.value_proj(x)[..., own])
    return module, x, heads


def loop_difference() -> float:
    """Between heads that are split of one product and each head on its own columns."""
    module, x, heads = eight_heads()
    looped = module.output_proj(mx.concatenate(heads, axis=-1))
    return largest(module.attend(x, *module.keys_values(x)) - looped)


def draw_side_by_side() -> Any:
    """The heads' outputs for five positions, one beside the other, and what the last matrix mixes of them."""
    module, _, heads = eight_heads()
    joined = mx.concatenate(heads, axis=-1)
    figure, panels = canvas(1, 2, width=8.4, height=2.8)
    drawn = {"Concat(head_1, ..., head_8)": joined, "Concat(head_1, ..., head_8) W^O": module.output_proj(joined)}
    for axes, (title, values) in zip(panels, drawn.items(), strict=True):
        heat_map(axes, np.array(values)[0], signed=True)
        axes.set(title=title, xticks=[], yticks=[], ylabel="position")
        draw_key(axes, 1.01)
    for h in range(8):
        if h:
            panels[0].axvline(64 * h - 0.5, color=SERIES[2], linewidth=0.8)
        panels[0].text(64 * h + 31.5, 4.9, f"head {h + 1}", ha="center", va="center", fontsize=7)
    return figure


def draw_saturation() -> Any:
    figure, (variance, slope) = canvas(2)
    widths, variances, kept, lost = saturation()
    variance.plot(widths, variances, "o-", color=SERIES[1], markersize=4, label="q · k")
    variance.plot(widths, variances / widths, "o-", color=SERIES[0], markersize=4, label="q · k / √d_k")
    variance.set(title="variance of the products", xlabel="d_k")
    logarithmic(variance, x=True)
    slope.plot(widths, lost, "o-", color=SERIES[1], markersize=4, label="without the scale")
    slope.plot(widths, kept, "o-", color=SERIES[0], markersize=4, label="with it")
    slope.set(title="gradient of the softmax, Σ w (1 - w)", xlabel="d_k", ylim=(0, 1.05))
    logarithmic(slope, x=True, y=False)
    for axes, corner in ((variance, "upper left"), (slope, "lower left")):
        axes.grid(True, linewidth=0.6)
        axes.legend(loc=corner)
    return figure


ROWS = (
    Row(
        15,
        "Scaled dot-product attention: each word takes a mean of all values, weighted by query times key.",
        "Attention(Q, K, V) = softmax(Q K^T / √d_k) V",
        {
            "shape of the weights of (6, 512)": equal(6, 6),
            "sums of its rows": equal(*[1] * 6, within=1e-6),
            "largest error of the fused kernel beside float64": below(1e-5),
            "On the river bank, a head of layer 1: bank to river": above(0.6),
        },
        scaled_dot_product,
        (attention, attention_weights),
        ("claims/test_attention.py::test_scaled_dot_product_attention",),
        figure=draw_boxes,
    ),
    Row(
        17,
        "Attention itself has no parameters: those of a layer are its projections.",
        "x_i · x_i ≥ x_i · x_j for rows of one length",
        {
            "parameters beside the projections": equal(0),
            "where each of six rows looks most": equal(*range(6)),
            "where (1, 0), (3, 0.5) and (0, 1) do": equal(1, 1, 2),
            "share of rows that look most at themselves, fresh projections": below(0.3),
        },
        without_parameters,
        (attention,),
        ("claims/test_attention.py::test_attention_itself_has_no_parameters",),
        slip="The notes say that the diagonal is the highest. It is where Q = K = X and all rows have one length: "
        "(1, 0) looks at (3, 0.5), and with projections few rows look at themselves.",
    ),
    Row(
        18,
        "Why √d_k: products of d_k terms have variance d_k, and a softmax of large numbers has no gradient.",
        "Var(q · k) = d_k; d softmax_i / d s_i = w_i (1 - w_i)",
        {
            "112 / sqrt(64), from the odds of two weights": equal(14, within=1e-5),
            "Var(q · k) / d_k, d_k = 4, 16, 64, 256, 1024": equal(*[1] * 5, within=0.2),
            "gradient of the scaled softmax, d_k = 1024 / 4": above(0.95),
            "of the unscaled": below(0.1),
        },
        root_of_width,
        (attention_weights,),
        (
            "claims/test_attention.py::test_scores_are_divided_by_the_root_of_d_k",
            "claims/test_attention.py::test_products_have_variance_d_k_and_kill_the_gradient_unscaled",
        ),
        figure=draw_saturation,
    ),
    Row(
        20,
        "h heads of width d/h cost as much as one of width d: they are columns of the same product.",
        "MultiHead(x) = Concat(head_1, ..., head_h) W^O, d_k = d_v = d/h",
        {
            "d_k and d_v of the paper's base model": equal(64, 64),
            "multiplications of 1, 8 and 16 heads / those of one": equal(1, 1, 1),
            "largest |split heads - a loop over heads|": below(1e-5),
            "features of a sub-layer of 8 heads of 64": equal(512),
            "largest difference of two heads that share W": below(1e-5),
        },
        many_heads,
        (Attention, split_heads),
        (
            "claims/test_attention.py::test_heads_split_one_projection",
            "claims/test_attention.py::test_many_heads_cost_as_much_as_one",
        ),
        figure=draw_side_by_side,
        slip="The notes write head_i without an i at its W, which would make all heads equal, and say that heads are "
        "narrow to reduce costs: 8 heads of 64 cost what one of 512 does.",
    ),
    Row(
        32,
        "Attention is a dictionary look-up gone soft: with growing scores it returns the value of the one key.",
        "lim softmax(s · q K^T) V = v_j for q = k_j and s → ∞",
        {
            "error of the value that is asked for, scores times a million": equal(0),
            "times one": above(0.1),
        },
        look_up,
        (attention,),
        ("claims/test_attention.py::test_a_dictionary_look_up_in_the_limit",),
        figure=draw_look_ups,
    ),
    Row(
        52,
        "Self-attention is attention whose queries, keys and values come from one place.",
        "Self(x) = Attention(Q = x W_Q, K = x W_K, V = x W_V) = Cross(x, memory = x)",
        {
            "largest |self-attention of x - cross-attention of x with memory x|": equal(0),
            "the same with another memory": above(0.1),
        },
        special_case,
        (DecoderLayer.attend_self, DecoderLayer.attend_cross),
        ("claims/test_attention.py::test_cross_attention_reads_its_memory",),
    ),
)
