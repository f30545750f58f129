"""Rows as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from .row import Row, dotted, shown

WIDTH = 100
Values = Mapping[str, tuple[float, ...]]


def as_text(row: Row, found: Values | None, table: Sequence[Sequence[str]] = (), reason: str = "") -> str:
    """The claim, its formula, each number as computed and as claimed, the table where there is one, and the code.

    `found`: None where a trained model is missing or doesn't do, for this `reason`."""
    head = f"{row.number:>2}  "
    lines = textwrap.wrap(row.claim, WIDTH, initial_indent=head, subsequent_indent="    ")
    lines.append(f"    {row.formula}")
    if found is None:
        lines.append(f"    {reason}")
    else:
        width = max(map(len, found))
        for name, values in found.items():
            lines.append(f"      {name:<{width}}  {shown(values)}{said(row, name, values)}")
    if table:
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines += ["      " + "  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) for line in table]
    for note in filter(None, (row.missing, row.slip)):
        lines += textwrap.wrap(note, WIDTH, initial_indent="    ", subsequent_indent="    ")
    lines.append(f"    code   {', '.join(map(dotted, row.symbols))}")
    lines.append(f"    tests  {', '.join(f'tests/{test}' for test in row.tests)}")
    return "\n".join(line.rstrip() for line in lines)


def said(row: Row, name: str, values: Sequence[float]) -> str:
    """Say what is claimed of the number, and whether that is so."""
    claimed = row.numbers.get(name)
    if claimed is None or claimed.sign == "recorded":
        return ""
    return f"   ({claimed.text()})" if claimed.holds(values) else f"   DOES NOT HOLD: claimed {claimed.text()}"
