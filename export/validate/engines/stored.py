"""Parameters as a package holds them: read back from its initializers, and the same made from the checkpoint's.

A quantised parameter's initializers are called after it; what follows its name tells how it was quantised. Both ways
give float32 matrices (O, D) that must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from export.precision.adapters import GAIN, A, B, branch, delta_of, merged
from export.precision.int8 import BY_ROW, IN_STEPS, WHOLE
from export.precision.packed import TOLERANCE, from_bytes, zero_points
from export.precision.rounding import BLOCK, block_rows, from_block_rows, from_int8_rows, int8_matrix, int8_rows
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.int8_scales import Int8Scales
from mlx_transformer.core.quantization import Packed

RoundTrip = Callable[[NDArray], NDArray]
"""A parameter -> its values after quantising and dequantising."""


def restored(
    tensors: Mapping[str, NDArray], names: Mapping[str, tuple[int, ...]], scales: Int8Scales = BY_ROW
) -> Iterator[tuple[str, NDArray, RoundTrip]]:
    """Yield (parameter, its matrix as these initializers have it, how it was quantised) of the quantised ones in
    `names`. One that is both multiplied and looked up comes twice, as the two have scales of their own.

    `tensors`: initializers of one file; `names`: parameters with their shapes; `scales`: int8's fixed ones.
    """
    for tensor, q in tensors.items():
        name, _, kind = tensor.rpartition(".")
        if name not in names or kind not in KINDS:
            continue
        for suffix in SCALES[kind]:
            if (scale := tensors.get(f"{name}.{suffix}")) is not None:
                read, round_trip = KINDS[kind]
                if kind in ROWS:
                    steps = np.float32(suffix.removeprefix(IN_STEPS) if suffix.startswith(IN_STEPS) else 1)
                    scale, round_trip = scale * steps, _int8_in(steps, scales.of(name).weight)
                yield name, read(q, scale, names[name]), round_trip


def _int8_in(steps: np.float32, multiplier: np.float32 | None = None) -> RoundTrip:
    def round_trip(w: NDArray) -> NDArray:
        try:
            q, scale = int8_rows(w) if multiplier is None else int8_matrix(w, multiplier)
        except ValueError:  # other weights than the multiplier is of: none that a file holds is right
            return w
        return from_int8_rows(q, scale / steps * steps)

    return round_trip


def _blocks(bits: int) -> RoundTrip:
    return lambda w: from_block_rows(*block_rows(w, bits, BLOCK), bits, w.shape[1])


def _from_packed(bits: int) -> Callable[[NDArray, NDArray, tuple[int, ...]], NDArray]:
    def read(q: NDArray, scale: NDArray, shape: tuple[int, ...]) -> NDArray:
        values = q if bits == 8 else np.stack([q & 15, q >> 4], axis=-1).astype(np.uint8)
        return from_block_rows(values.reshape(shape[0], -1, BLOCK), scale, bits, shape[1])

    return read


def _from_blocks(q: NDArray, scale: NDArray, shape: tuple[int, ...]) -> NDArray:
    groups = np.repeat(scale, BLOCK, axis=0)[: shape[1]]
    return np.ascontiguousarray((q.astype(np.float32) * groups).T)


KINDS: dict[str, tuple[Callable[[NDArray, NDArray, tuple[int, ...]], NDArray], RoundTrip]] = {
    "int8": (lambda q, scale, _: from_int8_rows(q.T, scale.reshape(-1)), _int8_in(np.float32(1))),
    "int8_rows": (lambda q, scale, _: from_int8_rows(q, scale.reshape(-1)), _int8_in(np.float32(1))),
    "uint4": (_from_packed(4), _blocks(4)),
    "uint8": (_from_packed(8), _blocks(8)),
    "uint8_rows": (_from_packed(8), _blocks(8)),
    "int4_blocks": (_from_blocks, _blocks(4)),
    "int8_blocks": (_from_blocks, _blocks(8)),
}
ROWS = ("int8", "int8_rows")
SCALES = {
    **{kind: (f"{kind}_scale",) for kind in KINDS},
    # A product's, over the steps of what it is multiplied with; of one with fixed scales, and a lookup's: whole ones.
    **dict.fromkeys(ROWS, (f"{IN_STEPS}127", f"{IN_STEPS}255", WHOLE, "scales")),
    "uint8_rows": ("uint8_scale",),
}


def matrices(
    tensors: Mapping[str, NDArray], names: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
    """Yield (parameter, "blocks" or "rows", its matrix (O, D) as these initializers have it, adapter merged) of those
    in `names`, parameters with their shapes."""
    for tensor, data in tensors.items():
        name, _, kind = tensor.rpartition(".")
        if name in names and kind in ("blocks", "rows"):
            rows, width = names[name]
            bits, scales = data.size * 8 // (rows * width), tensors[f"{name}.scales"]
            zeros = from_bytes(tensors[f"{name}.zeros"].reshape(rows, -1), bits)[:, : scales.shape[1]]
            matrix = _matrix(from_bytes(data.reshape(rows, -1), bits), scales, zeros)
            yield name, kind, merged(name, matrix, tensors)


def round_trip_of(checkpoint: Checkpoint, name: str) -> RoundTrip:
    """Return what the operators, and an adapter's branch beside them, have to make of a quantised matrix."""
    packed, delta = checkpoint.packed(name), delta_of(checkpoint, name)
    if delta is None:
        return partial(matrix_of, packed)
    dense = packed.dequantised()
    parts = zip((A, B, GAIN), branch(delta, dense), strict=False)
    stored = {f"{name}.{kind}": array for kind, array in parts}
    return lambda _: merged(name, matrix_of(packed, dense), stored)


def merged_in_float64(checkpoint: Checkpoint, name: str, got: NDArray[np.float32]) -> RoundTrip:
    """Return what a graph has to compute from integers and the adapter beside them: the parameter. A number of `got`
    may lie on the other side of a tie of float32, where float64's own rounding, in another order of the sum, leads
    there."""
    delta, weight = delta_of(checkpoint, name), checkpoint.packed(name).dequantised()
    assert delta is not None
    size = np.abs(weight) + delta.factor * (np.abs(delta.b).astype(np.float64) @ np.abs(delta.a))
    gain = delta.gain(weight)
    error = size * (1 if gain is None else np.abs(gain)[:, None]) * (len(delta.a) + 8) * 2.0**-53
    exact = delta.of(weight)
    low, high = ((exact + sign * error).astype(np.float32) for sign in (-1, 1))

    def round_trip(dense: NDArray) -> NDArray:
        same = got.shape == dense.shape and got.dtype == dense.dtype
        return np.where((low <= got) & (got <= high), got, dense) if same else dense

    return round_trip


def matrix_of(packed: Packed, dense: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what the operators have to read of a matrix whose float32 values are `dense`: the same but for rounding.
    If it isn't, `dense` itself."""
    zero = zero_points(packed)
    if zero is None:
        return dense
    matrix = _matrix(packed.integers(), packed.scales, zero)
    largest = np.abs(packed.biases) + np.abs(packed.scales) * 2**packed.scheme.bits
    near = np.abs(matrix - dense) <= 2 * TOLERANCE * np.repeat(largest, packed.scheme.group_size, axis=1)
    return matrix if near.all() else dense


def _matrix(q: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.uint8]) -> NDArray[np.float32]:
    group = q.shape[1] // scales.shape[1]
    difference = q.astype(np.float32) - np.repeat(zeros, group, axis=1).astype(np.float32)
    return difference * np.repeat(scales, group, axis=1)
