"""A report in a few lines, for notebooks."""

from __future__ import annotations

from collections.abc import Iterator

from .data import ReportData

FAILURES = 6  # lines


def summary(r: ReportData) -> Iterator[tuple[str, str]]:
    """(name, text) of what went wrong, of each runtime, and of the whole."""
    for line in r.failures()[:FAILURES]:
        yield "failure", line
    for runtime in r.runtimes:
        weights = [check for check in r.weights if check.runtime == runtime.name]
        points = [point for point in r.points if point.runtime == runtime.name]
        tokens = [check for check in r.tokens if check.runtime == runtime.name]
        said = []
        if weights:
            equal = "bit for bit" if all(check.passed for check in weights) else "some differ"
            said.append(f"{sum(check.count for check in weights):,} weights {equal}")
        if points:
            worst = max(point.worst.share for point in points)
            said.append(f"{sum(point.inputs for point in points):,} tensors, at most {worst:.2g} of the budget")
        if tokens:
            same = "the same" if all(check.passed for check in tokens) else "not all the same"
            said.append(f"{sum(check.tokens for check in tokens):,} tokens {same}")
        yield runtime.name, ", ".join(said)
    for line in r.notes:
        yield "note", line
    yield "seed", f"{r.seed}, {len(r.inputs)} inputs, {r.seconds:.1f} s"
