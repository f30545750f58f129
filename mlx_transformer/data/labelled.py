"""Labelled text for training classifiers: read it, encode it, and cut it into batches.

A line is a text or a pair of texts with a class, several classes or a score; a text with labelled words or entities;
or a question with a context and its answer's place there:

    .tsv      text, tab, label; or text, tab, second text, tab, label
    .jsonl    {"text": ..., "label": "good"}, {"text": ..., "labels": ["a", "b"]}, {"text": ..., "score": 0.7}, each
              perhaps with "text_pair"; {"words": [...], "labels": [...]}; {"text": ..., "entities": [{"label": ...,
              "start": 0, "end": 4}]}; {"question": ..., "context": ..., "answer": {"start": 0, "end": 4} or null}

start and end count characters from 0; end is after the last character. All lines of a file have the same form. Files
may be packed (.gz, .zst).

Shapes: B rows, L tokens, C classes. Targets depend on the head: class numbers (B,); for several classes a 1 for each
class that applies, or a score, (B, C); each token's class (B, L); the answer's first and last token (B, 2). -1 means no
target.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.heads import BEGINS, CONTINUES, OUTSIDE, Head
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import digest_of
from mlx_transformer.text.pairs import Located, Pair
from mlx_transformer.text.tokenizer import Tokenizer

from .batches import BatchesOfOthers, TokenBatches
from .epochs import StepArrays
from .line_files import json_blocks, line_blocks, unpacked_suffix
from .ragged import padded, ragged

Text = str | tuple[str, str]
Form = Literal["label", "labels", "score", "entities", "answer"]
Part = tuple[int, int, str, str]
"""A labelled part of a text: (start, end in characters, label of its first token, label of its other tokens)."""
SCORE = "score"
"""Name of the only class when texts have scores."""
FORMS = (
    '"text" (perhaps with "text_pair") and "label", "labels" or "score"; "words" and "labels"; "text" and "entities"; '
    'or "question", "context" and "answer"'
)


@dataclass(frozen=True)
class Labelled:
    """Texts with their targets: by `form` a label, a list of labels, a score, a list of `Part`, or the (start, end) of
    an answer (None without an answer). digests: SHA-256, for run.json."""

    form: Form
    texts: list[Text]
    targets: list[Any]

    @cached_property
    def digests(self) -> dict[str, str]:
        rows = zip(self.texts, self.targets, strict=True)
        return {"labelled": digest_of(json.dumps(each).encode() + b"\n" for each in rows)}

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lines(self) -> Iterator[str]:
        """All text, for a vocabulary."""
        for text in self.texts:
            yield from [text] if isinstance(text, str) else text

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in the text, sorted. For labelled words and entities, `OUTSIDE` comes first."""
        if self.form == "label":
            return tuple(sorted(set(self.targets)))
        if self.form == "labels":
            return tuple(sorted({label for each in self.targets for label in each}))
        if self.form == "entities":
            names = {label for parts in self.targets for part in parts for label in part[2:]}
            return (OUTSIDE, *sorted(names - {OUTSIDE}))
        return (SCORE,) if self.form == "score" else ()

    @property
    def head(self) -> Head:
        """The simplest head that learns these targets."""
        if self.form == "answer":
            return Head(kind="spans")
        if self.form == "entities":
            return Head(kind="token-classes", labels=self.labels)
        return Head(kind="classes", pooling="mean", labels=self.labels, several=self.form == "labels")

    def select(self, indices: Sequence[int]) -> Labelled:
        return Labelled(self.form, [self.texts[i] for i in indices], [self.targets[i] for i in indices])


def read_labelled(where: str) -> tuple[Labelled, int]:
    """Read a file: return (labelled text, number of lines left out since they have no text).

    Raises UserError with file and line if a line has none of the forms above, or another form than the lines before.
    Also raises it if there is no text at all.
    """
    path = Path(where)
    readers = {".tsv": _tsv, ".jsonl": _jsonl, ".ndjson": _jsonl}
    if (kind := unpacked_suffix(path)) not in readers:
        raise UserError(f"{path}: labelled text is read from .tsv and .jsonl, also as .gz or .zst")
    form: Form | None = None
    texts: list[Text] = []
    targets: list[Any] = []
    empty = 0
    for place, label, text, target in readers[kind](path):
        if label != (form := form or label):
            raise UserError(f"{place}: has {label!r}, the lines before it have {form!r}; give one form in a file")
        if not "".join(text).strip():
            empty += 1
            continue
        texts.append(text)
        targets.append(target)
    if form is None or not texts:
        raise UserError(f"{where}: holds no labelled text; each line needs {FORMS}")
    return Labelled(form, texts, targets), empty


Line = tuple[str, Form, Text, Any]
"""(file and line number, form, text, target)."""


def _tsv(path: Path) -> Iterator[Line]:
    width = 0
    for number, line in enumerate(chain.from_iterable(line_blocks(path)), 1):
        *texts, label = line.split("\t")
        width = width or len(texts)
        if len(texts) != width or not 1 <= width <= 2:
            expected = "2, or 3 of pairs" if len(texts) == width else f"{width + 1} as in the first line"
            raise UserError(f"{path}, line {number}: {len(texts) + 1} columns; there must be {expected}")
        yield f"{path}, line {number}", "label", texts[0] if width == 1 else (texts[0], texts[1]), label


