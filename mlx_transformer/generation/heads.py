"""Encoders with a head: classify texts, rank documents, tag words, answer questions, fill in <mask>.

Classify: a text or a pair of texts.

Rerank: the encoder reads the query with each document and has one class (Nogueira and Cho 2019, "Passage Re-ranking
with BERT"). This is more exact than comparing vectors, and far slower.

Tag: each token gets its likeliest label. B-PER and I-PER (Ramshaw and Marcus 1995) begin and continue an entity PER; O
is none. Neighbouring tokens of one label are one entity, unless the later token begins another; `transformers` calls
this aggregation "simple". A text too long for one row is read in overlapping windows; a token counts in the window
where it has more text around it.

Answer: the likeliest span of the context. A context too long for one row is read in overlapping windows. Start and end
are normalised over the tokens of all windows together (shared normalization: Clark and Gardner 2018, "Simple and
Effective Multi-Paragraph Reading Comprehension"). The tokens before the question, e.g. [CLS], are included: models put
the probability of "no answer" there (Devlin et al. 2019, section 4.3). With one window the numbers are those of
`transformers`' pipeline.

Fill: the head over the vocabulary, of an encoder trained to restore masked words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import BEGINS, CONTINUES, OUTSIDE, HeadKind
from mlx_transformer.core.inputs import BATCH_TOKENS, Passes, of_one_length
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.pairs import Pair, Window
from mlx_transformer.text.tokenizer import MASK_TOKEN, Tokenizer

from .line_files import NO_REPORT, LineReport
from .text_options import AnswerOptions, RerankOptions
from .translate import as_lines, fitting_tokenizer


class EncoderHead:
    """Tokenizer, encoder and head in one: `logits(ids, token_types=...)` takes rows (B, L) of equal length."""

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer: Tokenizer | None,
        logits: Callable[..., Any],
        where: str,
        kind: HeadKind,
        verb: str,
        passes: Passes,
    ) -> None:
        """where: the model's name in error messages. passes: how forward passes are scheduled.

        Raises `UserError`, naming `verb`, for a model without a head of this kind, or without a tokenizer that fits it.
        """
        if config.architecture == "encoder" and config.head.kind != kind:
            raise UserError(f"{where}: {verb} needs a head of kind {kind!r}; its head is of kind {config.head.kind!r}")
        self.tokenizer = fitting_tokenizer(config, tokenizer, where, "encoder", verb, words=False)
        self.config, self.where, self.most, self._logits = config, where, config.max_positions, logits
        self._passes = passes

    def logits(self, rows: Sequence[Pair], done: Callable[[float], None]) -> list[NDArray[np.float64]]:
        """Return the head's logits for each row, (C,) or (L, C). Rows of equal length share a pass, so nothing is
        padded."""
        logits: list[NDArray[np.float64]] = [np.zeros(0)] * len(rows)
        computed = 0

        def compute(part: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
            types = {"token_types": [rows[i].token_types for i in part]} if self.config.token_types else {}
            batch = np.asarray(self._logits([rows[i].ids for i in part], **types), np.float64)
            if not np.isfinite(batch).all():
                raise UserError(f"{self.where}: its logits are not finite; check its weights")
            return part, batch

        batches = of_one_length([len(row.ids) for row in rows], BATCH_TOKENS // self._passes.at_once)
        for part, batch in self._passes.in_parallel(compute, batches):
            for i, each in zip(part, batch, strict=True):
                logits[i] = each
            computed += len(part)
            done(computed / len(rows))
        return logits


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Softmax over the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


Text = str | tuple[str, str]
"""A text, or a pair of texts."""


@dataclass(frozen=True)
class Scored:
    """A class and its probability; for a regression head (`core/heads.py`) its score, any number."""

    label: str
    probability: float


def classify(
    encoder: EncoderHead, texts: Sequence[Text], several: bool | None = None, report: LineReport = NO_REPORT
) -> list[list[Scored]]:
    """Return all classes for each text with their probabilities, likeliest first.

    several: each class has its own probability (sigmoid), as always with a single class; otherwise they sum to 1
    (softmax). None: as the model's config says, where a regression head gives scores.
    An overlong pair is cut. Raises `UserError` for a single text longer than the model takes, unless `report`
    counts it: then it is cut too.
    """
    rows = text_rows(encoder, texts, report)
    return [scored(encoder, logits, several) for logits in encoder.logits(rows, report.done)]


def scored(encoder: EncoderHead, logits: NDArray[np.float64], several: bool | None = None) -> list[Scored]:
    """Return the classes of a text with their probabilities, from its logits (C,); see `classify`."""
    head = encoder.config.head
    if head.scores and several is None:
        return [Scored(head.labels[i], float(logits[i])) for i in np.argsort(-logits, kind="stable")]
    alone = (head.several if several is None else several) or len(head.labels) == 1
    shares = np.exp(-np.logaddexp(0, -logits)) if alone else softmax(logits)
    return [Scored(head.labels[i], float(shares[i])) for i in np.argsort(-shares, kind="stable")]


def text_rows(encoder: EncoderHead, texts: Sequence[Text], report: LineReport) -> list[Pair]:
    """Return the ids of each text, in order; overlong texts are cut or refused as in `classify`."""
    for number, text in enumerate(texts, report.first_line):
        if not isinstance(text, str) and not _is_pair(text):
            raise UserError(f"text {number}: must be text, or a pair (text, text), not {type(text).__name__}")
    pairs = [text for text in texts if isinstance(text, tuple)]
    encoded = iter(encoder.tokenizer.encode_batch([text for text in texts if isinstance(text, str)]))
    joined = iter(encoder.tokenizer.encode_pairs(pairs) if pairs else ())
    rows = []
    for number, text in enumerate(texts, report.first_line):
        if isinstance(text, tuple):
            row = next(joined)
            if len(row.ids) > encoder.most:
                [row] = encoder.tokenizer.encode_pairs([text], encoder.most)
                if report.on_overlong is not None:
                    report.on_overlong(number)
            rows.append(row)
            continue
        ids = next(encoded)
        if len(ids) > encoder.most:
            if report.on_overlong is None:
                raise UserError(f"text {number}: {len(ids)} tokens, the model takes at most {encoder.most}")
            report.on_overlong(number)
            ids = [*ids[: encoder.most - 1], ids[-1]]
        rows.append(Pair(ids, [0] * len(ids)))
    return rows


def _is_pair(text: object) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)


@dataclass(frozen=True)
class Ranked:
    """A document's place in the ranking of a query."""

    index: int
    """The document's index in the list, from 0."""
    relevance_score: float
    """The probability of the model's one class."""


