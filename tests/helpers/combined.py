"""Which combinations of several choices `make test` tries: each choice with some other; `make test-slow` tries all,
and so does `make test-cuda`, on whose machine nothing else does. `@pytest.mark.fast("id", ...)` names the cases of a
test that stay in `make test` (`choices.py`)."""

from collections.abc import Callable, Iterable, Sequence
from itertools import count, product
from typing import Any

import pytest
from runtimes import cuda_required

SLOW = [] if cuda_required() else [pytest.mark.slow]


def slow(test: Any) -> Any:
    """Mark a whole test of a file that `make test-cuda` runs, but there."""
    for mark in SLOW:
        test = mark(test)
    return test


def combined(*choices: Iterable[Any], step: int = 1) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: all combinations of one value of each list, those off some diagonals
    marked slow. Every value of every list is in one that is not, where no `step` thins them further.

    >>> [p.values for p in combined("ab", "xyz") if not p.marks]
    [('a', 'x'), ('a', 'z'), ('b', 'y')]
    """
    lists = [list(values) for values in choices]
    smallest = min(map(len, lists))
    kept = count(0)
    return [
        pytest.param(*values, marks=SLOW if sum(places) % smallest or next(kept) % step else [])
        for places, values in zip(product(*map(range, map(len, lists))), product(*lists), strict=True)
    ]


def each_value(choices: Iterable[tuple[int, ...]]) -> list[Any]:
    """Parameters of one list, rows of choices: those without which each value of each place still occurs marked slow.

    >>> [p.values for p in each_value([(0, 0), (0, 1), (1, 1), (1, 0)]) if not p.marks]
    [((0, 0),), ((1, 1),)]
    """
    rows = list(choices)
    missing, kept = {item for row in rows for item in enumerate(row)}, set()
    while missing:
        best = max(rows, key=lambda row: len(missing & {*enumerate(row)}))
        kept.add(best)
        missing -= {*enumerate(best)}
    return [pytest.param(row, marks=[] if row in kept else SLOW) for row in rows]


def one_of_each(values: Iterable[Any], *kinds: Callable[[Any], Any]) -> list[Any]:
    """Parameters of one list: those that are of no new kind, whichever function tells the kind, marked slow.

    >>> [p.values for p in one_of_each(["a1", "a2", "b1", "b2"], lambda s: s[0], lambda s: s[1]) if not p.marks]
    [('a1',), ('a2',), ('b1',)]
    """
    seen, rows = set(), []
    for value in values:
        found = {(place, kind(value)) for place, kind in enumerate(kinds)}
        rows.append(pytest.param(value, marks=SLOW if found <= seen else []))
        seen |= found
    return rows


def shared_out(values: Sequence[Any], runtimes: Sequence[Any]) -> list[Any]:
    """Parameters (runtime, values): each runtime has a share of the values, all of them together have each once; all
    values of all runtimes are marked slow."""
    shares = [
        pytest.param(runtime, values[i :: len(runtimes)], id=f"{runtime}-shared") for i, runtime in enumerate(runtimes)
    ]
    return [*shares, *(pytest.param(runtime, values, marks=SLOW, id=f"{runtime}-all") for runtime in runtimes)]


def in_pairs(*choices: Iterable[Any]) -> list[Any]:
    """The same for a fixture, whose parameter is the tuple."""
    return [pytest.param(p.values, marks=p.marks, id=" ".join(map(str, p.values))) for p in combined(*choices)]


def thinned(values: Iterable[Any], step: int) -> list[Any]:
    """Parameters of one list, all but each `step`-th marked slow."""
    return thinned_rows(((value,) for value in values), step)


def thinned_rows(rows: Iterable[Sequence[Any]], step: int) -> list[Any]:
    """The same for several parameters at once."""
    return [pytest.param(*row, marks=SLOW if i % step else []) for i, row in enumerate(rows)]
