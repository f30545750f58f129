"""The answers of an encoder's head for a file's lines in a file of JSON lines (`line_files.py`), one for each line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from mlx_transformer.system.errors import UserError

from .answer import answer
from .classify import Text, classify
from .fill import fill, filling_tokenizer, masked_rows
from .line_files import JSON, LineWork, cut_at, json_lines
from .lines import LineReport
from .rerank import check_reranker, rerank
from .tag import tag
from .text_options import AnswerOptions, ClassifyOptions, RerankOptions
from .verbs import TextVerbs

SEPARATOR = "\t"
"""The separator of the two texts of a pair; later ones are the second text's."""


def fill_lines(model: TextVerbs, top_k: int = 5, as_json: bool = True) -> LineWork:
    """Make the guesses for each <mask> of each line: {"text": ..., "masks": [[{"token": ..., "probability": ...,
    "text": ...}, ...], ...]}; without `as_json`, for people, a line for each guess. A line without a <mask>, or longer
    than the model takes, is a `UserError`."""
    tokenizer = filling_tokenizer(model.config, model.tokenizer, model.where, top_k)

    def check(lines: Sequence[str], first_line: int) -> None:
        for _ in masked_rows(model.config, tokenizer, lines, first_line):
            pass

    def make(lines: Sequence[str], report: LineReport) -> bytes:
        fillings = fill(model.config, tokenizer, model.token_logits, lines, top_k, model.where, report)
        if as_json:
            each = ([[asdict(guess) for guess in guesses] for guesses in masks] for masks in fillings)
            return json_lines({"text": line, "masks": masks} for line, masks in zip(lines, each, strict=True))
        guesses = (guess for masks in fillings for guesses in masks for guess in guesses)
        rows = (f"{guess.probability:.4f}\t{guess.token.strip()}\t{guess.text}\n" for guess in guesses)
        return "".join(rows).encode(errors="replace")

    options = {"top_k": top_k, "json": as_json}
    return LineWork(name="fill", suffixes=JSON, make=make, options=options, check=check)


def classify_lines(model: TextVerbs, options: ClassifyOptions) -> LineWork:
    """Make the classes of each line, a text or a pair that a tab separates: {"text": ..., "classes": [{"label": ...,
    "probability": ...}]}, of a pair with "text_pair"; "score" in place of "probability" by a head of scores."""
    several, most = options.several, None if options.all else 1
    encoder = model.encoder_head("classes", "classify")
    number = "score" if encoder.config.head.scores and several is None else "probability"

    def make(lines: Sequence[str], report: LineReport) -> bytes:
        scored = classify(encoder, [_text_of(line) for line in lines], several, report)
        return json_lines(
            {**_texts_of(line), "classes": [{"label": each.label, number: each.probability} for each in classes[:most]]}
            for line, classes in zip(lines, scored, strict=True)
        )

    return LineWork(name="classify", suffixes=JSON, make=make, overlong=cut_at(encoder.most), options=asdict(options))


def rerank_lines(model: TextVerbs, options: RerankOptions, as_json: bool = False) -> LineWork:
    """Make the documents of each line in their order: {"query": ..., "results": [{"index": ..., "relevance_score":
    ..., "document": ...}]}. A line is a query and its documents, with tabs between them, or with `as_json`
    {"query": ..., "documents": [...]}."""
    encoder = model.encoder_head("classes", "rerank")
    check_reranker(model.config, model.where)

    def check(lines: Sequence[str], first_line: int) -> None:
        for number, line in enumerate(lines, first_line):
            _queried(line, number, as_json)

    def make(lines: Sequence[str], report: LineReport) -> bytes:
        texts = []
        for number, line in enumerate(lines, report.first_line):
            query, documents = _queried(line, number, as_json)
            cut: list[int] = []
            ranked = rerank(encoder, query, documents, options, LineReport(on_overlong=cut.append))
            if cut and report.on_overlong is not None:
                report.on_overlong(number)
            results = [{**asdict(each), "document": documents[each.index]} for each in ranked]
            texts.append({"query": query, "results": results})
            report.done((number - report.first_line + 1) / len(lines))
        return json_lines(texts)

    return LineWork(
        name="rerank", suffixes=JSON, make=make, overlong=cut_at(encoder.most), options=asdict(options), check=check
    )


def _queried(line: str, number: int, as_json: bool) -> tuple[str, list[str]]:
    """Return a query and its documents; `UserError` for a line that isn't one."""
    if not as_json:
        query, *documents = line.split(SEPARATOR)
        if not documents:
            raise UserError(f"line {number}: has no tab: give a query and its documents, with tabs between them")
        return query, documents
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    values = row if isinstance(row, dict) else {}
    query, documents = values.get("query"), values.get("documents")
    if isinstance(query, str) and isinstance(documents, list) and all(isinstance(each, str) for each in documents):
        return query, documents
    raise UserError(f'line {number}: must be {{"query": ..., "documents": [...]}}, of texts')


def tag_lines(model: TextVerbs) -> LineWork:
    """Make the entities of each line: {"text": ..., "entities": [{"label": ..., "probability": ..., "start": ...,
    "end": ..., "text": ...}]}, places in characters from 0."""
    encoder = model.encoder_head("token-classes", "tag")

    def make(lines: Sequence[str], report: LineReport) -> bytes:
        return json_lines(
            {"text": line, "entities": [asdict(each) for each in entities]}
            for line, entities in zip(lines, tag(encoder, lines, report), strict=True)
        )

    return LineWork(name="tag", suffixes=JSON, make=make)


def answer_lines(model: TextVerbs, options: AnswerOptions) -> LineWork:
    """Make the answer of each line, a question and its context with a tab between them: {"question": ..., "context":
    ..., "answer": {"text": ..., "probability": ..., "start": ..., "end": ...}}, places in characters of the context
    from 0, null of an empty one. A line without a tab is a `UserError`."""
    encoder = model.encoder_head("spans", "answer")

    def make(lines: Sequence[str], report: LineReport) -> bytes:
        _check_questions(lines, report.first_line)
        pairs = [(question, context) for question, _, context in (line.partition(SEPARATOR) for line in lines)]
        return json_lines(
            {"question": question, "context": context, "answer": None if best is None else asdict(best)}
            for (question, context), best in zip(pairs, answer(encoder, pairs, options, report), strict=True)
        )

    cut = cut_at(encoder.tokenizer.pair_form(encoder.most).half)
    return LineWork(
        name="answer", suffixes=JSON, make=make, overlong=cut, options=asdict(options), check=_check_questions
    )


def _check_questions(lines: Sequence[str], first_line: int) -> None:
    for number, line in enumerate(lines, first_line):
        if SEPARATOR not in line:
            raise UserError(f"line {number}: has no tab: give a question, a tab, and the context")


def _text_of(line: str) -> Text:
    first, separator, second = line.partition(SEPARATOR)
    return (first, second) if separator else line


def _texts_of(line: str) -> dict[str, str]:
    """Return the texts of a line by their names in JSON."""
    return dict(zip(("text", "text_pair"), line.split(SEPARATOR, 1), strict=False))
