"""The rule in words (`rule.txt`), with the budgets as the code has them."""

from __future__ import annotations

import math
from pathlib import Path

from .rule import BUDGETS


def explain() -> str:
    """Return the rule, the budgets and the runtimes as a page of text."""
    rows = [(p, d, f"2^{math.log2(b.unit):.0f}", f"{b.rms:g}", f"{b.max:g}", b.origin) for (p, d), b in BUDGETS.items()]
    table = [("precision", "device", "u", "A", "B", "factors"), *rows]
    budgets = "\n".join(f"  {p:10}{d:8}{u:7}{a:>4}{b:>5}   {origin}" for p, d, u, a, b, origin in table)
    text = Path(__file__).with_name("rule.txt").read_text(encoding="utf-8")
    return text.format(budgets=budgets).rstrip("\n")
