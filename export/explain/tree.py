"""A beam search as it went: every candidate of every step, what became of it, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.arrays import Arrays
from mlx_transformer.generation.beam import Beam
from mlx_transformer.generation.greedy import Greedy
from mlx_transformer.generation.options import Hypothesis, Options
from mlx_transformer.generation.search import checked
from mlx_transformer.generation.steps import DEAD, Batch, Model, run
from mlx_transformer.system.errors import UserError

KEPT, FINISHED, DROPPED = "kept", "finished", "dropped"


@dataclass(frozen=True)
class Node:
    """A token that was considered. parent: its place in the tree, -1 at the start. log_p: of all tokens to here.
    score: log p / lp(length), of a finished one."""

    step: int
    parent: int
    token: int
    log_p: float
    fate: str
    score: float | None = None


class RecordedBeam(Beam):
    """The beam search of one sentence, which remembers what it chose among."""

    def __init__(self, xp: Arrays, batch: Batch, options: Options, config: TransformerConfig):
        super().__init__(xp, batch, options, config)
        self.nodes: list[Node] = []
        self.slots = [-1]  # the node of each live hypothesis

    def advance(self, values: Any, parent: Any, token: Any, t: int) -> tuple[Any, Any]:
        log_p, slot, id = (np.asarray(self.xp.numpy(x))[0] for x in (values, parent, token))
        ended = bool(np.asarray(self.xp.numpy(self.done))[0])
        at_limit = int(np.asarray(self.xp.numpy(self.limits))[0]) <= t + 1
        result = super().advance(values, parent, token, t)
        if not ended:
            self._note(log_p, slot, id, at_limit, t)
        return result

    def _note(self, values: NDArray, parent: NDArray, token: NDArray, at_limit: bool, t: int) -> None:
        slots: list[int] = []
        for place, (log_p, slot, id) in enumerate(zip(values, parent, token, strict=True)):
            if log_p <= DEAD:
                continue
            ends, score = bool(id == self.config.eos_id), None
            if place < self.width and (ends or at_limit):
                fate, score = FINISHED, float(log_p / self.options.penalty(t + 1))
            elif not ends and len(slots) < self.width and not at_limit:
                fate = KEPT
            else:
                fate = DROPPED
            if not ends and len(slots) < self.width:
                slots.append(len(self.nodes))
            self.nodes.append(Node(t, self.slots[int(slot)], int(id), float(log_p), fate, score))
        self.slots = slots or [-1]


def searched(model: Model, ids: list[int], options: Options) -> tuple[list[Hypothesis], list[Node], int]:
    """Return the outputs of one input, best first; the tree, none of greedy search; and the most tokens that were
    allowed."""
    sources, forced, limits = checked(model, {"ids": [ids]}, None, options)
    batch = Batch(np.arange(1), sources, forced, limits, np.arange(1))
    kind = RecordedBeam if options.beam > 1 else Greedy
    strategy = kind(model.arrays, batch, options, model.config)
    hypotheses = run(model, batch, strategy)[0]
    if not hypotheses or not np.isfinite(hypotheses[0].score):
        raise UserError("the model's logits are not finite; check its weights")
    return hypotheses, getattr(strategy, "nodes", []), int(limits[0])
