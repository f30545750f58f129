"""The part of a context that answers a question, by an encoder whose head says where answers begin and end.

A context that is too long for one row is read in windows that overlap. Begin and end are drawn from the tokens of all
windows together (shared normalization: Clark and Gardner 2018, "Simple and Effective Multi-Paragraph Reading
Comprehension"), and from what stands before the question, [CLS], on which models put what speaks against an answer
(Devlin et al. 2019, section 4.3). The numbers for one window are those of `transformers`' pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.text_pairs import Window
from mlx_transformer.system.errors import UserError

from .encoder_head import EncoderHead
from .line_files import NO_REPORT, LineReport
from .tag import trimmed
from .text_options import AnswerOptions
from .translate import as_lines

Places = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Answer:
    """A part of a context."""

    text: str
    probability: float
    """That an answer begins and ends there."""
    start: int
    """Its first character, counted from 0."""
    end: int
    """The character after its last one."""


def paired(questions: str | Sequence[str], contexts: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return each question with its context; one of either is that of all."""
    question_lines, context_lines = as_lines(questions), as_lines(contexts)
    if isinstance(questions, str):
        question_lines = question_lines * len(context_lines)
    if isinstance(contexts, str):
        context_lines = context_lines * len(question_lines)
    if len(question_lines) != len(context_lines):
        raise UserError(
            f"{len(question_lines)} questions and {len(context_lines)} contexts: give as many of both, or one of either"
        )
    return list(zip(question_lines, context_lines, strict=True))


def answer(
    encoder: EncoderHead,
    pairs: Sequence[tuple[str, str]],
    options: AnswerOptions,
    report: LineReport = NO_REPORT,
) -> list[Answer | None]:
    """Return the best answer for each (question, context); None where the context has no tokens.

    `UserError` for a question that leaves less than half of a row to its context, unless `report` counts those; then
    its end is left out.
    """
    tokenizer = encoder.tokenizer
    form = tokenizer.pair_form(encoder.most)
    located = [each.alone() for each in tokenizer.encode_places([text for pair in pairs for text in pair])]
    rows: list[list[Window]] = []
    for number, (question, context) in enumerate(zip(located[::2], located[1::2], strict=True), report.first_line):
        ids = question.ids
        if len(ids) > form.half:
            if report.on_overlong is None:
                raise UserError(f"question {number}: {len(ids)} tokens, at most {form.half} leave room for its context")
            report.on_overlong(number)
        rows.append(form.windows(ids[: form.half], context.ids) if context.ids else [])
    logits = iter(encoder.logits([window.row for windows in rows for window in windows], report.done))
    answers: list[Answer | None] = []
    for (_, text), context, windows in zip(pairs, located[1::2], rows, strict=True):
        places = [place for place in context.places if place is not None]
        parts = [(window, next(logits)) for window in windows]
        answers.append(_best(text, places, parts, form.before, options.max_answer_tokens) if parts else None)
    return answers


def _best(
    text: str, places: Places, parts: Sequence[tuple[Window, NDArray[np.float64]]], before: int, longest: int
) -> Answer:
    """Return the likeliest answer in any window; the logits (L, 2) of each, in which so many stand `before` the
    question."""
    read = [np.concatenate([logits[:before], logits[w.at : w.at + w.count]]) for w, logits in parts]
    total = np.logaddexp.reduce(np.concatenate(read), axis=0)  # (2,)
    best, span = -np.inf, (0, 0)
    for (window, _), logits in zip(parts, read, strict=True):
        starts, ends = (logits[before:] - total).T
        for more in range(min(longest, window.count)):
            both = starts[: window.count - more] + ends[more:]
            i = int(both.argmax())
            if both[i] > best:
                best, span = float(both[i]), (window.first + i, window.first + i + more)
    start, end = trimmed(text, places[span[0]][0], places[span[1]][1])
    return Answer(text[start:end], float(np.exp(best)), start, end)
