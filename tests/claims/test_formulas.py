"""The formulas of the claims and of the guide, evaluated beside the code that they are said of."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from claims import cost, feedforward, network, order, pictures, positions, recurrent, rejected, worked
from claims.formula import as_mathml, read
from claims.table import ROWS, called
from evaluated import IN_WORDS, Values, evaluated, softmax
from imports import ROOT
from mlx import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import output_weight_name, source_embedding_name
from mlx_transformer.core.positions import sinusoids
from mlx_transformer.decoding.options import Options
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.attention import Attention, attention_weights
from mlx_transformer.nn.attention import attention as attend
from mlx_transformer.nn.norms import LayerNorm
from mlx_transformer.training.optimizers import noam

D = 16
RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=(5, D)) for _ in range(3))
X = RNG.normal(size=(6, D))
P = np.eye(6)[[3, 0, 5, 1, 4, 2]]
TABLE = sinusoids(64, D, dtype=np.float64)


def of_mlx(function: Callable[..., mx.array], *axes: int) -> Callable[..., np.ndarray]:
    """The function on NumPy's float64, with axes of length 1 before those of its arguments."""

    def called_on(*arrays: Any) -> np.ndarray:
        given = (mx.array(np.asarray(a, np.float32)) for a in arrays)
        return np.array(function(*(each.reshape(*axes, *each.shape) for each in given)), float).squeeze()

    return lambda *arrays: called(called_on, *arrays)


def module() -> Attention:
    mx.random.seed(0)
    return Attention(TransformerConfig(vocab_size=8, d_model=D, heads=4))


def attend_self(x: np.ndarray) -> np.ndarray:
    return of_mlx(lambda y: (m := module()).attend(y, *m.keys_values(y)), 1)(x)


def projections() -> dict[str, np.ndarray]:
    own = module()
    names = {"Q": own.query_proj, "K": own.key_proj, "V": own.value_proj, "O": own.output_proj}
    return {name: np.array(linear.weight, float).T for name, linear in names.items()}


def split(name: str) -> dict[int, np.ndarray]:
    return {h + 1: part for h, part in enumerate(np.split(projections()[name], 4, axis=1))}


