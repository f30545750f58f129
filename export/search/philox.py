"""Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3) from integer
operations: random numbers that depend on a seed and a place alone, equal on every runtime.

Words are int64 between 0 and 2^32 - 1, with + - * / as exact as in the paper's unsigned 32 bits.

Shapes: T steps, B rows.
"""

from __future__ import annotations

import onnx_ir as ir

from ..primitives import Op

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key's halves each round
WORD = 1 << 32

Words = tuple[ir.Value, ir.Value, ir.Value, ir.Value]


def philox(op: Op, counter: Words, key: tuple[ir.Value, ir.Value]) -> Words:
    """Four random words for each counter of four; all broadcast together."""
    a, b, c, d = counter
    k0, k1 = key
    for i in range(ROUNDS):
        high0, low0 = _product(op, a, MULTIPLIERS[0])
        high1, low1 = _product(op, c, MULTIPLIERS[1])
        a, b = op.BitwiseXor(op.BitwiseXor(high1, b), k0), low1
        c, d = op.BitwiseXor(op.BitwiseXor(high0, d), k1), low0
        if i + 1 < ROUNDS:
            k0, k1 = op.Mod(op.Add(k0, WEYL[0]), WORD), op.Mod(op.Add(k1, WEYL[1]), WORD)
    return a, b, c, d


def uniforms(op: Op, seed: ir.Value, steps: ir.Value, rows: ir.Value) -> ir.Value:
    """Numbers (T, B) in (0, 1), float64 of 52 bits, for counters (step, row, 0, 0) and the key `seed` (int64 scalar).

    steps: T (scalar); rows: the row numbers (B,)."""
    step, row = op.Unsqueeze(op.Range(0, steps, 1), [1]), op.Unsqueeze(rows, [0])
    zero = op.Sub(step, step)
    high = op.Mod(op.Div(op.Sub(seed, op.Mod(seed, WORD)), WORD), WORD)
    a, b, _, _ = philox(op, (step, row, zero, zero), (op.Mod(seed, WORD), high))
    bits = op.Add(op.Mul(op.Div(a, 1 << 6), 1 << 26), op.Div(b, 1 << 6))
    real = op.Cast(bits, to=ir.DataType.DOUBLE)
    half, whole = (op.Cast(x, to=ir.DataType.DOUBLE) for x in (0.5, float(1 << 52)))
    return op.Div(op.Add(real, half), whole)


def _product(op: Op, x: ir.Value, factor: int) -> tuple[ir.Value, ir.Value]:
    """The high and the low word of x * factor; in halves of the factor, as 64 bits with a sign can't hold it whole."""
    upper, lower = op.Mul(x, factor >> 16), op.Mul(x, factor & 0xFFFF)
    middle = op.Add(upper, op.Div(lower, 1 << 16))  # the product over 2^16, below 2^49
    high = op.Div(middle, 1 << 16)
    low = op.Add(op.Mul(op.Mod(middle, 1 << 16), 1 << 16), op.Mod(lower, 1 << 16))
    return high, low
