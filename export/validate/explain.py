"""The rule in words, with the budgets and the runtimes as the code has them."""

from __future__ import annotations

import math

from .engines.registry import RUNTIMES
from .rule import BUDGETS

TEXT = """\
What is compared
  Each runtime is held against the same network in NumPy in float64: at every named point of it (after the embedding,
  each sub-layer and each layer, and at the logits), in one full pass and in cached passes, on fresh random inputs of
  many shapes and paddings, and on real text where the checkpoint has a tokenizer. Only real tokens count, no padding.
  The files are run both with these points as outputs and untouched.

The rule
  Nobody can compute in float32 without rounding. So the reference is computed in float32 as well, and its own error is
  the measure. With t64 the float64 tensor, e a runtime's error, e32 the float32 reference's, u the relative rounding
  error of the precision (float32: 2^-24):

      rms(e)  <=  A * u / 2^-24 * max( rms(e32),  2^-24 * rms(t64) )
      max|e|  <=  B * u / 2^-24 * max( max|e32|,  2^-24 * rms(t64) )

  A short input is a small sample: its e32 counts at least as much as that of the same point over all inputs.
  A ratio in the report is error over the right-hand side without its factor A or B.

Bit for bit
  All weights, as every file and every model in memory holds them (rounded to nearest even in float16 and bfloat16), and
  in float32 the sum of embedding and position, which every runtime can compute exactly alike. Every byte of a data
  file is read by a tensor of some graph, or is a zero that aligns the next one.

Weights in blocks
  Precisions int8-weights, int4 and packed multiply their weights with activations that are rounded to int8 in blocks,
  or with float32 activations, as they were exported; the report names which. With float32 activations they are another
  float32 network, whose weights are the stored integers times their scales: it is held against the reference of that
  network, by float32's budget.

Tokens
  The likeliest token at every position of given text; logits with a cache against those without; greedy search, beam
  search and sampling (all runtimes draw with the same noise), token by token. A runtime may part from the reference
  only at a certified tie: where the reference's own gap between the two choices is within twice a logit's budget.

Exit status
  0 equal, 1 mismatch, 2 bad input, 3 a requested runtime is not available."""


def explain() -> str:
    """Return the rule as a page of text."""
    rows = [(p, d, f"2^{math.log2(b.unit):.0f}", f"{b.rms:g}", f"{b.max:g}", b.origin) for (p, d), b in BUDGETS.items()]
    table = [("precision", "device", "u", "A", "B", "factors"), *rows]
    budgets = "\n".join(f"  {p:10}{d:8}{u:7}{a:>4}{b:>5}   {origin}" for p, d, u, a, b, origin in table)
    names = "\n".join(f"  {name:27}{words}" for name, words in RUNTIMES.items())
    return f"{TEXT}\n\nBudgets (another device has the CPU's, as a declaration)\n{budgets}\n\nRuntimes\n{names}"
