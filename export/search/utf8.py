"""Bytes that needn't be UTF-8, made valid: each ill-formed part becomes one U+FFFD, as Rust and the Unicode Standard
(chapter 3.9, "U+FFFD Substitution of Maximal Subparts") have it.

Shapes: N bytes of a stream.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from export.nn.primitives import Op, table

SEPARATOR = 256
"""Not a byte: stands between two texts."""
REPLACEMENT, NOTHING = 257, 258
"""Codes of U+FFFD and of a byte that falls away."""


def well_formed(op: Op, stream: ir.Value) -> ir.Value:
    """(N,) int64 in 0..SEPARATOR -> codes (N,): the same where well-formed, REPLACEMENT or NOTHING elsewhere."""
    names = ("utf8.needs", "utf8.low", "utf8.high")
    tables = (table(op, name, lambda row=row: leads()[row]) for row, name in enumerate(names))
    needs, low, high = (op.Gather(values, stream) for values in tables)
    following = op.Concat(stream, [SEPARATOR, SEPARATOR, SEPARATOR], axis=0)
    first, second, third = (op.Slice(following, [i], [i - 3 if i < 3 else 1 << 60], [0]) for i in (1, 2, 3))
    # How many bytes continue what this one begins: 0 up to what it needs.
    one = op.And(op.And(op.GreaterOrEqual(first, low), op.LessOrEqual(first, high)), op.GreaterOrEqual(needs, 1))
    two = op.And(op.And(one, _continues(op, second)), op.GreaterOrEqual(needs, 2))
    three = op.And(op.And(two, _continues(op, third)), op.GreaterOrEqual(needs, 3))
    run = op.Add(op.Add(_integer(op, one), _integer(op, two)), _integer(op, three))
    complete = op.Equal(run, needs)
    # What an earlier lead makes of this byte: 1 kept, 2 falls away; no byte belongs to two of them.
    fate = op.Where(complete, 1, 2)
    covered = None
    for distance, reached in enumerate((one, two, three), start=1):
        reach = op.Where(reached, fate, 0)
        shifted = op.Slice(op.Concat([0] * distance, reach, axis=0), [0], [-distance], [0])
        covered = shifted if covered is None else op.Add(covered, shifted)
    code = op.Where(complete, stream, REPLACEMENT)
    return op.Where(op.Equal(covered, 1), stream, op.Where(op.Equal(covered, 2), NOTHING, code))


def leads() -> np.ndarray:
    """(3, 257): bytes that must follow each byte (-1: it can't begin a character), and the range of the next one."""
    table = np.zeros((3, SEPARATOR + 1), np.int64)
    needs, low, high = table
    needs[0x80:0xC2] = needs[0xF5:0x100] = -1
    needs[0xC2:0xE0], needs[0xE0:0xF0], needs[0xF0:0xF5] = 1, 2, 3
    low[:], high[:] = 0x80, 0xBF
    low[0xE0], high[0xED], low[0xF0], high[0xF4] = 0xA0, 0x9F, 0x90, 0x8F
    return table


def texts() -> list[bytes]:
    """The bytes that each code stands for."""
    return [bytes([byte]) for byte in range(256)] + [b"", "\ufffd".encode(), b""]


def _continues(op: Op, byte: ir.Value) -> ir.Value:
    return op.And(op.GreaterOrEqual(byte, 0x80), op.LessOrEqual(byte, 0xBF))


def _integer(op: Op, x: ir.Value) -> ir.Value:
    return op.Cast(x, to=ir.DataType.INT64)
