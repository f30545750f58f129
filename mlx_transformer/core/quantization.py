"""Matrices quantised by MLX (`mlx.nn.quantize`, mode affine): w = scale * q + bias, q an integer of 2 to 8 bits.

A quantised NAME.weight (O, D) is stored as three tensors, with G = D / group_size groups in each row:

    NAME.weight (O, D * bits / 32) uint32    q: value i of a row is in bits i * bits to (i + 1) * bits, lowest first
    NAME.scales (O, G), NAME.biases (O, G)   one number for each group of neighbours in a row

config.json has group_size and bits under the key "quantization", as in mlx-lm. The matrix's values are those of the
formula in float32: scales and biases of lower precision are converted first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import Name, UserError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
KEY = "quantization"
"""Key in config.json."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Scheme:
    """Quantisation of a matrix: groups of `group_size` neighbours in a row share a scale and a bias.

    Raises `UserError` for sizes that MLX doesn't have.
    """

    group_size: int = 64
    bits: int = 4

    def __post_init__(self) -> None:
        for name, known in (("group_size", GROUP_SIZES), ("bits", BITS)):
            value = getattr(self, name)
            if type(value) is not int or value not in known:
                choices = ", ".join(map(str, known))
                raise UserError("quantization: {}: choose one of {}", Name(name, repr(value)), choices)

    def divides(self, shape: Shape) -> bool:
        """Whether a matrix (O, D) can be split into groups of this size."""
        return len(shape) == 2 and shape[1] % self.group_size == 0


Quantization = Mapping[str, Scheme]
"""{parameter: its scheme} of a checkpoint's quantised matrices."""


def tensors_of(name: str) -> tuple[str, str, str]:
    """Names of the tensors that store a quantised NAME.weight: NAME.weight, NAME.scales and NAME.biases."""
    path = name.removesuffix(".weight")
    return name, f"{path}.scales", f"{path}.biases"


def stored_shapes(shapes: Mapping[str, Shape], quantization: Quantization) -> dict[str, Shape]:
    """A parameter table with each quantised matrix replaced by its three stored tensors."""
    stored: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if name in quantization:
            (rows, width), scheme = shape, quantization[name]
            groups = (rows, width // scheme.group_size)
            stored |= zip(tensors_of(name), ((rows, width * scheme.bits // 32), groups, groups), strict=True)
        else:
            stored[name] = shape
    return stored


def to_config(quantization: Quantization) -> dict[str, Any]:
    """The entry for config.json: the most frequent scheme, and the other layers' schemes by path."""
    [(common, _)] = Counter(quantization.values()).most_common(1)
    others = {name.removesuffix(".weight"): asdict(s) for name, s in quantization.items() if s != common}
    return {**asdict(common), "mode": "affine", **others}


def from_config(values: Any, names: Iterable[str], matrices: Mapping[str, Shape]) -> dict[str, Scheme]:
    """Read config.json's entry; returns {parameter: scheme}.

    names: the tensors in the weights file; as in mlx-lm, a matrix is quantised if its scales are in the file.
    matrices: those that can be quantised (`parameters.quantizable_shapes`). Raises `UserError` for wrong entries.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{KEY}: expected an object with group_size and bits, found {type(values).__name__}")
    layers = {f"{path}.weight": value for path, value in values.items() if path not in ("group_size", "bits", "mode")}
    default = _scheme(values)
    problems = [f"unknown layer {name.removesuffix('.weight')!r}" for name in layers if name not in matrices]
    schemes: dict[str, Scheme] = {}
    stored = set(names)
    for name, shape in matrices.items():
        expected = layers.get(name, default)
        if tensors_of(name)[1] not in stored:
            continue
        if expected is False:
            problems.append(f"{name} has scales, but is said not to be quantised")
            continue
        scheme = default if expected is True else expected if isinstance(expected, Scheme) else _scheme(expected)
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
        parts.append(f"{scheme.bits} bits in groups of {scheme.group_size}: {count} matrices, {share:,} parameters")
    if left := [name for name in sizes if name not in quantization]:
        parts.append(f"not quantised: {', '.join(left[:8])}" + (f" and {len(left) - 8} more" if len(left) > 8 else ""))
    return "; ".join(parts)


def _scheme(values: Any) -> Scheme:
    if not isinstance(values, Mapping) or values.get("mode", "affine") != "affine":
        raise UserError(f"{KEY}: {values!r}: only MLX's mode 'affine' is read, with group_size and bits")
    if missing := [name for name in ("group_size", "bits") if name not in values]:
        raise UserError(f"{KEY}: {' and '.join(missing)} missing")
    return Scheme(values["group_size"], values["bits"])


class Packed(NamedTuple):
    """A quantised matrix (O, D) as stored: words (O, D * bits / 32) uint32, scales and biases (O, G)."""

    words: NDArray[np.uint32]
    scales: NDArray[Any]
    biases: NDArray[Any]
    scheme: Scheme

    def integers(self) -> NDArray[np.uint8]:
        """Unpack q (O, D)."""
        bits = self.scheme.bits
        begin = np.arange(8) * bits  # 8 values take `bits` bytes, and each value at most two of them
        first, last, shift = begin // 8, (begin + bits - 1) // 8, (begin % 8).astype(np.uint16)
        octets = np.ascontiguousarray(self.words, "<u4").view(np.uint8).reshape(len(self.words), -1, bits)
        pairs = octets[..., first] | octets[..., last].astype(np.uint16) << 8  # (O, D / 8, 8)
        return (pairs >> shift & (2**bits - 1)).astype(np.uint8).reshape(len(octets), -1)

    def dequantised(self) -> NDArray[Any]:
        """The matrix (O, D), in the dtype of the scales; equal to `mx.dequantize` on x86 CPUs bit for bit.

        Product and sum are each rounded. On GPUs `mx.dequantize` uses a fused multiply-add, which changes the last bit
        of about every second weight.
        """
        grouped = self.integers().reshape(*self.scales.shape, self.scheme.group_size)  # (O, G, group_size)
        weights = grouped.astype(self.scales.dtype)
        weights *= self.scales[..., None]
        weights += self.biases[..., None]
        return weights.reshape(len(weights), -1)