def check_reranker(config: TransformerConfig, where: str) -> None:
    """Raise `UserError` unless the head has exactly one class."""
    if (count := len(config.head.labels)) != 1:
        raise UserError(f"{where}: rerank needs a head with one class; its head has {count}")


def rerank(
    encoder: EncoderHead,
    query: str,
    documents: Sequence[str],
    options: RerankOptions,
    report: LineReport = NO_REPORT,
) -> list[Ranked]:
    """Return the documents by relevance to the query, best first; ties keep their order.

    A query and document that are too long lose the end of the longer, then of both; `report` counts them.
    """
    if not isinstance(query, str):
        raise UserError(f"query: must be text, not {type(query).__name__}")
    classes = classify(encoder, [(query, document) for document in documents], several=True, report=report)
    return ordered([best.probability for [best] in classes], options)


def ordered(scores: Sequence[float], options: RerankOptions) -> list[Ranked]:
    """Rank documents by their scores, as `rerank` does."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [Ranked(i, scores[i]) for i in order[: options.top_n]]


@dataclass(frozen=True)
class Tagged:
    """A labelled part of a text."""

    label: str
    probability: float
    """The mean probability of its tokens."""
    start: int
    """Index of its first character, from 0."""
    end: int
    """Index behind its last character."""
    text: str


class _Token(NamedTuple):
    label: str
    begins: bool
    probability: float
    place: tuple[int, int]


def tag(encoder: EncoderHead, texts: str | Sequence[str], report: LineReport = NO_REPORT) -> list[list[Tagged]]:
    """Return the entities of each text in order, with their places. Texts may have any length."""
    lines = as_lines(texts)
    located = encoder.tokenizer.encode_places(lines)
    windows = [each.windows(encoder.most) for each in located]
    logits = iter(encoder.logits([window.row for each in windows for window in each], report.done))
    labels = encoder.config.head.labels
    tagged = []
    for line, each, own in zip(lines, located, windows, strict=True):
        places = [place for place in each.places if place is not None]
        shares = _joined(len(places), own, [softmax(next(logits)) for _ in own])
        tagged.append(_entities(line, _tokens(places, shares, labels)))
    return tagged


def _joined(count: int, windows: Sequence[Window], shares: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Join the windows' probabilities (tokens of the row, C) to those of the whole text (L, C)."""
    joined = np.zeros((count, shares[0].shape[1]))
    around = np.full(count, -1.0)
    for window, rows in zip(windows, shares, strict=True):
        place = np.arange(window.count)
        before = place if window.first else np.full(window.count, np.inf)
        behind = place[::-1] if window.first + window.count < count else np.full(window.count, np.inf)
        nearest, part = np.minimum(before, behind), slice(window.first, window.first + window.count)
        better = nearest > around[part]
        joined[part][better] = rows[window.at : window.at + window.count][better]
        around[part][better] = nearest[better]
    return joined


