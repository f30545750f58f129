"""Which weights of a run are kept: the last, the best at a validation, an average of checkpoints, a moving average.

OUT/best     the checkpoint of the best validation, where `best` names a score
OUT/model    what the recipe's `final` says
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from numpy.typing import NDArray

from .options import TrainingOptions
from .run import Run
from .state import State
from .weights import Weights

BEST, MOVING = "best", "moving_average"
FALLING = ("loss", "perplexity")
"""Scores that are better if they are less."""


def is_better(options: TrainingOptions, state: State, scores: Mapping[str, float]) -> bool:
    """Whether a validation is the best so far; counts those in a row that weren't."""
    if options.best is None or options.best not in scores:
        return False
    value = -scores[options.best] if options.best in FALLING else scores[options.best]
    if state.best_score is not None and value <= state.best_score:
        state.validations_since_best += 1
        return False
    state.best_score, state.best_step, state.validations_since_best = value, state.step, 0
    return True


def out_of_patience(options: TrainingOptions, state: State) -> bool:
    """Early stopping: `patience` validations in a row were no better than the best before them."""
    return 0 < options.patience <= state.validations_since_best


class MovingAverage:
    """An exponential moving average of a run's arrays, in float32: a <- decay a + (1 - decay) p after each step.

    The decay rises to the one given as (1 + n) / (10 + n) with the n-th step, so that first weights are soon forgotten.
    """

    def __init__(self, weights: Weights, decay: float):
        self.weights, self.decay = weights, decay
        self.values: Any = tree_map(lambda p: p, weights.tree())

    def step(self, number: int) -> None:
        decay = min(self.decay, (1 + number) / (10 + number))
        self.values = tree_map(lambda a, p: decay * a + (1 - decay) * p, self.values, self.weights.tree())
        mx.eval(self.values)

    @property
    def arrays(self) -> dict[str, NDArray]:
        return {name: np.array(value) for name, value in cast(list[tuple[str, mx.array]], tree_flatten(self.values))}


def final_weights(
    options: TrainingOptions, state: State, files: Run, weights: Weights, moving: MovingAverage | None
) -> tuple[dict[str, NDArray], dict[str, Any]]:
    """(the arrays that OUT/model is made of, what run.json says about them)."""
    if options.final == "best" and (files.folder / BEST).exists():
        return weights.read(files.folder / BEST), {"final": "best", "steps": [state.best_step]}
    if options.final == "average":
        folders = files.checkpoints()[-options.average :]
        steps = [int(folder.name.removeprefix("step-")) for folder in folders]
        return weights.average(folders), {"final": "average", "steps": steps}
    if options.final == "moving-average" and moving is not None:
        return moving.arrays, {"final": "moving-average", "steps": [state.step]}
    return weights.arrays(), {"final": "last", "steps": [state.step]}
