"""Matrices that MLX has quantised (`mlx.nn.quantize`, mode affine): w = scale * q + bias, q an integer of 2 to 8 bits.

A quantised NAME.weight (O, D) is stored as three tensors, O rows, D columns, G = D / group_size groups a row:

    NAME.weight (O, D * bits / 32) uint32    q, value i of a row in its bits i * bits to (i + 1) * bits, lowest first
    NAME.scales (O, G), NAME.biases (O, G)   one number for each group of neighbours in a row

config.json tells group_size and bits under the key "quantization", as mlx-lm does. A matrix means the float32 values of
that formula; scales and biases of a lower precision are widened before anything is computed with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
KEY = "quantization"
"""The key in config.json."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Scheme:
    """How one matrix is quantised: `group_size` neighbours in a row share scale and bias. Raises `UserError`."""

    group_size: int = 64
    bits: int = 4

    def __post_init__(self) -> None:
        for name, known in (("group_size", GROUP_SIZES), ("bits", BITS)):
            value = getattr(self, name)
            if type(value) is not int or value not in known:
                raise UserError(f"quantization: {name}={value!r}: choose one of {', '.join(map(str, known))}")

    def divides(self, shape: Shape) -> bool:
        """Return whether a matrix (O, D) can be quantised so."""
        return len(shape) == 2 and shape[1] % self.group_size == 0


Quantization = Mapping[str, Scheme]
"""{parameter: its scheme} of a checkpoint's quantised matrices; every other parameter is stored as it is."""


def tensors_of(name: str) -> tuple[str, str, str]:
    """Return names of the stored integers, scales and biases of the parameter NAME.weight."""
    path = name.removesuffix(".weight")
    return name, f"{path}.scales", f"{path}.biases"


def stored_shapes(shapes: Mapping[str, Shape], quantization: Quantization) -> dict[str, Shape]:
    """Return a parameter table, its quantised matrices replaced by what is stored of them."""
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
    """Return what config.json says: the commonest scheme, and by their paths the layers that have another one."""
    [(common, _)] = Counter(quantization.values()).most_common(1)
    others = {name.removesuffix(".weight"): asdict(s) for name, s in quantization.items() if s != common}
    return {**asdict(common), "mode": "affine", **others}


def from_config(values: Any, names: Iterable[str], matrices: Mapping[str, Shape]) -> dict[str, Scheme]:
    """Return {parameter: scheme} of config.json's entry for the tensors stored in a file (`names`).

    As in mlx-lm a matrix is quantised if its scales are there. `matrices`: those that can be quantised
    (`parameters.quantizable_shapes`). Raises `UserError` listing every problem.
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
    """Say in words which schemes there are, and how many of the `matrices` and of their parameters have each."""
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
    """One quantised matrix (O, D) as it is stored: words (O, D * bits / 32) uint32, scales and biases (O, G)."""

    words: NDArray[np.uint32]
    scales: NDArray[Any]
    biases: NDArray[Any]
    scheme: Scheme

    def integers(self) -> NDArray[np.uint8]:
        """q (O, D)."""
        bits = self.scheme.bits
        begin = np.arange(8) * bits  # of 8 values in `bits` bytes; a value lies in two of them at most
        first, last, shift = begin // 8, (begin + bits - 1) // 8, (begin % 8).astype(np.uint16)
        octets = np.ascontiguousarray(self.words, "<u4").view(np.uint8).reshape(len(self.words), -1, bits)
        pairs = octets[..., first] | octets[..., last].astype(np.uint16) << 8
        return (pairs >> shift & (2**bits - 1)).astype(np.uint8).reshape(len(octets), -1)

    def dequantised(self) -> NDArray[Any]:
        """Return (O, D) in the type of the scales: product, then sum, each rounded to it: bit for bit `mx.dequantize`
        on x86 CPUs.

        A fused multiply-add, which is `mx.dequantize` on GPUs, makes another last bit of about every second weight.
        """
        grouped = self.integers().reshape(*self.scales.shape, self.scheme.group_size)
        weights = grouped.astype(self.scales.dtype)
        weights *= self.scales[..., None]
        weights += self.biases[..., None]
        return weights.reshape(len(weights), -1)