def _tokens(places: Sequence[tuple[int, int]], shares: NDArray[np.float64], labels: Sequence[str]) -> list[_Token]:
    """Give each of L tokens its likeliest label; places (L), probabilities (L, C)."""
    tokens = []
    for place, row in zip(places, shares, strict=True):
        label, best = labels[int(row.argmax())], float(row.max())
        name = label[len(BEGINS) :] if label.startswith((BEGINS, CONTINUES)) else label
        tokens.append(_Token(name, label.startswith(BEGINS), best, place))
    return tokens


def _entities(text: str, tokens: Sequence[_Token]) -> list[Tagged]:
    groups: list[list[_Token]] = []
    for token in tokens:
        if groups and groups[-1][-1].label == token.label and not token.begins:
            groups[-1].append(token)
        else:
            groups.append([token])
    entities = []
    for group in groups:
        start, end = trimmed(text, group[0].place[0], group[-1].place[1])
        if group[0].label != OUTSIDE and start < end:
            probability = sum(token.probability for token in group) / len(group)
            entities.append(Tagged(group[0].label, probability, start, end, text[start:end]))
    return entities


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the place without white space at its ends, which some vocabularies count as part of a word."""
    text_left = text[start:end].lstrip()
    return end - len(text_left), end - len(text_left) + len(text_left.rstrip())


Places = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Answer:
    """The part of a context that answers a question."""

    text: str
    probability: float
    """The probability that an answer starts and ends there."""
    start: int
    """Index of its first character in the context, from 0."""
    end: int
    """Index behind its last character."""


def paired(questions: str | Sequence[str], contexts: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pair questions with contexts; a single string is paired with every item of the other list."""
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
    """Return the best answer for each (question, context); None if the context has no tokens.

    A question may take up half of a row. A longer question is cut if `report` counts it, and otherwise a `UserError`.
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
    """Return the likeliest answer over all windows, each with logits (L, 2) for start and end.

    before: number of tokens before the question, e.g. 1 for [CLS]. longest: most tokens of an answer.
    """
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


@dataclass(frozen=True)
class Filling:
    """One guess for a <mask>."""

    token: str
    """The guessed text."""
    probability: float
    text: str
    """The line with this guess in place, and with the best guess for every other <mask>."""


def fill(
    config: TransformerConfig,
    tokenizer: Tokenizer | None,
    logits: Callable[[list[list[int]]], Any],
    lines: str | Sequence[str],
    top_k: int = 5,
    where: str = "model",
    report: LineReport = NO_REPORT,
) -> list[list[list[Filling]]]:
    """Return, for each line and each <mask> in it, the `top_k` likeliest tokens.

    A <mask> takes the space before it. The vocabulary's own spelling, e.g. [MASK], means the same.

    logits: ids (1, L) -> (1, L, V). where: the model's name in error messages. report: line numbers and progress, if
    the lines are a file's.
    Raises `UserError` if the model isn't an encoder with a mask token, if a line has no <mask> or is longer than the
    model takes, or for a wrong `top_k`.
    """
    tokenizer = filling_tokenizer(config, tokenizer, where, top_k)
    guesses: list[list[list[Filling]]] = []
    lines = as_lines(lines)
    for ids in masked_rows(config, tokenizer, lines, report.first_line):
        places = [i for i, id in enumerate(ids) if id == tokenizer.mask_id]
        guesses.append(_guesses(tokenizer, ids, places, np.array(logits([ids]), np.float64)[0, places], top_k))
        report.done(len(guesses) / len(lines))
    return guesses


def filling_tokenizer(config: TransformerConfig, tokenizer: Tokenizer | None, where: str, top_k: int = 1) -> Tokenizer:
    """Return the tokenizer. Raises `UserError` if the model can't fill in masks, or has fewer than `top_k` tokens."""
    tokenizer = fitting_tokenizer(config, tokenizer, where, "encoder", "fill")
    most = tokenizer.vocab_size - len(tokenizer.special_ids)
    if tokenizer.mask_id is None:
        raise UserError(f"{where}: its vocabulary has no {MASK_TOKEN}: it wasn't trained to restore text")
    if not 1 <= top_k <= most:
        raise UserError("{top_k}: give 1 to {}", most, top_k=top_k)
    return tokenizer


