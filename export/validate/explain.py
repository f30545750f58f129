"""The rule in words (`rule.txt`), with the budgets and the runtimes as the code has them."""

from __future__ import annotations

import math
from pathlib import Path

from .engines.registry import RUNTIMES
from .rule import BUDGETS


def explain() -> str:
    """Return the rule as a page of text."""
    text = Path(__file__).with_name("rule.txt").read_text(encoding="utf-8")
    rows = [(p, d, f"2^{math.log2(b.unit):.0f}", f"{b.rms:g}", f"{b.max:g}", b.origin) for (p, d), b in BUDGETS.items()]
    table = [("precision", "device", "u", "A", "B", "factors"), *rows]
    budgets = "\n".join(f"  {p:10}{d:8}{u:7}{a:>4}{b:>5}   {origin}" for p, d, u, a, b, origin in table)
    names = "\n".join(f"  {name:27}{words}" for name, words in RUNTIMES.items())
    return f"{text}\nBudgets (another device has the CPU's, as a declaration)\n{budgets}\n\nRuntimes\n{names}"
