"""Quantised matrices as mlx-lm stores them: integers or short floats, with a scale for each group in a row.

A quantised NAME.weight (O, D) is stored as two or three tensors, with G = D / group_size groups in each row:

    NAME.weight (O, D * bits / 32) uint32    q: value i of a row is in bits i * bits to (i + 1) * bits, lowest first
    NAME.scales, NAME.biases (O, G)          affine: w = scale * q + bias
    NAME.scales (O, G) uint8                 mxfp4, mxfp8, nvfp4: w = value of the scale * value of q

The short floats are defined in the OCP's specification of microscaling formats: mxfp4 has E2M1 with scales E8M0, mxfp8
E4M3 with E8M0, nvfp4 E2M1 with E4M3. Their products are exact in bfloat16. Groups of 16 with biases come from GGUF; MLX
doesn't support them, and runs these matrices in float32.

config.json has group_size, bits and mode under the key "quantization", and exceptions by path. As in mlx-lm, a layer is
quantised if its scales are in the file; shapes decide for paths without an entry. An affine matrix is computed in
float32: scales and biases of lower precision are converted first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import Name, UserError
from mlx_transformer.system.tensors import some_rows, to_float32

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
"""MLX's group sizes."""
ANY_GROUP = (16, *GROUP_SIZES)
SHORT_FLOATS = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
"""{mode: its only group size and number of bits}"""
MODES = ("affine", *SHORT_FLOATS)
KEY, SAME_KEY = "quantization", "quantization_config"
"""Key in config.json, and mlx-lm's copy of it for other programs."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Scheme:
    """Quantisation of a matrix: groups of `group_size` neighbours in a row share a scale and, if affine, a bias.

    Raises `UserError` for unsupported sizes.
    """

    group_size: int = 64
    bits: int = 4
    mode: str = "affine"

    def __post_init__(self) -> None:
        sizes = ((size,) for size in SHORT_FLOATS[self.mode]) if self.mode in SHORT_FLOATS else (ANY_GROUP, BITS)
        for name, choices in zip(("mode", "group_size", "bits"), (MODES, *sizes), strict=True):
            value = getattr(self, name)
            if type(value) is not type(choices[0]) or value not in choices:
                said = ", ".join(map(str, choices))
                raise UserError("quantization: {}: choose one of {}", Name(name, repr(value)), said)

    @staticmethod
    def of(mode: str, group_size: int | None = None, bits: int | None = None) -> Scheme:
        """The scheme of a mode; None: the mode's usual size."""
        of_groups, of_bits = SHORT_FLOATS.get(mode, (64, 4))
        return Scheme(of_groups if group_size is None else group_size, of_bits if bits is None else bits, mode)

    @property
    def affine(self) -> bool:
        return self.mode == "affine"

    @property
    def runs_in_mlx(self) -> bool:
        """Whether MLX computes with the integers; otherwise it dequantises the matrix to float32."""
        return not self.affine or self.group_size in GROUP_SIZES

    def divides(self, shape: Shape) -> bool:
        """Whether a matrix (O, D) can be split into groups of this size."""
        return len(shape) == 2 and shape[1] % self.group_size == 0

    def tensors(self, name: str) -> tuple[str, ...]:
        """The names of the tensors that store a matrix NAME.weight: NAME.weight, NAME.scales, if affine NAME.biases."""
        path = name.removesuffix(".weight")
        return name, f"{path}.scales", *([f"{path}.biases"] if self.affine else [])

    def shapes(self, name: str, shape: Shape) -> dict[str, Shape]:
        """The shapes of `tensors`, for a matrix (O, D)."""
        rows, width = shape
        groups = (rows, width // self.group_size)
        return dict(zip(self.tensors(name), ((rows, width * self.bits // 32), groups, groups), strict=False))

    def fits(self, name: str, shape: Shape, stored: Mapping[str, Shape]) -> bool:
        """Whether `stored` has the tensors of a matrix (O, D) of this scheme, by their shapes."""
        own = {part: stored.get(part) for part in (*self.tensors(name), *AFFINE.tensors(name))}
        return self.divides(shape) and own == {**dict.fromkeys(own), **self.shapes(name, shape)}

    def packed(self, name: str, tensors: Mapping[str, Any]) -> Packed:
        """The matrix of `tensors` (arrays by name)."""
        return Packed.of((tensors[each] for each in self.tensors(name)), self)

    @property
    def levels(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(the value of each code of q, the value of each code of a scale), for short floats."""
        kinds = {"mxfp4": ("E2M1", "E8M0"), "mxfp8": ("E4M3", "E8M0"), "nvfp4": ("E2M1", "E4M3")}[self.mode]
        return values_of(kinds[0]), values_of(kinds[1])

    def entry(self) -> dict[str, Any]:
        """The layer's entry in config.json; affine is mlx-lm's default mode."""
        return {name: value for name, value in asdict(self).items() if value != "affine"}

    def __str__(self) -> str:
        of_mlx = "" if self.runs_in_mlx else ", which MLX runs as float32"
        return f"{self.bits} bits{'' if self.affine else f' ({self.mode})'} in groups of {self.group_size}{of_mlx}"


Quantization = Mapping[str, Scheme]
"""{parameter: its scheme} of a checkpoint's quantised matrices."""


def stored_shapes(shapes: Mapping[str, Shape], quantization: Quantization) -> dict[str, Shape]:
    """A parameter table with each quantised matrix replaced by its stored tensors."""
    stored: dict[str, Shape] = {}
    for name, shape in shapes.items():
        stored |= quantization[name].shapes(name, shape) if name in quantization else {name: shape}
    return stored


def to_config(quantization: Quantization) -> dict[str, Any]:
    """The entry for config.json: the most frequent scheme, and the other layers' schemes by path."""
    [(common, _)] = Counter(quantization.values()).most_common(1)
    others = {name.removesuffix(".weight"): s.entry() for name, s in quantization.items() if s != common}
    return {**asdict(common), **others}


def from_config(values: Any, stored: Mapping[str, Shape], matrices: Mapping[str, Shape]) -> dict[str, Scheme]:
    """Read config.json's entry; returns {parameter: scheme}.

    stored: shapes of the tensors in the weights file. matrices: those that can be quantised
    (`parameters.quantizable_shapes`), by the same names. Raises `UserError` for wrong entries.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{KEY}: expected an object with group_size and bits, found {type(values).__name__}")
    layers = {f"{path}.weight": value for path, value in values.items() if path not in ("group_size", "bits", "mode")}
    default = _scheme(values)
    problems = [f"unknown layer {name.removesuffix('.weight')!r}" for name in layers if name not in matrices]
    schemes: dict[str, Scheme] = {}
    for name, shape in matrices.items():
        entry = layers.get(name, True)
        if default.tensors(name)[1] not in stored:
            continue
        if entry is False:
            problems.append(f"{name} has scales, but is said not to be quantised")
            continue
        scheme = default if entry is True else _scheme(entry)
        if name not in layers and not scheme.fits(name, shape, stored):
            scheme = next((s for s in SCHEMES if s.fits(name, shape, stored)), scheme)
        if scheme.divides(shape):
            schemes[name] = scheme
        else:
            problems.append(f"{name} of width {shape[1]} has no groups of {scheme.group_size}")
    if not schemes and not problems:
        problems.append("no matrix has scales")
    if problems:
        raise UserError(f"{KEY}: {'; '.join(problems[:8])}")
    return schemes


def described(quantization: Quantization, matrices: Mapping[str, Shape]) -> str:
    """Describe the schemes, e.g. "4 bits in groups of 64: 48 matrices, 40,000,000 parameters; not quantised: ..."."""
    sizes = {name: shape[0] * shape[1] for name, shape in matrices.items()}
    parts = []
    for scheme, count in Counter(quantization.values()).most_common():
        share = sum(size for name, size in sizes.items() if quantization.get(name) == scheme)
        parts.append(f"{scheme}: {count} {'matrix' if count == 1 else 'matrices'}, {share:,} parameters")
    if left := [name for name in sizes if name not in quantization]:
        parts.append(f"not quantised: {', '.join(left[:8])}" + (f" and {len(left) - 8} more" if len(left) > 8 else ""))
    return "; ".join(parts)


def _scheme(values: Any) -> Scheme:
    if not isinstance(values, Mapping) or values.get("mode", "affine") not in MODES:
        raise UserError(f"{KEY}: {values!r}: expected group_size, bits and a mode of {', '.join(MODES)}")
    if missing := [name for name in ("group_size", "bits") if name not in values]:
        raise UserError(f"{KEY}: {' and '.join(missing)} missing")
    return Scheme(values["group_size"], values["bits"], values.get("mode", "affine"))


AFFINE = Scheme()
SCHEMES = [
    *(Scheme(*sizes, mode) for mode, sizes in SHORT_FLOATS.items()),
    *(Scheme(group_size, bits) for group_size in ANY_GROUP for bits in BITS),
]
"""All schemes."""


@cache
def values_of(kind: str) -> NDArray[np.float32]:
    """The value of each code of a short float: E2M1 (16,), E4M3 or E8M0 (256,); NaN for its codes of NaN."""
    codes = np.arange(16 if kind == "E2M1" else 256)
    if kind == "E8M0":
        return np.where(codes == 255, np.nan, 2.0 ** (codes - 127.0)).astype(np.float32)
    fraction, bias = (1, 1) if kind == "E2M1" else (3, 7)
    exponent, mantissa = codes % (len(codes) // 2) >> fraction, codes % 2**fraction / 2**fraction
    size = np.where(exponent == 0, 2 * mantissa, 1 + mantissa) * 2.0 ** (exponent - bias)
    size = np.where((kind == "E4M3") & (codes % 128 == 127), np.nan, size)
    return np.where(codes < len(codes) // 2, size, -size).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Packed:
    """A quantised matrix (O, D) as stored: words (O, D * bits / 32) uint32, scales and, if affine, biases (O, G).

    NumPy sees an array of its values; indexing selects rows. Its parts may be read on demand (`Stored`).
    """

    words: Any
    scales: Any
    biases: Any
    scheme: Scheme

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.words, self.scales, self.biases)[: 2 + self.scheme.affine]

    @property
    def shape(self) -> Shape:
        return self.words.shape[0], self.words.shape[1] * 32 // self.scheme.bits

    dtype = np.dtype(np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return self.widened().dequantised().astype(dtype or self.dtype, copy=False)

    def __getitem__(self, rows: slice | NDArray) -> Packed:
        return Packed.of([part[rows] for part in self.parts], self.scheme)

    def widened(self) -> Packed:
        """The same matrix in memory, with scales and biases of 16 bits in float32."""
        return Packed.of(map(to_float32, self.read().parts), self.scheme)

    def read(self) -> Packed:
        """The same matrix in memory."""
        return Packed.of(map(np.asarray, self.parts), self.scheme)

    @staticmethod
    def of(parts: Iterable[Any], scheme: Scheme) -> Packed:
        words, scales, *biases = parts
        return Packed(words, scales, biases[0] if biases else None, scheme)

    @staticmethod
    def joined(above: Packed, below: Packed) -> Packed:
        """The rows of two matrices of the same scheme and width in one matrix."""
        return Packed.of(map(np.concatenate, zip(above.parts, below.parts, strict=True)), above.scheme)

    def tensors(self, name: str) -> dict[str, NDArray]:
        """The tensors of a parameter of this name."""
        return dict(zip(self.scheme.tensors(name), self.parts, strict=True))

    def integers(self) -> NDArray[np.uint8]:
        """Unpack q (O, D)."""
        bits = self.scheme.bits
        begin = np.arange(8) * bits  # 8 values take `bits` bytes, and each value at most two of them
        first, last, shift = begin // 8, (begin + bits - 1) // 8, (begin % 8).astype(np.uint16)
        octets = np.ascontiguousarray(self.words, "<u4").view(np.uint8).reshape(self.shape[0], -1, bits)
        q = np.empty((*octets.shape[:2], 8), np.uint8)
        for rows in some_rows(self.shape):  # what is between takes 12 bytes a value
            some = octets[rows]
            pairs = some[..., first] | some[..., last].astype(np.uint16) << 8  # (rows, D / 8, 8)
            q[rows] = pairs >> shift & (2**bits - 1)
        return q.reshape(self.shape)

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite; only for short floats, i.e. no NaN among codes and scales, and no overflow."""
        values, scales = self.scheme.levels
        limit = float(np.finfo(np.float32).max) / np.nanmax(values)
        sound = self.scheme.mode != "mxfp8" or not (self.words.view(np.uint8) % 128 == 127).any()
        return sound and bool((scales <= limit)[self.scales].all())

    def dequantised(self) -> NDArray[Any]:
        """The matrix (O, D), in the dtype of affine scales, else in float32; equal to `mx.dequantize` on x86 CPUs bit
        for bit.

        Product and sum are each rounded. On GPUs `mx.dequantize` uses a fused multiply-add, which changes the last bit
        of about every second weight.
        """
        grouped = self.integers().reshape(*self.scales.shape, self.scheme.group_size)  # (O, G, group_size)
        scales, *biases = (np.asarray(part)[..., None] for part in self.parts[1:])
        if not biases:
            values, sizes = self.scheme.levels
            return (values[grouped] * sizes[scales]).reshape(self.shape)
        weights = grouped.astype(scales.dtype)
        weights *= scales
        weights += biases[0]
        return weights.reshape(self.shape)


def packed_tensors(tensors: Mapping[str, Any], quantization: Quantization) -> dict[str, Any]:
    """Join the tensors of each quantised matrix to a `Packed`: {name: array or Packed}."""
    parts = {part for name, scheme in quantization.items() for part in scheme.tensors(name)[1:]}
    whole = {name: scheme.packed(name, tensors) for name, scheme in quantization.items()}
    return {name: whole.get(name, array) for name, array in tensors.items() if name not in parts}


def stored_tensors(weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Scheme]]:
    """Undo `packed_tensors`: (all tensors, {quantised matrix: scheme})"""
    quantization = {name: array.scheme for name, array in weights.items() if isinstance(array, Packed)}
    tensors: dict[str, Any] = {}
    for name, array in weights.items():
        tensors |= array.tensors(name) if isinstance(array, Packed) else {name: array}
    return tensors, quantization


def widened(tensors: Iterable[tuple[str, NDArray]], quantization: Quantization) -> Iterator[tuple[str, NDArray]]:
    """Yield (name, array) of each tensor; matrices that MLX can't run are dequantised, one at a time."""
    whole = {part: name for name, s in quantization.items() if not s.runs_in_mlx for part in s.tensors(name)}
    parts: dict[str, NDArray] = {}
    for part, array in tensors:
        if part not in whole:
            yield part, array
            continue
        parts[part] = array
        name = whole[part]
        names = quantization[name].tensors(name)
        if all(each in parts for each in names):
            packed = quantization[name].packed(name, {each: parts.pop(each) for each in names})
            yield name, packed.widened().dequantised()


def packed_words(integers: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack q (O, D) into words (O, D * bits / 32), the inverse of `Packed.integers`."""
    eights = np.ascontiguousarray(integers).reshape(len(integers), -1, 8).astype(np.uint64)
    shifted = eights << (np.arange(8, dtype=np.uint64) * np.uint64(bits))
    octets = np.bitwise_or.reduce(shifted, axis=-1).astype("<u8").view(np.uint8).reshape(*eights.shape[:2], 8)
    return np.ascontiguousarray(octets[..., :bits]).reshape(len(integers), -1).view("<u4")
