"""The one table of all rows, and the way from a row to its numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_transformer.system.errors import UserError

from . import (
    attention,
    cost,
    embedding,
    feedforward,
    learned,
    masks,
    norms,
    order,
    pictures,
    positions,
    recurrent,
    rejected,
    residual,
    sentences,
    stacks,
    trained,
    worked,
    worked_table,
)
from .row import Claimed, Row, as_values

TOPICS = (embedding, positions, rejected, worked, attention, worked_table, order, masks, residual, norms, feedforward)
TOPICS += (stacks, cost, recurrent, pictures, learned, trained, sentences)
ROWS: dict[int, Row] = {
    row.number: row for row in sorted((row for topic in TOPICS for row in topic.ROWS), key=lambda row: row.number)
}


def chosen(names: Sequence[str]) -> list[Row]:
    """The rows of these numbers ("7", or "5-9"), in the table's order; all but slow ones without names. `UserError` for
    others."""
    numbers = {number for name in names for number in _numbers(name)}
    return [row for number, row in ROWS.items() if (number in numbers if names else not row.slow)]


def _numbers(name: str) -> range:
    match = re.fullmatch(r"(\d{1,3})(?:-(\d{1,3}))?", name)
    if match is None:
        raise UserError(f"claims {name}: give numbers of rows, such as 7 or 5-9")
    first, last = int(match[1]), int(match[2] or match[1])
    for number in (first, last):
        if number not in ROWS:
            raise UserError(f"claims {name}: there is no row {number}; the rows are {min(ROWS)} to {max(ROWS)}")
    return range(min(first, last), max(first, last) + 1)


def computed(row: Row, model: Any = None) -> dict[str, tuple[float, ...]]:
    """The row's numbers, computed now. `model`: what a row about a trained one looks at."""
    found = called(row.compute, *([model] if row.trained else []))
    return {name: as_values(value) for name, value in found.items()}


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this package on the CPU: bits are promised there alone, and every kernel takes every
    length."""
    with mx.stream(mx.cpu):
        return function(*arguments)


def claimed(number: int, name: str) -> Claimed:
    """Return the claim of a row about the number of this name."""
    return ROWS[number].numbers[name]
