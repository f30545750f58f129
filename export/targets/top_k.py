"""The largest of many values in a row, in standard operators. Twin of `top_k` in `generation/arrays.py`.

A runtime's own TopK and ArgMax look at one value after the other. Here one pass takes the maximum of each block of some
64 values; the winners can only lie in the blocks with the largest maxima, and only those are looked at closely.
Measured on two cores (ONNX Runtime 1.31) with rows of 37,000 values: the 11 largest after a softmax 1.3 to 1.9 times as
fast, the largest 1.8 to 4 times; greedy search of preset `base` gains 4 to 9 %. With 8,000 values nothing is gained.

Shapes: R rows, V values of a row, N blocks of W.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from export.nn.primitives import Op

MANY = 16384
"""Values of a row. With fewer the blocks' own operators cost more than they save."""
BLOCK = 64
"""The size of a block that is aimed at; it must divide a row evenly."""


def top_k(op: Op, x: ir.Value, count: ir.Value, width: int | None) -> tuple[ir.Value, ir.Value]:
    """Return the `count` (1,) largest of each row of x (R, V = `width`), falling, and their places; on ties the first
    ones."""
    block = block_size(width)
    if block is None or width is None:
        return op.TopK(x, count, _outputs=2)
    shortlist = Shortlist.of(op, x, op.Min(count, [width // block]), block)
    values, place = op.TopK(op.Flatten(shortlist.values), count, _outputs=2)
    return values, shortlist.places(op, place)


def largest(op: Op, x: ir.Value, offsets: ir.Value, excluded: int, width: int | None) -> ir.Value:
    """Return the place (R, 1) of the largest value of each row of x + offsets, (R, V = `width`) and (V,), or the first.

    No more than `excluded` offsets are other than zero, and those are negative.
    """
    block = block_size(width)
    if block is None:
        return op.ArgMax(op.Add(x, offsets), axis=-1, keepdims=1)
    shortlist = Shortlist.of(op, x, [excluded + 1], block)
    block_offsets = op.Gather(op.Reshape(offsets, [-1, block]), shortlist.blocks, axis=0)
    return shortlist.places(op, op.ArgMax(op.Flatten(op.Add(shortlist.values, block_offsets)), axis=-1, keepdims=1))


def block_size(width: int | None) -> int | None:
    """Return a block's size that divides rows of that many values evenly; None where blocks don't help: where rows are
    short, or as long as somebody lists (None)."""
    if width is None:
        return None
    sizes = [size for size in range(BLOCK // 4, BLOCK * 4 + 1) if width % size == 0]
    if width < MANY or not sizes:
        return None
    return min(sizes, key=lambda size: max(size / BLOCK, BLOCK / size))


@dataclass(frozen=True)
class Shortlist:
    """The blocks of each row in which its largest values are."""

    values: ir.Value
    """(R, n, W)"""
    blocks: ir.Value
    """(R, n) which ones they are, rising, so that among equal values the first one stays first."""
    block: int
    """W"""

    @classmethod
    def of(cls, op: Op, x: ir.Value, count: ir.Value | list[int], block: int) -> Shortlist:
        """Find as many blocks as `count` (1,), enough for the `count` largest values of each row of x (R, V)."""
        blocks = op.Reshape(x, [0, -1, block])
        _, best = op.TopK(op.ReduceMax(blocks, [2], keepdims=0), count, _outputs=2)
        best, _ = op.TopK(best, count, largest=0, _outputs=2)
        return cls(op.GatherND(blocks, op.Unsqueeze(best, [2]), batch_dims=1), best, block)

    def places(self, op: Op, place: ir.Value) -> ir.Value:
        """Turn places (R, C) in the flattened values (R, n*W) into places in the rows x."""
        block = op.GatherElements(self.blocks, op.Div(place, self.block), axis=1)
        return op.Add(op.Mul(block, self.block), op.Mod(place, self.block))
