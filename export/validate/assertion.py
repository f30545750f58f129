"""One line for a test suite.

def test_the_exported_model_is_the_trained_one():
    assert_equal("run/model", "run/onnx")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .compare import compare
from .report import Report


def assert_equal(
    checkpoint: str | Path,
    onnx: str | Path | None,
    runtimes: Sequence[str] | None = None,
    seed: int | None = None,
    threads: int | None = None,
) -> Report:
    """As `compare`; AssertionError unless everything is equal, with what failed first, the operation that is to blame
    and the seed that repeats the run."""
    report = compare(checkpoint, onnx, runtimes, seed, threads=threads)
    if not report.equal:
        first = report.failures()
        culprits = [f"{c.runtime}: culprit: {c.sentence}" for c in report.culprits if c.point or c.why]
        lines = dict.fromkeys([*first[:1], *culprits])
        raise AssertionError(f"{checkpoint} and {onnx} differ (seed {report.seed}): {'; '.join(lines)}")
    return report
