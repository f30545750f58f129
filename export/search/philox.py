"""The noise of `generation/philox.py` within a graph: the same bits, from integer operations.

Words are int64 between 0 and 2^32 - 1, with + - * / as exact as in the paper's unsigned 32 bits.

Shapes: B rows, N numbers of each, n = N / 4 counters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export.nn.primitives import Op, table
from mlx_transformer.generation.philox import MULTIPLIERS, ROUNDS, SPARE_BITS, STEP, WEYL, WORD

HALF = 1 << 16


def philox(op: Op, x: ir.Value, y: ir.Value, keys: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """x (2, B, n): words 0 and 2 of each counter, y words 1 and 3, keys as from `round_keys`. The same of the
    results."""
    for k in keys:
        high, low = _product(op, op.Gather(x, [1, 0], axis=0))
        x, y = op.BitwiseXor(op.BitwiseXor(high, y), k), low
    return x, y


def round_keys(op: Op, key: ir.Value) -> Sequence[ir.Value]:
    """Return the key's two words (2,) in each round: (2, 1, 1) each."""
    weyl = table(op, "philox.weyl", lambda: np.arange(ROUNDS)[:, None] * np.array(WEYL))
    keys = op.Unsqueeze(op.Mod(op.Add(key, weyl), WORD), [2, 3])
    return [op.Squeeze(k, [0]) for k in op.Split(keys, axis=0, num_outputs=ROUNDS, _outputs=ROUNDS)]


def words_of(op: Op, seed: ir.Value) -> ir.Value:
    """Return the low and the high word (2,) of a scalar. A negative one stands for itself + 2^64."""
    low = op.Mod(seed, WORD)
    high = op.Mod(op.Div(op.Sub(seed, low), WORD), WORD)
    return op.Concat(op.Unsqueeze(low, [0]), op.Unsqueeze(high, [0]), axis=0)


def counters(op: Op, rows: ir.Value, count: int) -> ir.Value:
    """Return words 0 and 2 (2, B, n) of what the rows (B,) count for N = `count` numbers: i // 4 and the row."""
    n = -(-count // 4)
    first = table(op, "philox.counters", lambda: np.stack([np.arange(n), np.zeros(n, np.int64)])[:, None])
    second = op.Unsqueeze(op.Unsqueeze(rows, [1]), [0])
    return op.Add(first, op.Mul(second, table(op, "philox.rows", lambda: np.array([0, 1])[:, None, None])))


def gumbel(op: Op, x: ir.Value, t: ir.Value, keys: Sequence[ir.Value]) -> ir.Value:
    """Return the noise (B, 4n) for new token number t (scalar) of the rows that `counters` counted for."""
    y = op.Mul(t, table(op, "philox.step", lambda: np.array([1, 0])[:, None, None]))
    x, y = (op.Unsqueeze(words, [1]) for words in philox(op, x, y, keys))
    words = op.Transpose(op.Concat(x, y, axis=1), perm=[2, 3, 0, 1])  # (B, n, 2, 2)
    numbers = op.Cast(op.Div(op.Flatten(words), 1 << SPARE_BITS), to=ir.DataType.FLOAT)
    uniform = op.Mul(op.Add(numbers, 0.5), STEP)
    return op.Neg(op.Log(op.Neg(op.Log(uniform))))


def _product(op: Op, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the high and the low words of words 2 and 0 times their multipliers; in halves of these, as 64 bits with a
    sign can't hold the whole."""
    factors = np.array(MULTIPLIERS[::-1])[:, None, None]
    upper = op.Mul(x, table(op, "philox.upper", lambda: factors // HALF))
    lower = op.Mul(x, table(op, "philox.lower", lambda: factors % HALF))
    middle = op.Add(upper, op.Div(lower, HALF))  # the product over 2^16, below 2^49
    low = op.Add(op.Mul(op.BitwiseAnd(middle, HALF - 1), HALF), op.BitwiseAnd(lower, HALF - 1))
    return op.Div(middle, HALF), low
