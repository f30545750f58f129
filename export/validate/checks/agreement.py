"""Decisions along given tokens: does a runtime prefer the token that the reference prefers, with and without a cache?

top-1, teacher-forced   the likeliest next token at every position against the float64 reference's
cached against full     one runtime's step-by-step logits against its own of one full pass

Another choice than the reference's is accepted only at a certified tie: a gap within twice the logits' budget.
Everything is noted while inputs pass by, and judged at the end, when the budget of the logits is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from export.validate.findings import PLAIN, Tokens
from export.validate.rule import Truth

Array = NDArray
CHOOSING = ("vocabulary", "classes", "token-classes")
"""Kinds of heads whose largest logit is a choice."""
MOST_NOTED = 1000  # of one runtime: a broken one disagrees everywhere


@dataclass
class _Noted:
    """`sentences`: rows. `tokens`: valid positions. `parted`: (gap of the logits, message) where choices differ."""

    sentences: int = 0
    tokens: int = 0
    parted: list[tuple[float, str]] = field(default_factory=list)


class Agreement:
    """Notes of one comparison, one for each runtime and kind."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, str], _Noted] = {}
        self._full: dict[str, Array] = {}

    def add(self, runtime: str, path: str, case: Case, logits: Array | None, truth: Truth) -> None:
        """Note the logits (B,L,V) of one path; those of a case's plain path must come first."""
        if path == PLAIN:
            self._full.pop(runtime, None)
        if logits is None or logits.shape != truth.t64.shape:
            return
        if path == PLAIN:
            self._full[runtime] = logits
            self._note(runtime, "top-1, teacher-forced", case, logits, truth.t64, truth)
        elif path == "cached" and runtime in self._full:
            self._note(runtime, "cached against full", case, logits, self._full[runtime], truth)

    def _note(self, runtime: str, kind: str, case: Case, got: Array, expected: Array, truth: Truth) -> None:
        noted = self._noted.setdefault((runtime, kind), _Noted())
        noted.sentences += len(got)
        noted.tokens += int(truth.valid.sum())
        chosen, best = got.argmax(axis=-1), expected.argmax(axis=-1)
        for place in np.argwhere((chosen != best) & truth.valid)[: MOST_NOTED - len(noted.parted)]:
            at = tuple(map(int, place))
            gap = float(expected[at][best[at]]) - float(expected[at][chosen[at]])
            where = ", position ".join(map(str, at))
            message = f"{case.name}, row {where}: {chosen[at]}, expected {best[at]}, gap {gap:.3g}"
            noted.parted.append((gap, message))

    def judged(self, limits: Mapping[str, float]) -> Iterator[Tokens]:
        """Yield the choices judged: `limits` has for each runtime the largest error that a logit may have."""
        for (runtime, kind), noted in self._noted.items():
            # Two tensors of the same runtime may err on either side.
            tie = limits[runtime] * (2 if kind.startswith("top-1") else 4)
            problems = [
                f"{message} (a tie would be at most {tie:.3g})" for gap, message in noted.parted if not gap <= tie
            ]
            ties = [message for gap, message in noted.parted if gap <= tie]
            yield Tokens(runtime, kind, noted.sentences, noted.tokens, tuple(ties), tuple(problems))
