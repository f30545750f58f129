"""A model in Marian's own file, read and computed without the import's code (`families/marian_files/`).

    .bin    u64 1 · u64 n · n x {u64 bytes of the name, u64 type, u64 rank, u64 bytes of the data} · names ·
            i32 shapes · u64 p · p bytes · data, all little-endian
    .npz    float32 arrays by name

`special:model.yml` holds the options. Integers q (type 0x4101) are followed by their multiplier m; the weights are
q * (1/m). Integer matrices are stored transposed, except embeddings.

`MarianNetwork` computes y = x W + b with the file's own names, a sentence at a time. It shares only NumPy with the
reference. Its arithmetic is any of these:

    float       float weights (integers: q * (1/m)), products in `dtype`
    exact       activations rounded by the file's scales, integer products, the rest in `dtype`
    saturating  like engines on AVX2: unsigned times signed bytes, sums of two neighbours saturated to 16 bits, the rest
                in float32 with fxtranslate's order of sums
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.options import Options
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_bytes

from . import Array, Origin

OPTIONS = "special:model.yml"
KINDS = {0x101: "<i1", 0x402: "<f2", 0x404: "<f4", 0x4101: "<i1"}
INTEGERS = 0x4101
MAX_MODEL_BYTES = 1 << 34


@dataclass(frozen=True)
class Tensor:
    """A tensor: integers with their multiplier, or floats."""

    values: Array
    multiplier: np.float32 | None = None

    def stored(self) -> Array:
        return self.values

    def numbers(self) -> NDArray[np.float32]:
        """Return the values as float32, integers divided by their multiplier."""
        numbers = self.values.astype(np.float32)
        return numbers if self.multiplier is None else numbers * (np.float32(1) / self.multiplier)


def read_marian(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a model: (tensors by name, options). Raises UserError if it isn't a Marian model."""
    data = read_bytes(path, MAX_MODEL_BYTES)
    try:
        tensors = dict(_of_npz(data) if path.suffix == ".npz" else _of_bin(data))
        options = tensors.pop(OPTIONS).values.astype(np.uint8).tobytes().rstrip(b"\0").decode()
    except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: no model of Marian that can be read: {error}") from error
    return tensors, _flat(options)


def model_of(path: Path) -> Path:
    """Find the model's file in a folder; a file is returned as it is. Raises UserError unless there is exactly one."""
    if path.is_file():
        return path
    files = [each for suffix in ("*.npz", "*.bin") for each in sorted(path.glob(suffix)) if "model" in each.name]
    files = [each for each in files if "optimizer" not in each.name]
    if len(files) != 1:
        raise UserError(f"{path}: expected one model.npz or model*.bin, found {len(files)}: give the file itself")
    return files[0]


