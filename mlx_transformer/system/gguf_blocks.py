"""The types of tensors in GGUF files: blocks of small integers, with a scale and perhaps an offset for each group.

A weight is scale * (integer - zero) + offset. Scales and offsets are products of the file's numbers, exact in float32,
so only the last addition rounds, and the values are llama.cpp's bit for bit. Layouts: its `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[Any]
"""uint8 (N, bytes of a block)"""
Integers = NDArray[Any]
"""uint8"""
Numbers = NDArray[np.float32]


@dataclass(frozen=True)
class BlockType:
    """How a block of `weights` neighbours in a row is stored in `size` bytes."""

    name: str
    weights: int
    size: int
    bits: int
    """Bits of an integer."""
    zero: int
    group: int
    """Weights that share a scale: 16 or 32."""
    integers: Callable[[Blocks], Integers]
    """(N, size) to (N, weights)"""
    scales: Callable[[Blocks], Numbers]
    """(N, size) to (N, weights / group)"""
    offsets: Callable[[Blocks], Numbers] | None = None
    """The same of the offsets; None: they are zero."""

    @property
    def halves(self) -> bool:
        """Whether scales and offsets are float16 numbers in the file, and not products."""
        return self.weights == self.group

    def dequantised(self, blocks: Blocks) -> Numbers:
        """The weights (N, weights)."""
        scales = self.scales(blocks)
        weights = self.integers(blocks).astype(np.float32).reshape(*scales.shape, self.group)
        weights -= np.float32(self.zero)  # so that a negative scale keeps the sign of its zeros
        weights *= scales[..., None]
        if self.offsets is not None:
            weights += self.offsets(blocks)[..., None]
        return weights.reshape(len(blocks), self.weights)

    def biases(self, blocks: Blocks) -> Numbers:
        """(N, weights / group): what MLX adds to scale * integer. A product by a power of two, so it is exact."""
        return self.scales(blocks) * np.float32(-self.zero) if self.offsets is None else self.offsets(blocks)


def _half(blocks: Blocks, at: int) -> Numbers:
    """The float16 at a byte, (N, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Blocks, run: int) -> Integers:
    """(N, B) to (N, 2 B): of each run of bytes the low halves, then the high ones."""
    pairs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(len(packed), -1)


def _pairs(packed: Blocks) -> Integers:
    """(N, B) to (N, 4 B): of each run of 32 bytes the lowest two bits, then the next two, and so on."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (packed.reshape(len(packed), -1, 1, 32) >> shifts & 3).reshape(len(packed), -1)


def _high(packed: Blocks) -> Integers:
    """(N, 32) to (N, 256): bit g of byte i belongs to weight i of group g."""
    return (packed[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(packed), 256)


def _low(packed: Blocks) -> Integers:
    """(N, 4) to (N, 32): a bit of each weight."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _six_bits(blocks: Blocks) -> tuple[Integers, Integers]:
    """Eight scales and eight offsets of six bits, in bytes 4 to 15 of Q4_K and Q5_K."""
    a, b, c = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    return scales, np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)


def _scales_k(blocks: Blocks) -> Numbers:
    return _half(blocks, 0) * _six_bits(blocks)[0]


def _offsets_k(blocks: Blocks) -> Numbers:
    return -(_half(blocks, 2) * _six_bits(blocks)[1])


def _scales_3(blocks: Blocks) -> Numbers:
    low = _nibbles(blocks[:, 96:104], 8)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, None, 104:108] >> shifts & 3).reshape(len(blocks), 16)
    return _half(blocks, 108) * ((low | high << 4).astype(np.float32) - 32)


def _integers_6(blocks: Blocks) -> Integers:
    return _nibbles(blocks[:, :128], 64) | _pairs(blocks[:, 128:192]) << 4


D, M = (lambda blocks: _half(blocks, 0)), (lambda blocks: _half(blocks, 2))

BLOCKS = {
    2: BlockType("Q4_0", 32, 18, 4, 8, 32, lambda b: _nibbles(b[:, 2:], 16), D),
    3: BlockType("Q4_1", 32, 20, 4, 0, 32, lambda b: _nibbles(b[:, 4:], 16), D, M),
    6: BlockType("Q5_0", 32, 22, 5, 16, 32, lambda b: _nibbles(b[:, 6:], 16) | _low(b[:, 2:6]) << 4, D),
    7: BlockType("Q5_1", 32, 24, 5, 0, 32, lambda b: _nibbles(b[:, 8:], 16) | _low(b[:, 4:8]) << 4, D, M),
    8: BlockType("Q8_0", 32, 34, 8, 128, 32, lambda b: b[:, 2:] ^ 128, D),
    10: BlockType(
        *("Q2_K", 256, 84, 2, 0, 16, lambda b: _pairs(b[:, 16:80])),
        lambda b: _half(b, 80) * (b[:, :16] & 15),
        lambda b: -(_half(b, 82) * (b[:, :16] >> 4)),
    ),
    11: BlockType("Q3_K", 256, 110, 3, 4, 16, lambda b: _pairs(b[:, 32:96]) | _high(b[:, :32]) << 2, _scales_3),
    12: BlockType("Q4_K", 256, 144, 4, 0, 32, lambda b: _nibbles(b[:, 16:], 32), _scales_k, _offsets_k),
    13: BlockType(
        *("Q5_K", 256, 176, 5, 0, 32, lambda b: _nibbles(b[:, 48:], 32) | _high(b[:, 16:48]) << 4),
        *(_scales_k, _offsets_k),
    ),
    14: BlockType(
        *("Q6_K", 256, 210, 6, 32, 16, _integers_6),
        lambda b: _half(b, 208) * b[:, 192:208].view(np.int8),
    ),
}
"""{number in a file: type} of the quantised types that are read."""
FLOATS = {0: "F32", 1: "F16", 30: "BF16"}
"""{number: name in safetensors files}"""
UNREAD = {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"}
UNREAD |= {23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"}
UNREAD |= {39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}
"""The types that are refused by name."""
NUMBERS = {each.name: number for number, each in BLOCKS.items()} | {name: number for number, name in FLOATS.items()}


def quantised(name: str, weights: Numbers) -> Blocks:
    """Round weights (N, 32) to blocks of Q8_0 or Q4_0, as llama.cpp does bit for bit."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if name == "Q8_0":
            scales = np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)
            inverse = np.where(scales == 0, np.float32(0), 1 / scales)
            exact = weights * inverse
            size = np.floor(np.abs(exact))
            size += np.floor(2 * (np.abs(exact) - size))  # halves are rounded away from zero
            packed = (np.sign(exact) * size).astype(np.int8).view(np.uint8)
        else:
            largest = np.take_along_axis(weights, np.abs(weights).argmax(axis=1, keepdims=True), axis=1)
            scales = largest / np.float32(-8)
            inverse = np.where(scales == 0, np.float32(0), 1 / scales)
            integers = np.trunc(weights * inverse + np.float32(8.5)).astype(np.uint8).clip(0, 15)
            packed = integers[:, :16] | integers[:, 16:] << 4
        return np.concatenate([scales.astype("<f2").view(np.uint8), packed], axis=1)
