"""Marian's network in NumPy, from the tensors of its own file and their names: y = x W + b, a sentence at a time.

It shares nothing with the reference but NumPy, and computes in one of these ways:

    float       numbers of the weights (integers: q * (1/m)), products in `dtype`
    exact       activations rounded by the file's scales, products of integers, the rest in `dtype`
    saturating  the same as the engines with AVX2 do it: unsigned times signed bytes, two neighbours summed into 16 bits
                that can't hold them, and all else in float32 in the order in which fxtranslate adds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .marian_file import model_of, read_marian

Array = NDArray[Any]
SHIFT = np.float32(127)


def in_turn(terms: Array) -> Array:
    """Return the sum over the last axis, one term after another."""
    return np.cumsum(terms, axis=-1, dtype=terms.dtype)[..., -1]


def exactly(function: Any, x: Array) -> Array:
    """Return exp, sin or a power as libm has it, rounded once from float64; NumPy's own of float32 has other last
    bits, and others on each processor."""
    return function(x.astype(np.float64)).astype(x.dtype)


@dataclass
class State:
    """The memory of decoding: the cells of SSRUs, or keys and values, and those of the source."""

    source: Array
    position: int = 0
    cells: dict[str, Array] = field(default_factory=dict)
    past: dict[str, tuple[Array, Array]] = field(default_factory=dict)


class MarianNetwork:
    """A model of `items` ({name: tensor}; `stored`, `numbers` and `multiplier` of each are read) with its `options`;
    arithmetic: as above."""

    def __init__(
        self, items: Mapping[str, Any], options: Mapping[str, Any], arithmetic: str = "float", dtype: Any = np.float64
    ) -> None:
        self.items, self.options = items, options
        self.arithmetic, self.dtype = arithmetic, np.dtype(np.float32 if arithmetic == "saturating" else dtype)
        self.heads, self.width = options["transformer-heads"], options["dim-emb"]
        self.recurrent = options.get("transformer-decoder-autoreg") == "rnn"
        self.pre = options.get("transformer-preprocess") == "n"
        self._numbers: dict[str, Array] = {}
        self._integers: dict[str, Integers] = {}

    @classmethod
    def read(cls, path: Path, arithmetic: str = "float") -> MarianNetwork:
        """Return the network of a file, or of the one in a folder; `UserError` if there is none."""
        return cls(*read_marian(model_of(path)), arithmetic)

    def logits(self, source: Sequence[int], target: Sequence[int]) -> Array:
        """Return the logits (T+1, V) after the start, and after each token of a target."""
        state = State(self.encode(source))
        return np.stack([self.step(state, token) for token in [None, *target]])

    @property
    def vocabulary(self) -> int:
        """How many tokens it writes."""
        return self.numbers("decoder_ff_logit_out_b").size

    @property
    def sources(self) -> int:
        """How many tokens it reads."""
        return len(self.numbers("Wemb" if "Wemb" in self.items else "encoder_Wemb"))

    def translate(self, source: Sequence[int], limit: int, among: Sequence[int] | None = None) -> list[int]:
        """Return greedy output up to </s>, 0, or `limit` tokens; among: the only ids that may be chosen."""
        state, token, written = State(self.encode(source)), None, []
        while len(written) < limit:
            logits = self.step(state, token)
            token = int(logits.argmax()) if among is None else int(among[int(logits[list(among)].argmax())])
            if token == 0:
                break
            written.append(token)
        return written

    def encode(self, ids: Sequence[int]) -> Array:
        """Return the encoder's output (S, d)."""
        x = self.embed("encoder", np.asarray(ids), 0)
        for i in range(1, self.options["enc-depth"] + 1):
            name = f"encoder_l{i}_self"
            x = self.around(f"{name}_Wo", x, lambda y, name=name: self.attend(name, y, *self.keys_values(name, y)))
            x = self.feed_forward(f"encoder_l{i}_ffn", x)
        return self.top("encoder", x)

    def step(self, state: State, token: int | None) -> Array:
        """Return the logits (V,) after one more token; None: at the start, which is a vector of zeros."""
        x = self.embed("decoder", None if token is None else np.array([token]), state.position)
        for i in range(1, self.options["dec-depth"] + 1):
            layer = f"decoder_l{i}"
            if self.recurrent:
                x = self.around(f"{layer}_rnn_ffn", x, lambda y, n=f"{layer}_rnn": self.recur(n, y, state))
            else:
                x = self.around(f"{layer}_self_Wo", x, lambda y, n=f"{layer}_self": self.look_back(n, y, state))
            name = f"{layer}_context"
            x = self.around(f"{name}_Wo", x, lambda y, name=name: self.attend(name, y, *self.of_source(name, state)))
            x = self.feed_forward(f"{layer}_ffn", x)
        state.position += 1
        return self.output(self.top("decoder", x))[0]

    def embed(self, stack: str, ids: Array | None, first: int) -> Array:
        table = self.numbers("Wemb" if "Wemb" in self.items else f"{stack}_Wemb")
        rows = np.zeros((1, self.width), self.dtype) if ids is None else table[ids]
        scale = np.sqrt(np.asarray(self.width, self.dtype))
        return scale * rows + self.positions(np.arange(first, first + len(rows)))

    def positions(self, at: Array) -> Array:
        half = self.width // 2
        if self.arithmetic == "saturating":
            exponent = np.arange(half, dtype=np.float32) / np.float32(half - 1)
            angle = at[:, None].astype(np.float32) * exactly(lambda x: np.float64(np.float32(1e-4)) ** x, exponent)
            angles = np.concatenate([angle, angle + np.float32(np.pi / 2)], axis=1)
            return exactly(np.sin, angles)
        angle = at[:, None] * 10000.0 ** (-np.arange(half) / (half - 1))
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(self.dtype)

    def around(self, name: str, x: Array, sublayer: Any) -> Array:
        """Return a sub-layer's output with the norms and the sum around it."""
        if self.pre:
            of = name.removesuffix("_ffn") if name.endswith("_rnn_ffn") else name
            return sublayer(self.norm(of, x, "_pre")) + x
        return self.norm(name, sublayer(x) + x)

    def top(self, stack: str, x: Array) -> Array:
        return self.norm(f"{stack}_top", x) if self.options.get("transformer-postprocess-top") == "n" else x

    def norm(self, name: str, x: Array, suffix: str = "") -> Array:
        n, epsilon = np.asarray(self.width, self.dtype), np.asarray(1e-6, self.dtype)
        gamma, beta = (self.numbers(f"{name}_ln_{part}{suffix}")[0] for part in ("scale", "bias"))
        mean = (in_turn(x) / n)[:, None]
        variance = (in_turn((x - mean) * (x - mean)) / n)[:, None]
        return (x - mean) / np.sqrt(variance + epsilon) * gamma + beta

    def feed_forward(self, name: str, x: Array) -> Array:
        def net(y: Array) -> Array:
            y = self.affine(name, "1", y)
            swish = self.options.get("transformer-ffn-activation", "swish") == "swish"
            return self.affine(name, "2", y / (1 + np.exp(-y)) if swish else np.maximum(y, 0))

        return self.around(f"{name}_ffn", x, net)

    def recur(self, name: str, x: Array, state: State) -> Array:
        """Compute c = f c + (1 - f) u, of which the part above zero goes on."""
        f = 1 / (1 + exactly(np.exp, -self.affine(name, "f", x)))
        u = self.product(f"{name}_W", x)
        state.cells[name] = f * state.cells.get(name, np.zeros_like(u)) + (1 - f) * u
        return np.maximum(state.cells[name], 0)

    def look_back(self, name: str, x: Array, state: State) -> Array:
        new = self.keys_values(name, x)
        cached = state.past.get(name)
        joined = (
            new if cached is None else tuple(np.concatenate(pair, axis=0) for pair in zip(cached, new, strict=True))
        )
        state.past[name] = joined  # type: ignore[assignment]
        return self.attend(name, x, *joined)

    def of_source(self, name: str, state: State) -> tuple[Array, Array]:
        if name not in state.past:
            state.past[name] = self.keys_values(name, state.source)
        return state.past[name]

    def keys_values(self, name: str, x: Array) -> tuple[Array, Array]:
        return self.affine(name, "k", x), self.affine(name, "v", x)

    def attend(self, name: str, x: Array, keys: Array, values: Array) -> Array:
        q, k, v = (self.split(part) for part in (self.affine(name, "q", x), keys, values))  # (H, ., d_h)
        scale = np.asarray(1 / np.sqrt(np.float32(q.shape[-1])) if self.dtype == np.float32 else q.shape[-1] ** -0.5)
        scores = in_turn(q[:, :, None] * k[:, None]) * scale.astype(self.dtype)  # (H, L, S)
        powers = exactly(np.exp, scores - scores.max(axis=-1, keepdims=True))
        weights = powers / in_turn(powers)[..., None]
        context = in_turn(weights[:, :, None] * v.transpose(0, 2, 1)[:, None])  # (H, L, d_h)
        return self.affine(name, "o", context.transpose(1, 0, 2).reshape(len(x), -1))

    def split(self, x: Array) -> Array:
        return x.reshape(len(x), self.heads, -1).transpose(1, 0, 2)

    def affine(self, name: str, part: str, x: Array) -> Array:
        return self.product(f"{name}_W{part}", x, f"{name}_b{part}")

    def output(self, x: Array) -> Array:
        bias = "decoder_ff_logit_out_b"
        if "decoder_ff_logit_out_W" in self.items:
            return self.product("decoder_ff_logit_out_W", x, bias)
        tables = ("decoder_ff_logit_out_Wt", "decoder_Wemb", "Wemb")
        return self.product(next(name for name in tables if name in self.items), x, bias, table=True)

    def numbers(self, name: str) -> Array:
        if name not in self._numbers:
            self._numbers[name] = self.items[name].numbers().astype(self.dtype)
        return self._numbers[name]

    def product(self, name: str, x: Array, bias: str | None = None, table: bool = False) -> Array:
        """Return x (L, K) times a matrix (K, N), or a table (N, K); bias (1, N)."""
        b = np.zeros((), self.dtype) if bias is None else self.numbers(bias)
        if self.arithmetic == "float":
            return x @ (self.numbers(name).T if table else self.numbers(name)) + b
        matrix = self.integers(name, table)
        rounded = np.rint(np.clip(x.astype(self.dtype) * matrix.a.astype(self.dtype), -127, 127))
        if self.arithmetic == "exact":
            return (rounded.astype(np.float64) @ matrix.q).astype(self.dtype) * matrix.scale.astype(self.dtype) + b
        shifted = rounded + 127
        # The last product, as wide as the vocabulary, goes another way there, with sums of 32 bits.
        total = (shifted.astype(np.float64) @ matrix.q if table else matrix.saturated(shifted)).astype(np.float32)
        return total * matrix.scale + (b - SHIFT * matrix.scale * matrix.sums)

    def integers(self, name: str, table: bool) -> Integers:
        if name not in self._integers:
            item, activation = self.items[name], self.items["none_QuantMultA" if table else f"{name}_QuantMultA"]
            q = item.stored().T if table else item.stored()
            self._integers[name] = Integers(q, np.float32(activation.numbers().item()), item.multiplier)
        return self._integers[name]


class Integers:
    """A matrix q (K, N) of integers, its multiplier m and the scale a of what it is multiplied with."""

    def __init__(self, q: Array, a: np.float32, m: np.float32) -> None:
        self.q, self.a, self.scale = q.astype(np.float64), a, np.float32(1) / (a * m)
        self.sums = self.q.sum(axis=0).astype(np.float32)
        # Only such pairs can leave 16 bits, as the other factors are at most 254.
        self.pair, self.column = np.nonzero(np.abs(self.q[0::2]) + np.abs(self.q[1::2]) > (1 << 15) // 254)

    def saturated(self, x: Array) -> Array:
        """Return sums over k of x (L, K), from 0 to 254, times q, where two neighbours are held to 16 bits."""
        first, second, n = 2 * self.pair, 2 * self.pair + 1, self.column
        pairs = x[:, first] * self.q[first, n] + x[:, second] * self.q[second, n]
        excess = np.clip(pairs, -(1 << 15), (1 << 15) - 1) - pairs
        row, at = np.nonzero(excess)
        total = x @ self.q
        np.add.at(total, (row, n[at]), excess[row, at])
        return total