def _of_npz(data: bytes) -> Iterator[tuple[str, Tensor]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for name in arrays:
            yield name, Tensor(arrays[name])


def _of_bin(data: bytes) -> Iterator[tuple[str, Tensor]]:
    version, count = (int(x) for x in np.frombuffer(data, "<u8", 2))
    if version != 1:
        raise ValueError(f"version {version}")
    heads = np.frombuffer(data, "<u8", 4 * count, 16).reshape(count, 4).astype(int)
    at, names, shapes = 16 + 32 * count, [], []
    for length, *_ in heads:
        names.append(data[at : at + length].rstrip(b"\0").decode())
        at += length
    for _, _, rank, _ in heads:
        shapes.append(tuple(int(x) for x in np.frombuffer(data, "<i4", rank, at)))
        at += 4 * rank
    at += 8 + int(np.frombuffer(data, "<u8", 1, at)[0])
    for name, shape, (_, kind, _, size) in zip(names, shapes, heads, strict=True):
        if kind not in KINDS:
            raise ValueError(f"{name} is of type {kind:#x}")
        values = np.frombuffer(data, KINDS[kind], math.prod(shape), at)
        multiplier = None
        if kind == INTEGERS:
            multiplier = np.frombuffer(data, "<f4", 1, at + values.size)[0]
            values = values.reshape(shape if "Wemb" in name else shape[::-1])
            values = values if "Wemb" in name else values.T
        yield name, Tensor(values.reshape(shape), multiplier)
        at += size


def _flat(text: str) -> dict[str, Any]:
    """Parse the `key: value` lines of a YAML text; lists and keys without a value are left out."""
    options: dict[str, Any] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        value = value.strip().strip("\"'")
        if key.strip() == key and value:
            options[key] = int(value) if value.lstrip("-").isdigit() else value
    return options


SHIFT = np.float32(127)


def in_turn(terms: Array) -> Array:
    """Sum over the last axis, term after term."""
    return np.cumsum(terms, axis=-1, dtype=terms.dtype)[..., -1]


def exactly(function: Any, x: Array) -> Array:
    """Compute exp, sin or a power in float64 and round once, like libm.

    The last bits of NumPy's float32 functions differ between CPUs.
    """
    return function(x.astype(np.float64)).astype(x.dtype)


@dataclass
class State:
    """A decoder's state. `source`: the encoder's output (S, d). `cells`: of SSRUs. `past`: keys and values."""

    source: Array
    position: int = 0
    cells: dict[str, Array] = field(default_factory=dict)
    past: dict[str, tuple[Array, Array]] = field(default_factory=dict)


class MarianNetwork:
    """A Marian network.

    items: {name: tensor} with `stored`, `numbers` and `multiplier`, e.g. `Tensor`. options: Marian's own. arithmetic:
    "float", "exact" or "saturating" (see the module's docstring).
    """

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
        """Read the network in a file, or in a folder with a single model. Raises UserError if there is none."""
        return cls(*read_marian(model_of(path)), arithmetic)

    def logits(self, source: Sequence[int], target: Sequence[int]) -> Array:
        """Compute the logits (T+1, V) after the start and after each target token."""
        state = State(self.encode(source))
        return np.stack([self.step(state, token) for token in [None, *target]])

    @property
    def vocabulary(self) -> int:
        """The number of target tokens."""
        return self.numbers("decoder_ff_logit_out_b").size

    @property
    def sources(self) -> int:
        """The number of source tokens."""
        return len(self.numbers("Wemb" if "Wemb" in self.items else "encoder_Wemb"))

    def translate(self, source: Sequence[int], limit: int, among: Sequence[int] | None = None) -> list[int]:
        """Translate greedily up to </s> (id 0) or `limit` tokens. among: the allowed ids; None allows all."""
        state, token, written = State(self.encode(source)), None, []
        while len(written) < limit:
            logits = self.step(state, token)
            token = int(logits.argmax()) if among is None else int(among[int(logits[list(among)].argmax())])
            if token == 0:
                break
            written.append(token)
        return written

    def encode(self, ids: Sequence[int]) -> Array:
        """Encode source ids (S,) to (S, d)."""
        x = self.embed("encoder", np.asarray(ids), 0)
        for i in range(1, self.options["enc-depth"] + 1):
            name = f"encoder_l{i}_self"
            x = self.around(f"{name}_Wo", x, lambda y, name=name: self.attend(name, y, *self.keys_values(name, y)))
            x = self.feed_forward(f"encoder_l{i}_ffn", x)
        return self.top("encoder", x)

    def step(self, state: State, token: int | None) -> Array:
        """Compute the logits (V,) after another token; None: the start, a vector of zeros."""
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
        """Apply a sub-layer with its norm and residual connection."""
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
        """Update an SSRU's cell, c = f c + (1 - f) u, and return ReLU(c)."""
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
        """Multiply x (L, K) by a matrix (K, N), or a table (N, K); bias (1, N)."""
        b = np.zeros((), self.dtype) if bias is None else self.numbers(bias)
        if self.arithmetic == "float":
            return x @ (self.numbers(name).T if table else self.numbers(name)) + b
        matrix = self.integers(name, table)
        rounded = np.rint(np.clip(x.astype(self.dtype) * matrix.a.astype(self.dtype), -127, 127))
        if self.arithmetic == "exact":
            return (rounded.astype(np.float64) @ matrix.q).astype(self.dtype) * matrix.scale.astype(self.dtype) + b
        shifted = rounded + 127
        # The classifier's product doesn't saturate in these engines: its sums have 32 bits.
        total = (shifted.astype(np.float64) @ matrix.q if table else matrix.saturated(shifted)).astype(np.float32)
        return total * matrix.scale + (b - SHIFT * matrix.scale * matrix.sums)

    def integers(self, name: str, table: bool) -> Integers:
        if name not in self._integers:
            item, activation = self.items[name], self.items["none_QuantMultA" if table else f"{name}_QuantMultA"]
            q = item.stored().T if table else item.stored()
            self._integers[name] = Integers(q, np.float32(activation.numbers().item()), item.multiplier)
        return self._integers[name]


class Integers:
    """An integer matrix q (K, N), its multiplier m, and its activations' scale a."""

    def __init__(self, q: Array, a: np.float32, m: np.float32) -> None:
        self.q, self.a, self.scale = q.astype(np.float64), a, np.float32(1) / (a * m)
        self.sums = self.q.sum(axis=0).astype(np.float32)
        # Only these pairs can exceed 16 bits, as activations are at most 254.
        self.pair, self.column = np.nonzero(np.abs(self.q[0::2]) + np.abs(self.q[1::2]) > (1 << 15) // 254)

    def saturated(self, x: Array) -> Array:
        """Multiply x (L, K), in 0 to 254, by q, with sums of two neighbours saturated to 16 bits."""
        first, second, n = 2 * self.pair, 2 * self.pair + 1, self.column
        pairs = x[:, first] * self.q[first, n] + x[:, second] * self.q[second, n]
        excess = np.clip(pairs, -(1 << 15), (1 << 15) - 1) - pairs
        row, at = np.nonzero(excess)
        total = x @ self.q
        np.add.at(total, (row, n[at]), excess[row, at])
        return total


MOST_POSITIONS = 256
"""The longest input, as NumPy is slow token by token."""
SPECIAL = 2
"""Number of special ids, which come first: end and unknown."""


class Marian(Origin):
    """Marian's own file of a model."""

    name = "marian"

    def __init__(self, path: Path, config: TransformerConfig):
        if config.architecture != "encoder-decoder":
            raise UserError(f"--against marian: Marian's models are encoder-decoders, this is an {config.architecture}")
        self.file, self.config = model_of(path), config
        self._read = read_marian(self.file)
        self.network = MarianNetwork(*self._read)

    def with_arithmetic(self, arithmetic: str) -> Marian:
        """Return the same file's network with another arithmetic."""
        other = copy(self)
        other.network = MarianNetwork(*self._read, arithmetic)
        return other

    @property
    def has_integers(self) -> bool:
        """Whether the file has integers, with the scales of their activations."""
        tensors = self._read[0]
        return "none_QuantMultA" in tensors and any(each.multiplier is not None for each in tensors.values())

    def described(self) -> str:
        version = self._read[1].get("version", "of no version")
        kind = "integers (intgemm8)" if self.has_integers else "floats"
        return f"Marian {version}: {kind}, computed in float64 from {self.file}, which is read apart from the import"

    def fitted(self, case: Case) -> Case | None:
        """Replace ids unknown to the file; None for inputs over `MOST_POSITIONS`.

        The checkpoint has an id more, and pads two vocabularies to the same size.
        """
        if case.ids.shape[1] > MOST_POSITIONS:
            return None
        n, targets = self.network.sources, case.target_ids
        ids = np.where(case.source_real, _known(case.ids, n), case.ids)
        if targets is not None:  # all tokens after the start
            known = _known(targets[:, 1:], self.network.vocabulary)
            targets = np.concatenate([targets[:, :1], known], axis=1)
        return replace(case, ids=ids, target_ids=targets)

    def fitted_row(self, row: list[int]) -> list[int]:
        return _known(np.array(row), self.network.sources).tolist()

    def outputs(self, case: Case) -> dict[str, Array]:
        assert case.target_ids is not None
        targets = _known(case.target_ids[:, 1:], self.network.vocabulary)  # all tokens after the start
        rows = [
            self.network.logits(source, target.tolist()) for source, target in zip(case.rows(), targets, strict=True)
        ]
        return {"logits": np.stack(rows).astype(np.float64)}

    def search(self, sources: Sequence[list[int]], name: str, options: Options) -> list[list[int]]:
        return [self.network.translate(source, options.max_new_tokens or 0) for source in sources]


def _known(ids: Array, size: int) -> Array:
    """Replace ids of `size` or more by ordinary ids below `size`."""
    return np.where(ids < size, ids, SPECIAL + ids % (size - SPECIAL))