def _jsonl(path: Path) -> Iterator[Line]:
    for where, _, row in chain.from_iterable(json_blocks(path)):
        if not isinstance(row, dict):
            raise UserError(f"{where}: is no object; it needs {FORMS}")
        reader = next((READERS[key] for key in READERS if set(key) <= row.keys()), None)
        if reader is None:
            raise UserError(f"{where}: needs {FORMS}")
        yield where, *reader(row, where)


Read = tuple[Form, Text, Any]


def _text(row: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(row[name], str):
        raise UserError(f"{where}: {name} is {row[name]!r:.60}, no text")
    return row[name]


def _texts(row: dict[str, Any], where: str) -> Text:
    first = _text(row, "text", where)
    return (first, _text(row, "text_pair", where)) if "text_pair" in row else first


def _names(row: dict[str, Any], name: str, where: str) -> list[str]:
    if not isinstance(row[name], list) or not all(isinstance(each, str) for each in row[name]):
        raise UserError(f"{where}: {name} is {row[name]!r:.60}, no list of texts")
    return row[name]


def _of_score(row: dict[str, Any], where: str) -> Read:
    score = row["score"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise UserError(f"{where}: score is {score!r:.60}; it must be a finite number")
    return "score", _texts(row, where), float(score)


def _of_words(row: dict[str, Any], where: str) -> Read:
    words, labels = _names(row, "words", where), _names(row, "labels", where)
    if len(words) != len(labels):
        raise UserError(f"{where}: {len(words)} words and {len(labels)} labels; each word needs its label")
    parts: list[Part] = []
    start = 0
    for word, label in zip(words, labels, strict=True):
        parts.append((start, start + len(word), label, _continued(label)))
        start += len(word) + 1
    return "entities", " ".join(words), parts


def _of_entities(row: dict[str, Any], where: str) -> Read:
    text, entities = _text(row, "text", where), row["entities"]
    if not isinstance(entities, list) or not all(isinstance(each, dict) for each in entities):
        raise UserError(f"{where}: entities is {entities!r:.60}, no list of objects")
    parts: list[Part] = []
    for each in entities:
        start, end = _place(each, text, where)
        label = each.get("label")
        if not isinstance(label, str):
            raise UserError(f"{where}: an entity's label is {label!r:.60}, no text")
        parts.append((start, end, BEGINS + label, CONTINUES + label))
    return "entities", text, parts


def _of_answer(row: dict[str, Any], where: str) -> Read:
    question, context = _text(row, "question", where), _text(row, "context", where)
    answer = row["answer"]
    if answer is not None and not isinstance(answer, dict):
        raise UserError(f'{where}: answer is {answer!r:.60}; it must be null, or an object with "start" and "end"')
    return "answer", (question, context), None if answer is None else _place(answer, context, where)


def _place(each: dict[str, Any], text: str, where: str) -> tuple[int, int]:
    start, end = each.get("start"), each.get("end")
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= len(text):
        raise UserError(
            f"{where}: start {start!r:.20} and end {end!r:.20} are no part of a text of {len(text)} characters"
        )
    return start, end


def _continued(label: str) -> str:
    """The label of a word's tokens after the first: "B-LOC" -> "I-LOC"."""
    return CONTINUES + label.removeprefix(BEGINS) if label.startswith(BEGINS) else label


READERS: dict[tuple[str, ...], Callable[[dict[str, Any], str], Read]] = {
    ("words", "labels"): _of_words,
    ("text", "entities"): _of_entities,
    ("question", "context", "answer"): _of_answer,
    ("text", "label"): lambda row, where: ("label", _texts(row, where), _text(row, "label", where)),
    ("text", "labels"): lambda row, where: ("labels", _texts(row, where), sorted(set(_names(row, "labels", where)))),
    ("text", "score"): _of_score,
}
"""Readers by the keys of a line; the first whose keys the line has all of is used."""


NOTHING = -1


@dataclass(frozen=True)
class LabelledRows:
    """Encoded rows (ids and token types), and the numeric target of each row."""

    rows: list[Pair]
    targets: list[NDArray]


def encoded(text: Labelled, tokenizer: Tokenizer, head: Head, most: int) -> LabelledRows:
    """Encode labelled text for a head, in rows of at most `most` tokens.

    Longer texts are cut; longer contexts of questions are split into overlapping windows, one row each. Raises
    UserError for a label that the head doesn't have.
    """
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
    return LabelledRows(
        _text_rows(text, tokenizer, most), [_classes(text.form, each, numbers) for each in text.targets]
    )


def _text_rows(text: Labelled, tokenizer: Tokenizer, most: int) -> list[Pair]:
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
    """Class numbers of the tokens (L,): a token that overlaps a part gets its label, other tokens `OUTSIDE`.

    Special tokens, e.g. eos, have no target.
    """
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
    """Yield (row, target) for each window of each context. If the whole answer isn't in the window, the target is the
    row's first token, as in BERT (Devlin et al. 2019, section 4.3)."""
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
    """A step's input. tokens: the number of targets."""

    targets: NDArray
    ids: NDArray  # (B, L) int32, padded on the right
    token_types: NDArray | None  # (B, L) int32
    tokens: int

    def arrays(self, pad_id: int) -> StepArrays:
        return self.targets, None, self.ids, self.ids != pad_id, self.token_types


class LabelledBatches(BatchesOfOthers[LabelledBatch]):
    """Batches of labelled rows. clean: batches whose source and target are both the rows. with_types: the model has
    token types, e.g. 0 for the question and 1 for the context."""

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