def multi_head() -> Values:
    """Without biases: they are zeros in a fresh module."""
    w, attention_of = projections(), of_mlx(attend, 1, 1)
    names = {f"W^{n}": split(n) for n in "QKV"} | {"W^O": w["O"]}
    heads = {h: attention_of(*(X @ split(n)[h] for n in "QKV")) for h in range(1, 5)}
    concat = lambda *parts: np.concatenate(parts, axis=-1)  # noqa: E731
    sizes = {"d_k": D // 4, "d_v": D // 4, "d": D, "x": X, "h": 4, "H": 4, "head": heads, "Concat": concat}
    return {**names, **sizes, "MultiHead": attend_self, "Attention": attention_of}


def one_head() -> Values:
    return {**multi_head(), "h": 2}


def of_positions() -> Values:
    return {
        "PE": lambda pos, j=None: TABLE[round(pos)] if j is None else TABLE[round(pos), round(j)],
        "d": D,
        "D": D,
        "t": 7,
        "k": 5,
        "pos": 9,
        "i": 3,
        "j": 3,
        "#j": D // 2,
    }


def concatenated() -> Values:
    table = sinusoids(64, D, "sinusoidal_concat", np.float64)
    return of_positions() | {"PE": lambda pos, j: table[round(pos), round(j)]}


def of_tensor2tensor() -> Values:
    signal = positions.timing_signal(64, D)
    values = {"PE": lambda pos, j: signal[round(pos), round(j)], "pos": 9, "j": 3, "d": D}
    return values | {"log": np.log}


def turned() -> Values:
    return of_positions() | {"w": 10000 ** (-2 * 3 / D)}


def feed_forward() -> Values:
    net, x = feedforward.base_feed_forward()
    up, down = net.up_proj, net.down_proj
    weights = {"W_1": up.weight.T, "b_1": up.bias, "W_2": down.weight.T, "b_2": down.bias}
    return {
        **{name: np.array(w, float) for name, w in weights.items()},
        "x": np.array(x[0], float),
        "FFN": of_mlx(net, 1),
    }


def one_hot() -> Values:
    table = nn.Embedding(9, D)
    return {
        "W": np.array(table.weight, float),
        "word": 4,
        "onehot": lambda i: np.eye(9)[round(i)],
        "E_word": np.array(table(mx.array(4)), float),
    }


def embedded() -> Values:
    config = TransformerConfig.preset("tiny", 24, d_model=D, dropout=0.0)
    model, seen = Transformer(config), dict[str, mx.array]()
    model.encode([[5, 6, 7]], tap=seen.__setitem__)
    word = model.weights()[source_embedding_name(config)][7]
    return {
        "d": D,
        "E_word": word,
        "PE": lambda pos: TABLE[round(pos)],
        "pos": 2,
        "x": np.array(seen["encoder.embedding"], float)[0, 2],
    }


def sub_layer() -> Values:
    """The encoder's first layer, its norms as fresh: gamma 1, beta 0."""
    from claims.residual import sub_layers

    layer = network.tiny(d_model=D).encoder.layers[0]
    of_it, norm = sub_layers(layer)[0]
    x = RNG.normal(size=(6, D))
    y = of_mlx(lambda each: norm(each + of_it(each)), 1)(x)
    return {"x": x, "y": y, "LayerNorm": of_mlx(norm), "Sublayer": of_mlx(of_it, 1)}


def recurrent_step() -> Values:
    net = recurrent.recurrent()
    x = RNG.normal(size=(5, recurrent.WIDTH))
    weights = {"W": net.Wxh, "U": net.Whh, "b": net.bias}
    return {**{n: np.array(w, float) for n, w in weights.items()}, "x": x, "h": of_mlx(net, 1)(x), "t": 3}


def of_positions_alone() -> Values:
    w = projections()
    own = module()
    scores = of_mlx(lambda pe: (own.queries(pe) * own.scale) @ own.keys_values(pe)[0].swapaxes(-1, -2), 1)
    return {"PE": TABLE[:6], "W_Q": w["Q"][:, :4], "W_K": w["K"][:, :4], "d_k": 4, "scores": scores(TABLE[:6])[0]}


def dictionary() -> Values:
    keys, values = np.eye(4), RNG.normal(size=(4, 3))
    return {"q": keys[2], "K": keys, "V": values, "v_j": values[2], "s": 1e6, "lim": 1}


def thinking() -> Values:
    q, k, v = worked._thinking()
    z = np.array(attend(q, k, v), float)[0, 0, 0]
    return {
        "z_1": z,
        "q_1": np.array(q)[0, 0, 0].astype(float),
        "k": np.array(k, float)[0, 0].T,
        "v": np.array(v, float)[0, 0],
    }


def cats() -> Values:
    first, _ = worked.sums()
    word = np.array(called(worked.looked_up), float)[0, 1]
    return {"x": first, "E_CAT": word, "P": {1: np.array(worked.POSITIONS[1]), 5: np.array(worked.POSITIONS[5])}}


def weights_of(x: np.ndarray) -> np.ndarray:
    own = module()
    return of_mlx(lambda y: own.weights(y, own.keys_values(y)[0])[:, :1], 1)(x)


def relative_scores() -> Values:
    ids = network.ids_of(order.SHIFTED.split(), [*order.IN_FRONT.split(), *order.SHIFTED.split()])
    before, after = (network.all_scores(each, "rotary")[2] for each in ids)

    def score(a: float, b: float) -> float:
        return (after if min(a, b) >= 4 else before)[round(a), round(b)]

    return {"score": score, "i": 3, "j": 1, "k": 2}


def self_and_cross() -> Values:
    w = {f"W_{name}": matrix[:, :4] for name, matrix in projections().items()}
    own = module()

    def first(x: mx.array, memory: mx.array) -> mx.array:
        return attend(own.queries(x)[:, :1], *(part[:, :1] for part in own.keys_values(memory)))

    cross = of_mlx(first, 1)
    return {**w, "x": X, "Attention": of_mlx(attend, 1, 1), "Self": lambda x: cross(x, x), "Cross": cross}


def normalised() -> Values:
    x, norm = RNG.normal(3, 2, D), LayerNorm(D, 1e-5)
    norm.weight, norm.bias = (mx.array(RNG.normal(size=D)) for _ in range(2))
    return {
        "γ": np.diag(np.array(norm.weight, float)),
        "β": np.array(norm.bias, float),
        "x": x,
        "μ": x.mean(),
        "σ": x.std(),
        "ε": 1e-5,
        "normed": of_mlx(norm, 1)(x),
    }


def masked() -> Values:
    mask = np.where(np.tri(5, dtype=bool), 0, -np.inf)
    found = of_mlx(lambda q, k, m: attention_weights(q, k, mask=m[0, 0] == 0), 1, 1)(Q, K, mask)
    return {"Q": Q, "K": K, "M": mask, "d_k": D, "weights": found}


def distances() -> Values:
    from claims.trained import _distances

    maps = softmax(RNG.normal(size=(1, 2, 1, 6)))
    [(_, distance)] = _distances(maps)
    return {
        "w_a": lambda i, j: maps[0, 0, 0, round(j)],
        "w_b": lambda i, j: maps[0, 1, 0, round(j)],
        "i": 0,
        "#j": 6,
        "distance": distance,
    }


def patches() -> Values:
    reader, drawn = pictures.PictureReader(), pictures.pictures(1, seed=0)[0]
    return {
        "x_i": np.array(reader.vectors(drawn), float)[0, 3],
        "W": np.array(reader.projection.weight, float),
        "patch": pictures.patches_of(drawn)[0].astype(float),
        "i": 3,
        "b": np.array(reader.projection.bias, float),
    }


def both_norms() -> Values:
    return {"x": X, "LN": of_mlx(LayerNorm(D, 1e-5)), "BN": of_mlx(nn.BatchNorm(6, eps=1e-5))}


def probabilities() -> Values:
    model = network.tiny(d_model=D)
    h = RNG.normal(size=(3, D))
    found = of_mlx(lambda y: mx.softmax(model.logits(y), axis=-1), 1)(h)
    return {"h": h, "W": model.weights()[output_weight_name(model.config)], "p": found}


def cosine() -> Values:
    a, b = RNG.normal(size=(2, D))
    return {"a": a, "b": b, "cos": lambda x, y: np.inner(x, y) / np.sqrt(np.inner(x, x) * np.inner(y, y))}


OF_ATTENTION = {"Q": Q, "K": K, "V": V, "d_k": D, "Attention": of_mlx(attend, 1, 1)}
PERMUTED = {"P": P, "x": X, "Attn": attend_self, "W": weights_of}

EQUATIONS: dict[int, tuple[int, Callable[[], Values]]] = {
    1: (1, one_hot), 2: (2, of_positions), 3: (2, concatenated), 10: (1, of_positions), 11: (1, turned),
    14: (1, embedded), 15: (1, lambda: OF_ATTENTION),
    16: (1, lambda: {**OF_ATTENTION, "A": of_mlx(attention_weights, 1, 1)(Q, K)}),
    17: (1, lambda: {"x": X / np.linalg.norm(X, axis=1, keepdims=True), "i": 2, "j": 4}),
    19: (1, lambda: PERMUTED), 20: (3, multi_head), 25: (1, feed_forward), 27: (1, probabilities),
    32: (1, dictionary), 33: (1, recurrent_step), 36: (1, cosine), 40: (1, both_norms), 41: (1, patches),
    43: (1, cats), 44: (1, lambda: PERMUTED), 47: (1, relative_scores), 50: (1, thinking), 51: (2, of_tensor2tensor),
    52: (2, self_and_cross),
}  # fmt: skip
"""Row -> how many of its equations hold, and values for their names."""

VALUES: dict[int, tuple[str, Callable[[], Values]]] = {
    4: ("sum", lambda: {"x_pos": X[2], "P_pos": TABLE[2], "sum": X[2] + positions.added(4, D)[2]}),
    5: ("found", lambda: {"x_pos": X[2], "pos": 3, "found": rejected.append_position(X)[2]}),
    6: ("found", lambda: {"pos": 3, "n": 9, "found": rejected.normalised_positions(9)[3]}),
    7: ("found", lambda: {"pos": 11, "found": rejected.single_sine(11)[0]}),
    8: ("found", lambda: {"pos": 11, "found": positions.sine_cosine([11], 1)[0]}),
    9: ("found", lambda: {"pos": 11, "found": positions.sine_cosine([11], 1, 0.5)[0]}),
    21: ("weights", masked), 22: ("y", sub_layer), 23: ("normed", normalised), 37: ("scores", of_positions_alone),
    39: ("found", lambda: {"d": 512, "found": cost.layer_size(512)}), 42: ("distance", distances),
}  # fmt: skip
"""Row -> what its formula is the value of, and values for the names."""


@pytest.mark.parametrize("number", [*EQUATIONS, *VALUES])
def test_the_formula_of_a_row_is_what_the_code_computes(number: int) -> None:
    formula = ROWS[number].formula
    if number in EQUATIONS:
        count, values = EQUATIONS[number]
        assert evaluated(formula, values(), 2e-5) == count
    else:
        name, values = VALUES[number]
        assert evaluated(f"{name} = {formula}", values(), 2e-5) == 1


def test_every_row_is_evaluated_or_named() -> None:
    assert {*EQUATIONS, *VALUES} | IN_WORDS == set(ROWS)
    assert not {*EQUATIONS, *VALUES} & IN_WORDS


def of_noam() -> Values:
    return {"D": 512, "warmup": 4000, "step": 900, "rate": noam(900, 512, 4000)}


def of_penalty() -> Values:
    return {"alpha": 0.6, "n": 7, "lp": lambda n: float(Options(length_penalty=0.6).penalty(n))}


GUIDE: dict[str, list[tuple[int, Callable[[], Values]]]] = {
    "attention": [(1, lambda: OF_ATTENTION)],
    "decoding": [(1, of_penalty)],
    "feedforward": [(1, feed_forward)],
    "heads": [(1, one_head), (1, multi_head)],
    "optimizer": [(1, of_noam)],
    "positions": [(1, of_positions), (1, of_positions), (1, turned)],
    "residual": [(1, sub_layer)],
}


def formulas(page: Path) -> list[str]:
    """Those of a page: indented lines outside of code, several in a line if far apart."""
    text = re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    return [each for line in lines for each in re.split(r" {4,}", line)]


def test_the_formulas_of_the_guide_are_what_the_code_computes() -> None:
    found = {page.stem: formulas(page) for page in sorted((ROOT / "docs/guide").glob("*.md"))}
    assert {name: len(each) for name, each in found.items() if each} == {n: len(each) for n, each in GUIDE.items()}
    for name, checks in GUIDE.items():
        for formula, (count, values) in zip(found[name], checks, strict=True):
            assert evaluated(formula, values(), 2e-5) == count, formula


@pytest.mark.parametrize(
    ("formula", "wrong"),
    [
        ("PE(pos, 2i) = sin(pos / 10000^(2i/d))", "PE(pos, 2i) = sin(pos / 10000^(i/d))"),
        ("PE(pos, 2i+1) = cos(pos / 10000^(2i/d))", "PE(pos, 2i+1) = sin(pos / 10000^(2i/d))"),
    ],
)
def test_another_exponent_or_function_is_seen(formula: str, wrong: str) -> None:
    assert evaluated(formula, of_positions()) == 1
    with pytest.raises(AssertionError):
        evaluated(wrong, of_positions())


def test_a_transposed_rotation_is_seen() -> None:
    formula = ROWS[11].formula
    with pytest.raises(AssertionError):
        evaluated(formula.replace("sin(k w); -sin(k w)", "-sin(k w); sin(k w)"), turned(), 2e-5)


@pytest.mark.parametrize(
    ("formula", "inside"),
    [
        ("a_i / √d", "<mfrac><mrow><msub><mrow><mi>a</mi></mrow><mrow><mi>i</mi></mrow></msub></mrow><mrow><msqrt>"),
        ("M = [a, b; -c, d]", "<mtable><mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr><mtr><mtd><mo>−</mo>"),
        ("y_(<t) ≥ 2", "<msub><mrow><mi>y</mi></mrow><mrow><mo>&lt;</mo><mi>t</mi></mrow></msub><mo>≥</mo><mn>2</mn>"),
        ("f(x) for x = 1,000", "<mtext>&nbsp;for&nbsp;</mtext><mi>x</mi><mo>=</mo><mn>1,000</mn>"),
    ],
)
def test_formulas_as_mathml(formula: str, inside: str) -> None:
    assert inside in as_mathml(formula)
    for row in ROWS.values():
        as_mathml(row.formula)
    assert as_mathml("exact copies of n words") == "exact copies of n words"


@pytest.mark.parametrize("formula", ["(a", "a + ", "a ) b", "|a", "= /"])
def test_what_is_no_formula_is_said(formula: str) -> None:
    with pytest.raises(ValueError, match=re.escape(formula.split()[0])):
        read(formula)
