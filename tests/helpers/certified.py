"""Beam searches against the float64 reference's, by the rule of `validate`: other ids pass only at a certified tie."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from export.validate.checks.free_running import judge_beam
from export.validate.checks.judging import largest_error
from export.validate.reference import Reference
from export.validate.reference.search import beam_search, teacher_forced
from export.validate.rule import ErrorScale, budget_for
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.decoding.options import Hypothesis, Options


def assert_beams(
    checkpoint: Path, rows: Sequence[list[int]], options: dict[str, Any], *results: list[list[Hypothesis]]
) -> None:
    """Each result, the hypotheses that a runtime finds for each row, must be those of the reference's own search.

    The largest error of a logit is the rule's: a multiple of the float32 reference's error along the best outputs.
    """
    opened, asked = open_checkpoint(checkpoint), Options(**options)
    weights = dict(opened.tensors())
    truth, single = (Reference(opened.config, weights, kind) for kind in (np.float64, np.float32))
    states = beam_search(truth, rows, asked)
    best = [list(s.finished[0][1].tokens[: s.limit - 1]) for s in states]
    t64, t32 = (teacher_forced(each, rows, best, [asked] * len(rows)) for each in (truth, single))
    pairs = [(a[: len(ids) + 1], b[: len(ids) + 1]) for a, b, ids in zip(t64, t32, best, strict=True)]
    scales = [ErrorScale.of(b - a, a) for a, b in pairs]
    error = largest_error(budget_for("float32", "cpu"), scales)
    for hypotheses in results:
        outputs = [[(h.ids, h.score) for h in found] for found in hypotheses]
        problems = [judged.problem for judged in judge_beam(truth, states, outputs, error) if judged.problem]
        assert not problems, problems
