"""The cost of attention: multiplications, parameters, memory; and time, which is recorded and never asserted."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.nn.attention import Attention, attention_weights, split_heads
from mlx_transformer.nn.layers import EncoderLayer
from mlx_transformer.nn.parameters import named_parameters

from .drawing import Table, canvas, curves, logarithmic
from .recurrent import WIDTH, recurrent
from .row import RECORDED, Found, Row, above, equal

LENGTHS = (64, 128, 256, 512, 1024)

ROUNDS = 2


def multiplications(heads: int, n: int, d_model: int = 512) -> int:
    """Of one self-attention over n positions, from the arrays that it makes."""
    module, x = Attention(TransformerConfig(vocab_size=8, heads=heads, d_model=d_model)), mx.zeros((1, n, d_model))
    k, v = module.keys_values(x)
    q, weights = split_heads(module.query_proj(x), heads), module.weights(x, k)
    projections = n * sum(weight.size for _, weight in named_parameters(module))
    return projections + weights.size * (q.shape[-1] + v.shape[-1])  # a score is a product over d_k


def growth() -> Found:
    bytes_ = weight_bytes()
    quadratic = [_slope(LENGTHS, bytes_), _slope(LENGTHS, [n * 512 for n in LENGTHS])]
    times, steps = times_by_length()
    return {
        "slope of the bytes of the weights over n, between logarithms; of the activations": quadratic,
        "bytes of the weights of a head, n = 64 and 1024": [bytes_[0], bytes_[-1]],
        "measured slope of attention's time, the last doubling": _slope(LENGTHS[-2:], times[-2:]),
        "measured slope of the recurrent net's": _slope(LENGTHS[-2:], steps[-2:]),
    }


def weight_bytes() -> list[int]:
    return [attention_weights(mx.zeros((1, 1, n, 64)), mx.zeros((1, 1, n, 64))).nbytes for n in LENGTHS]


def _slope(lengths: tuple[int, ...], values: list[int] | list[float] | np.ndarray) -> float:
    return float(np.polyfit(np.log(lengths), np.log(np.asarray(values, dtype=np.float64)), 1)[0])


@lru_cache
def times_by_length() -> tuple[list[float], list[float]]:
    """Seconds of attention's weights and values, and of a recurrent net of the same width, at `LENGTHS`; least of a
    few rounds."""
    network = recurrent()

    def heads(n: int) -> mx.array:
        x = mx.random.normal((1, 2, n, WIDTH // 2))
        mx.eval(x)
        return x

    attended, stepped = [], []
    for n in LENGTHS:
        q = heads(n)
        x = q.reshape(1, n, WIDTH)
        attended.append(_least(lambda q=q: attention_weights(q, q) @ q))
        stepped.append(_least(lambda x=x: network(x)))
    return attended, stepped


@lru_cache
def powers_of_two() -> Found:
    """CPU time of a multiplication in a linear layer of 510 over that in one of 512, over 256 tokens."""
    products = []
    for width in (512, 510):
        x, weight = mx.random.normal((256, width)), mx.random.normal((4 * width, width))
        mx.eval(x, weight)
        products.append(lambda x=x, w=weight: x @ w.T)
    turns = [[_least(product, 1) for product in products] for _ in range(4 * ROUNDS)]  # other work disturbs both
    least = np.min(turns, axis=0) / np.square((512, 510))
    return {"CPU time of a multiplication, width 510 / width 512": least[1] / least[0]}


MACHINES = {"x86-64 server (AMD EPYC), one thread": (0.98, 0.99, 0.98)}
"""The results of three runs of `powers_of_two` elsewhere."""


def list_by_machine() -> Table:
    (here,) = powers_of_two().values()
    rows = [("this machine, now", f"{here:.2f}")]
    rows += [(machine, ", ".join(f"{ratio:.2f}" for ratio in ratios)) for machine, ratios in MACHINES.items()]
    return Table(("machine", "time of a multiplication, width 510 / width 512"), tuple(rows))


def _least(function: Callable[[], mx.array], rounds: int = ROUNDS) -> float:
    mx.eval(function())
    times = []
    for _ in range(rounds):
        begin = time.process_time()  # other work on the machine disturbs little
        mx.eval(function())
        times.append(time.process_time() - begin)
    return min(times)


def double_width() -> Found:
    single, double = (layer_size(d) for d in (512, 1024))
    attention = [multiplications(8, 100, d) for d in (512, 1024)]
    layers = [layer_multiplications(100, d) for d in (512, 1024)]
    return {
        "parameters of an encoder layer, d = 512 and 1024": [single, double],
        "multiplications of an encoder layer over 100 positions, the same": layers,
        "of its self-attention alone": attention,
        "parameters, and multiplications of the layer, twice the width / once": [
            double / single,
            layers[1] / layers[0],
        ],
    }


def layer(d_model: int) -> EncoderLayer:
    return EncoderLayer(TransformerConfig(vocab_size=8, d_model=d_model, heads=8, d_ff=4 * d_model))


def layer_size(d_model: int) -> int:
    return sum(weight.size for _, weight in named_parameters(layer(d_model)))


def layer_multiplications(n: int, d_model: int) -> int:
    """Of self-attention and of the feed-forward net, whose matrices every position goes through."""
    matrices = [weight for _, weight in named_parameters(layer(d_model).feed_forward) if weight.ndim == 2]
    return multiplications(8, n, d_model) + n * sum(matrix.size for matrix in matrices)


GROUPS = {
    "embedding": r"embedding\.weight",
    "self-attention": r".*\.self_attention\.(query|key|value|output)_proj\.weight",
    "cross-attention": r".*\.cross_attention\.(query|key|value|output)_proj\.weight",
    "feed-forward": r".*\.feed_forward\.(up|down)_proj\.(weight|bias)",
    "norms": r".*_norm\.(weight|bias)",
}
"""Parameters of each group by their names."""


def groups(config: TransformerConfig) -> dict[str, int]:
    """Numbers of a model in each of `GROUPS`, and in whatever is none of them."""
    found = dict.fromkeys((*GROUPS, "others"), 0)
    for name, shape in parameter_shapes(config).items():
        group = next((group for group, names in GROUPS.items() if re.fullmatch(names, name)), "others")
        found[group] += math.prod(shape)
    return found


def attention_alone() -> Found:
    base = TransformerConfig.preset("base", 37_000)
    recurrent_decoder = TransformerConfig.preset("base", 37_000, decoder_self_attention="ssru")
    found = groups(base)
    return {
        "numbers of the base model, 37,000 words": sum(found.values()),
        "embedding, self-attention, cross-attention, feed-forward, norms": [found[name] for name in GROUPS],
        "of no such group": found["others"],
        "the same with a recurrent unit in the decoder": groups(recurrent_decoder)["others"],
    }


def list_groups() -> Table:
    found = groups(TransformerConfig.preset("base", 37_000))
    whole = sum(found.values())
    rows = [(name, f"{size:,}", f"{size / whole:.2%}") for name, size in found.items()]
    return Table(("group", "numbers", "share"), (*rows, ("all", f"{whole:,}", f"{1:.2%}")))


def draw_growth() -> Any:
    figure, (memory, time) = canvas(2)
    n = np.array(LENGTHS)
    attended, stepped = times_by_length()
    held = {"weights of a head, slope 2": weight_bytes(), "activations, slope 1": n * 512 * 4}
    spent = {"attention": 1e3 * np.array(attended), "recurrent, step by step": 1e3 * np.array(stepped)}
    for axes, values, title in (
        (memory, held, "bytes"),
        (time, spent, "milliseconds of CPU time, as measured here"),
    ):
        curves(axes, n, values, "upper left", 8)
        axes.set(title=title, xlabel="positions")
        logarithmic(axes, x=True)
        axes.set_xticks(n, [str(length) for length in n])
    return figure


def list_double_width() -> Table:
    found = double_width()
    rows = []
    labels = (
        "parameters of an encoder layer",
        "multiplications of the layer, 100 positions",
        "multiplications of its self-attention",
    )
    for label, name in zip(labels, found, strict=False):
        one, two = found[name]  # type: ignore
        rows.append((label, f"{one:,}", f"{two:,}", f"{two / one:.2f}"))
    return Table(("quantity", "added: d = 512", "appended: d = 1024", "times"), tuple(rows))


ROWS = (
    Row(
        29,
        "All positions are computed at once, with n weights for each of n positions.",
        "n^2 weights; n · d activations",
        {
            "slope of the bytes of the weights over n, between logarithms; of the activations": equal(
                2, 1, within=1e-9
            ),
            "bytes of the weights of a head, n = 64 and 1024": equal(16_384, 4_194_304),
            "measured slope of attention's time, the last doubling": RECORDED,
            "measured slope of the recurrent net's": RECORDED,
        },
        growth,
        (attention_weights,),
        ("claims/test_beside.py::test_multiplications_grow_with_the_square_of_the_length",),
        figure=draw_growth,
    ),
    Row(
        31,
        "Sizes that are powers of two are said to run faster: 510 beside 512, measured on this machine.",
        "CPU time of (256, d) · (d, 4d) / d^2, d = 510 over d = 512",
        {"CPU time of a multiplication, width 510 / width 512": RECORDED},
        powers_of_two,
        (powers_of_two,),
        ("claims/test_beside.py::test_a_slower_width_would_be_seen",),
        table=list_by_machine,
        slip="The notes say that powers of two run faster. That is a matter of the machine: look at the number.",
    ),
    Row(
        39,
        "Appending positions would double the width: four times the parameters, and nearly four times the work.",
        "12 d^2 + 9 d for an encoder layer of inner width 4d, without attention's biases",
        {
            "parameters of an encoder layer, d = 512 and 1024": equal(3_150_336, 12_592_128),
            "multiplications of an encoder layer over 100 positions, the same": equal(324_812_800, 1_278_771_200),
            "of its self-attention alone": equal(115_097_600, 439_910_400),
            "parameters, and multiplications of the layer, twice the width / once": equal(4, 3.937, within=0.003),
        },
        double_width,
        (EncoderLayer,),
        ("claims/test_beside.py::test_twice_the_width_by_the_formula",),
        table=list_double_width,
    ),
    Row(
        55,
        "The first transduction model on attention alone: nothing in it is recurrent or a convolution.",
        "embedding + 18 attentions + 12 feed-forward nets + 30 norms",
        {
            "numbers of the base model, 37,000 words": equal(63_045_632),
            "embedding, self-attention, cross-attention, feed-forward, norms": equal(
                18_944_000, 12_582_912, 6_291_456, 25_196_544, 30_720
            ),
            "of no such group": equal(0),
            "the same with a recurrent unit in the decoder": above(0),
        },
        attention_alone,
        (parameter_shapes,),
        ("claims/test_beside.py::test_a_recurrent_cell_is_in_no_group",),
        table=list_groups,
    ),
)
