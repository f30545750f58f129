"""Batches of labelled text: `data/labelled.py` as ids and numbers. B rows, L tokens, C classes.

The answer that is learned for a row is by the head: the number of its class (B,); 1 for each of its several classes, or
a number, (B, C); the number of each token's class (B, L); where the answer's first and last token stand (B, 2). -1 is
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.heads import OUTSIDE, Head
from mlx_transformer.core.text_pairs import Located, Pair
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.system.errors import UserError

from .batches import BatchesOfOthers, TokenBatches
from .epochs import StepArrays
from .labelled import Labelled, Part
from .ragged import padded, ragged

NOTHING = -1


@dataclass(frozen=True)
class LabelledRows:
    """Rows of ids, the kind of each token, and what is learned of each row: numbers."""

    rows: list[Pair]
    targets: list[NDArray]


def encoded(text: Labelled, tokenizer: Tokenizer, head: Head, most: int) -> LabelledRows:
    """Encode labelled text for a head, in rows of at most `most` tokens: longer ones are cut, but contexts of questions
    are read in windows. `UserError` for a label that the head doesn't have."""
    numbers = {label: i for i, label in enumerate(head.labels)}
    for label in text.labels:
        if label not in numbers:
            raise UserError(f"the label {label!r:.60} is none of the model's: {', '.join(head.labels)[:200]}")
    if text.form == "answer":
        windows = list(_answers(text, tokenizer, most))
        return LabelledRows([row for row, _ in windows], [target for _, target in windows])
    if text.form == "entities":
        located = tokenizer.encode_places([each for each in text.texts if isinstance(each, str)])
        short = [each.cut(most) if len(each.ids) > most else each for each in located]
        kinds = [_kinds(each, parts, numbers) for each, parts in zip(short, text.targets, strict=True)]
        return LabelledRows([Pair(each.ids, [0] * len(each.ids)) for each in short], kinds)
    return LabelledRows(_texts(text, tokenizer, most), [_classes(text.form, each, numbers) for each in text.targets])


def _texts(text: Labelled, tokenizer: Tokenizer, most: int) -> list[Pair]:
    both = [each for each in text.texts if isinstance(each, tuple)]
    pairs = iter(tokenizer.encode_pairs(both, most) if both else ())
    single = iter(tokenizer.encode_batch([each for each in text.texts if isinstance(each, str)]))
    rows = []
    for each in text.texts:
        if isinstance(each, tuple):
            rows.append(next(pairs))
            continue
        ids = next(single)
        ids = ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]
        rows.append(Pair(ids, [0] * len(ids)))
    return rows


def _classes(form: str, target: Any, numbers: dict[str, int]) -> NDArray:
    if form == "label":
        return np.array(numbers[target], np.int32)
    if form == "score":
        if not 0 <= target <= 1:
            raise UserError(f"score {target!r} is no share: classes are learned of scores from 0 to 1")
        return np.array([target], np.float32)
    return np.isin(np.arange(len(numbers)), [numbers[label] for label in target]).astype(np.float32)


def _kinds(located: Located, parts: Sequence[Part], numbers: dict[str, int]) -> NDArray:
    """Return (L,): a token is of the part that its first letter is in, what stands around a text of none."""
    kinds = np.full(len(located.ids), NOTHING, np.int32)
    for i, place in enumerate(located.places):
        if place is not None:
            kinds[i] = numbers[OUTSIDE]
    for start, end, first, other in parts:
        inside = [
            i for i, place in enumerate(located.places) if place is not None and start < place[1] and place[0] < end
        ]
        kinds[inside] = numbers[other]
        kinds[inside[:1]] = numbers[first]
    return kinds


def _answers(text: Labelled, tokenizer: Tokenizer, most: int) -> Iterator[tuple[Pair, NDArray]]:
    """Yield each window of each context; one without the answer, or with a part of it, has it on its first token, as
    BERT's (Devlin et al. 2019, section 4.3)."""
    form = tokenizer.pair_form(most)
    texts = [part for pair in text.texts for part in pair]
    located = [each.alone() for each in tokenizer.encode_places(texts)]
    for question, context, place in zip(located[::2], located[1::2], text.targets, strict=True):
        inside = [
            i for i, each in enumerate(context.places) if place and each and place[0] < each[1] and each[0] < place[1]
        ]
        for window in form.windows(question.ids[: form.half], context.ids):
            where = [window.at + i - window.first for i in (inside[0], inside[-1])] if inside else []
            whole = bool(where) and window.at <= where[0] and where[1] < window.at + window.count
            yield window.row, np.array(where if whole else [0, 0], np.int32)


@dataclass(frozen=True)
class LabelledBatch:
    """One step's input; `tokens` counts the targets."""

    targets: NDArray
    ids: NDArray  # (B, L) int32, padded on the right
    token_types: NDArray | None  # (B, L) int32
    tokens: int

    def arrays(self, pad_id: int) -> StepArrays:
        return self.targets, None, self.ids, self.ids != pad_id, self.token_types


class LabelledBatches(BatchesOfOthers[LabelledBatch]):
    """Batches of labelled rows, made of the batches `clean`, whose sides are both the rows. with_types: the model tells
    kinds of tokens apart."""

    def __init__(self, clean: TokenBatches, rows: LabelledRows, head: Head, with_types: bool):
        super().__init__(clean)
        self._of_tokens = head.kind == "token-classes"
        self._types = ragged([row.token_types for row in rows.rows]) if with_types else None
        self._targets = rows.targets

    def build(self, part: tuple[int, NDArray], epoch: int, index: int) -> LabelledBatch:
        ids = self.clean.build(part, epoch, index).source
        members = [self._targets[i] for i in part[1]]
        types = None if self._types is None else padded([self._types[i] for i in part[1]], len(ids), ids.shape[1], 0)
        if self._of_tokens:
            targets = padded(members, len(ids), ids.shape[1], NOTHING)
            return LabelledBatch(targets, ids, types, int((targets != NOTHING).sum()))
        targets = np.full((len(ids), *members[0].shape), NOTHING, members[0].dtype)
        targets[: len(members)] = np.stack(members)
        return LabelledBatch(targets, ids, types, len(members))