def masked_rows(
    config: TransformerConfig, tokenizer: Tokenizer, lines: Sequence[str], first_line: int = 1
) -> Iterator[list[int]]:
    """Yield the ids of each line. Raises `UserError` for a line without <mask>, or longer than the model takes."""
    for number, line in enumerate(lines, first_line):
        if len(_parts(tokenizer, line)) == 1:
            raise UserError(f"line {number}: holds no {MASK_TOKEN}; put it where a word is to be found")
        ids = ids_with_masks(tokenizer, line)
        if len(ids) > config.max_positions:
            raise UserError(f"line {number}: {len(ids)} tokens, the model takes at most {config.max_positions}")
        yield ids


def _guesses(
    tokenizer: Tokenizer, ids: list[int], places: list[int], logits: NDArray, top_k: int
) -> list[list[Filling]]:
    """Return the likeliest tokens for each of M masks. places: their positions; logits (M, V)."""
    if not np.isfinite(logits).all():
        raise UserError("the model's logits are not finite; check its weights")
    logits[:, [*tokenizer.special_ids]] = -np.inf
    logits[:, tokenizer.vocab_size :] = -np.inf  # a published embedding table may have more rows than tokens
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = weights / weights.sum(axis=1, keepdims=True)
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]  # (M, top_k)
    filled = np.array(ids)
    filled[places] = best[:, 0]
    likeliest = []
    for mask, place in enumerate(places):
        guesses = []
        for token in best[mask].tolist():
            text = tokenizer.decode([*filled[:place].tolist(), token, *filled[place + 1 :].tolist()])
            guesses.append(Filling(tokenizer.decode([token]), float(probabilities[mask, token]), text))
        likeliest.append(guesses)
    return likeliest


def ids_with_masks(tokenizer: Tokenizer, line: str) -> list[int]:
    """Return the ids of a line, eos included, with the mask token's id for each <mask> and the space before it.

    If the line or the vocabulary has no <mask>, these are the ids of the plain text.
    """
    mask_id = tokenizer.mask_id
    if mask_id is None:
        return tokenizer.encode(line)
    parts = _parts(tokenizer, line)
    if tokenizer.mask_takes_space:
        parts = [*(part.removesuffix(" ") for part in parts[:-1]), parts[-1]]
    begin = len(tokenizer.encode("")) - 1  # tokens before the text, e.g. [CLS]
    first, *others = (ids[:-1] for ids in tokenizer.encode_batch(parts))
    encoded = [first, *(ids[begin:] for ids in others)]
    return [*[id for part in encoded for id in (*part, mask_id)][:-1], tokenizer.eos_id]


def _parts(tokenizer: Tokenizer, line: str) -> list[str]:
    """Split a line at its masks."""
    return re.split("|".join(map(re.escape, {MASK_TOKEN, tokenizer.mask_token})), line)
