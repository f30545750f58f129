"""The verbs on files: how each command reads, computes and writes a line (`line_files.py` has the loop)."""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mlx_transformer.decoding.options import Options
from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import Name, UserError
from mlx_transformer.system.fields import changed

from .alignment import CrossWeights, pharaoh
from .heads import (
    Filling,
    Ranked,
    Text,
    answer,
    check_reranker,
    classify,
    fill,
    filling_tokenizer,
    masked_rows,
    rerank,
    tag,
)
from .line_files import LineReport, LineWork, write_lines
from .settings import (
    SOURCE_LANGUAGE,
    TARGET_IN_SOURCE,
    TARGET_LANGUAGE,
    TASK_PREFIX,
    language_id,
    with_languages,
)
from .text_options import AnswerOptions, ClassifyOptions, EmbedOptions, PairSettings, RerankOptions, TextSettings
from .translate import Translation
from .verbs import TextVerbs

if TYPE_CHECKING:
    from mlx_transformer.text.tokenizer import Tokenizer

DONE_WITH = {
    "split": "translated in pieces",
    "truncate": "translated as far as it takes",
    "skip": "left empty",
}
JSON = (".jsonl", ".ndjson", ".json", ".txt")
"""Allowed endings for a file of JSON lines."""
ARRAY = ".npy"
SEPARATOR = "\t"
"""Separates the texts in one line."""


def cut_at(most: int) -> str:
    return f"longer than {most} tokens, cut there"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the translations of a line are written.

    As text: n_best translations, separated by tabs; with `scores` each is followed by its score, with `alignment` by
    its links (0-0 1-2). Every line has the same number of columns; missing translations are empty columns. As JSON:
    {"source": ..., "translations": [{"text": ..., "score": ..., "alignment": [[0, 0], [1, 2]]}, ...]}.
    """

    n_best: int = 1
    scores: bool = False
    json: bool = False
    alignment: bool = False

    @property
    def scored(self) -> bool:
        return self.scores or self.json

    def line(self, source: str, translations: Sequence[Translation]) -> str:
        if self.json:
            shown = [{"text": t.text, "score": t.score, **self._links(t)} for t in translations]
            return json.dumps({"source": source, "translations": shown}, ensure_ascii=False)
        tabs_separate = self.n_best > 1 or self.scores or self.alignment
        cells: list[str] = []
        for i in range(self.n_best):
            best = translations[i] if i < len(translations) else None
            cells.append(one_line(best.text, tabs_separate) if best else "")
            if self.scores:
                cells.append(f"{best.score:.4f}" if best else "")
            if self.alignment:
                cells.append(pharaoh(best.alignment.links) if best and best.alignment else "")
        return "\t".join(cells)

    def _links(self, translation: Translation) -> dict[str, list[list[int]]]:
        if not self.alignment:
            return {}
        return {"alignment": [[*link] for link in translation.alignment.links] if translation.alignment else []}


def one_line(text: str, tabs_separate: bool = False) -> str:
    return re.sub(r"[\n\t]" if tabs_separate else r"\n", " ", text)


def translate_stream(
    model: TextVerbs,
    input: Path | None = None,
    output: Target | None = None,
    settings: TextSettings = TextSettings(overlong="error"),
    *,
    text: Sequence[str] = (),
    cross_weights: CrossWeights | None = None,
    model_facts: Callable[[], Mapping[str, str]] = dict,
    **changes: Any,
) -> None:
    """Translate a file, `text` or standard input: one line out for each line in, as `Layout` describes.

    changes: fields of `TextSettings` to override, and search options. cross_weights: computes alignments for a model
    whose search returns no attention. Other arguments and errors as for `write_lines`.
    """
    s, options = changed(settings, changes)
    for name in (SOURCE_LANGUAGE, TARGET_LANGUAGE):
        if (code := getattr(s, name)) is not None:
            language_id(model.generation, code)
            options[name] = code
    if s.task_prefix is not None:
        options[TASK_PREFIX] = s.task_prefix
    if s.stream and (s.scores or s.json or s.resume or s.alignment):
        raise UserError(
            "{stream} writes bare text as it is decided: without scores, json, resume and alignment", stream=True
        )
    layout = Layout(n_best=options.get("n_best", 1), scores=s.scores, json=s.json, alignment=s.alignment)

    def run(lines: Sequence[str], report: LineReport) -> list[list[Translation]]:
        return model.n_best(
            lines,
            overlong=s.overlong,
            first_line=report.first_line,
            scored=layout.scored,
            on_overlong=report.on_overlong,
            aligned=s.alignment and (cross_weights or True),
            done=report.done,
            **options,
        )

    def stream(line: str, report: LineReport) -> Iterator[str]:
        number, on_overlong = report.first_line, report.on_overlong
        pieces = model.stream(line, overlong=s.overlong, line_number=number, on_overlong=on_overlong, **options)
        return map(one_line, pieces)

    check = partial(model.check_lines, overlong="error", task_prefix=s.task_prefix)
    chosen = {"overlong": s.overlong, "scores": s.scores, "json": s.json, "alignment": s.alignment}
    work = LineWork(
        name="translate",
        run=run,
        show=layout.line,
        overlong=f"longer than the model takes, {DONE_WITH.get(s.overlong, 'an error')}",
        options={**asdict(Options()), **model.generation, **options, **chosen},
        check=check if s.overlong == "error" else None,
        stream=stream if s.stream else None,
    )
    write_lines(work, input, output, text=text, resume=s.resume, force=s.force, model_facts=model_facts)


def score_lines(model: TextVerbs, settings: PairSettings, paired: bool = True) -> LineWork:
    """Score pairs of lines: the log-probability of each target token, given the source; or what follows a prompt. Lines
    that aren't `paired` are a decoder's whole texts.

    A line of output is the sum, a tab, and the tokens' log-probabilities separated by spaces, the end token's last. As
    JSON: {"source": ..., "target": ..., "log_p": sum, "tokens": [...], "token_log_p": [...]}.
    A pair longer than the model takes is an error, found before anything is computed, or is skipped: it gets no numbers
    (JSON: null).
    """
    alone = model.config.architecture == "decoder"
    model.pair_ids(["a"], ["b"])  # raises here for a model that scores no text
    if not (paired or alone):
        raise UserError("a translation is scored with what it translates: give {}", Name("source"))
    limit = model.config.max_positions if alone else model.translator.most
    languages = {name: getattr(settings, name) for name in ("source_language", "target_language")}
    named = {name: code for name, code in languages.items() if code is not None}
    chosen = with_languages(model.generation, named, told=bool(model.generation.get(TARGET_IN_SOURCE)))  # by each row
    tokenizer = cast("Tokenizer", model.tokenizer)

    def pair(line: Any) -> tuple[str, str]:
        return line if paired else ("", line)

    def encoded(lines: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
        pairs = [pair(line) for line in lines]
        return model.pair_ids([source for source, _ in pairs], [target for _, target in pairs])

    def length(ids: tuple[list[int], list[int]]) -> int:
        return len(ids[0]) + len(ids[1]) - 1 if alone else max(map(len, ids))

    def check(lines: Sequence[Any], first_line: int) -> None:
        for number, ids in enumerate(encoded(lines), first_line):
            if (longest := length(ids)) > limit:
                raise UserError(
                    "line {}: {} tokens, the model takes at most {}; shorten it, or choose {overlong}",
                    *(number, longest, limit),
                    overlong="skip",
                )

    def run(lines: Sequence[Any], report: LineReport) -> list[tuple[list[int], NDArray[np.float32] | None]]:
        rows = encoded(lines)
        fits = [length(ids) <= limit for ids in rows]
        usable = [ids for ids, fit in zip(rows, fits, strict=True) if fit]
        sources, targets = [source for source, _ in usable], [target for _, target in usable]
        computed = iter(model.log_probabilities(sources, targets, done=report.done, **chosen))
        for number, fit in enumerate(fits, report.first_line):
            if not fit and report.on_overlong is not None:
                report.on_overlong(number)
        return [(target, next(computed) if fit else None) for (_, target), fit in zip(rows, fits, strict=True)]

    def show(line: Any, scored: tuple[list[int], NDArray[np.float32] | None]) -> str | dict[str, Any]:
        (source, target), (ids, values) = pair(line), scored
        total = None if values is None else math.fsum(values.tolist())
        if not settings.json:
            return "\t" if values is None else f"{total:.4f}\t{' '.join(f'{value:.4f}' for value in values)}"
        more = {} if values is None else {"token_log_p": [float(value) for value in values]}
        tokens = [tokenizer.token(id) for id in ids]
        return {"source": source, "target": target, "log_p": total, "tokens": tokens, **more}

    return LineWork(
        name="score",
        run=run,
        show=show,
        check=check if settings.overlong == "error" else None,
        overlong="longer than the model takes, left empty",
        unit="pairs" if paired else "lines",
    )


def embed_lines(model: TextVerbs, options: EmbedOptions, output: Target | None = None) -> LineWork:
    """Embed each line: {"text": ..., "embedding": [...]}, or, if the output ends in .npy, a float32 array (lines, W).

    Other kinds give {"text": ..., "weights": {id: weight}} (sparse) or {"text": ..., "embeddings": [[...], ...]}
    (multi).
    """
    embedder = model.embedder(**asdict(options))
    _ = embedder.tokenizer  # raises here if it is missing
    as_array = output is not None and os.fspath(output).lower().endswith(ARRAY)
    if as_array and embedder.kind != "dense":
        raise UserError(
            "{}: an array holds one vector of each line ({kind}); name a file that ends in .jsonl", output, kind="dense"
        )
    key, form = FORMS[embedder.kind]

    def run(lines: Sequence[str], report: LineReport) -> Any:
        return embedder.made(embedder.rows(lines, report.first_line, report.on_overlong), report.done)

    def show(line: str, vector: Any) -> bytes | dict[str, Any]:
        return vector.astype("<f4").tobytes() if as_array else {"text": line, key: form(vector)}

    return LineWork(
        name="embed",
        run=run,
        show=show,
        overlong=cut_at(embedder.most),
        options=asdict(options),
        suffixes=(*JSON, ARRAY),
        head=(lambda rows: array_head(rows, embedder.dimensions)) if as_array else None,
    )


def array_head(rows: int, width: int) -> bytes:
    """Return the header of a .npy file with a float32 array (rows, width)."""
    head = io.BytesIO()
    npy.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})
    return head.getvalue()


def short_floats(vector: NDArray[np.float32]) -> list[float]:
    """Return floats that JSON prints with as few digits as float32 needs."""
    return [float(text) for text in vector.astype(str).tolist()]


def _short_weights(weights: Mapping[int, float]) -> dict[str, float]:
    numbers = short_floats(np.array([*weights.values()], np.float32))
    return dict(zip(map(str, weights), numbers, strict=True))


FORMS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "dense": ("embedding", short_floats),
    "sparse": ("weights", _short_weights),
    "multi": ("embeddings", lambda vectors: [short_floats(vector) for vector in vectors]),
}
"""{kind of vector: (its key in JSON, its form there)}."""


def fill_lines(model: TextVerbs, top_k: int = 5, as_json: bool = True) -> LineWork:
    """Guess each <mask> of each line: {"text": ..., "masks": [[{"token": ..., "probability": ..., "text": ...}, ...],
    ...]}.

    as_json=False prints one guess a line, for people. Raises `UserError` for a line without <mask>, or longer than the
    model takes.
    """
    tokenizer = filling_tokenizer(model.config, model.tokenizer, model.where, top_k)

    def check(lines: Sequence[str], first_line: int) -> None:
        for _ in masked_rows(model.config, tokenizer, lines, first_line):
            pass

    def run(lines: Sequence[str], report: LineReport) -> list[list[list[Filling]]]:
        return fill(model.config, tokenizer, model.token_logits, lines, top_k, model.where, report)

    def show(line: str, masks: list[list[Filling]]) -> str | dict[str, Any]:
        if as_json:
            return {"text": line, "masks": [[asdict(guess) for guess in guesses] for guesses in masks]}
        guesses = (guess for each in masks for guess in each)
        return "\n".join(f"{guess.probability:.4f}\t{guess.token.strip()}\t{guess.text}" for guess in guesses)

    options = {"top_k": top_k, "json": as_json}
    return LineWork(name="fill", run=run, show=show, suffixes=JSON, options=options, check=check)


def classify_lines(model: TextVerbs, options: ClassifyOptions) -> LineWork:
    """Classify each line, which is a text or two texts with a tab between.

    Writes {"text": ..., "classes": [{"label": ..., "probability": ...}]}, for a pair with "text_pair"; a regression
    head has "score" in place of "probability".
    """
    several, most = options.several, None if options.all else 1
    encoder = model.encoder_head("classes", "classify")
    number = "score" if encoder.config.head.scores and several is None else "probability"

    def read(line: str, _: int) -> Text:
        first, separator, second = line.partition(SEPARATOR)
        return (first, second) if separator else line

    def show(text: Text, classes: Sequence[Any]) -> dict[str, Any]:
        texts = {"text": text} if isinstance(text, str) else {"text": text[0], "text_pair": text[1]}
        return {**texts, "classes": [{"label": each.label, number: each.probability} for each in classes[:most]]}

    return LineWork(
        name="classify",
        read=read,
        run=lambda texts, report: classify(encoder, texts, several, report),
        show=show,
        suffixes=JSON,
        overlong=cut_at(encoder.most),
        options=asdict(options),
    )


def rerank_lines(model: TextVerbs, options: RerankOptions, as_json: bool = False) -> LineWork:
    """Rank the documents of each line: {"query": ..., "results": [{"index": ..., "relevance_score": ..., "document":
    ...}]}.

    A line is a query and its documents, separated by tabs, or with `as_json` {"query": ..., "documents": [...]}.
    """
    encoder = model.encoder_head("classes", "rerank")
    check_reranker(model.config, model.where)

    def run(queries: Sequence[tuple[str, list[str]]], report: LineReport) -> Iterator[list[Ranked]]:
        for i, (query, documents) in enumerate(queries):
            cut: list[int] = []
            yield rerank(encoder, query, documents, options, LineReport(on_overlong=cut.append))
            if cut and report.on_overlong is not None:
                report.on_overlong(report.first_line + i)
            report.done((i + 1) / len(queries))

    def show(asked: tuple[str, list[str]], ranked: Sequence[Ranked]) -> dict[str, Any]:
        query, documents = asked
        return {"query": query, "results": [{**asdict(each), "document": documents[each.index]} for each in ranked]}

    return LineWork(
        name="rerank",
        read=_query_in_json if as_json else _query,
        run=run,
        show=show,
        suffixes=JSON,
        overlong=cut_at(encoder.most),
        options=asdict(options),
    )


def _query(line: str, number: int) -> tuple[str, list[str]]:
    query, *documents = line.split(SEPARATOR)
    if not documents:
        raise UserError(f"line {number}: has no tab: give a query and its documents, with tabs between them")
    return query, documents


def _query_in_json(line: str, number: int) -> tuple[str, list[str]]:
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
    """Find the entities of each line; places are in characters from 0.

    Writes {"text": ..., "entities": [{"label": ..., "probability": ..., "start": ..., "end": ..., "text": ...}]}.
    """
    encoder = model.encoder_head("token-classes", "tag")
    return LineWork(
        name="tag",
        run=lambda lines, report: tag(encoder, lines, report),
        show=lambda line, entities: {"text": line, "entities": [asdict(each) for each in entities]},
        suffixes=JSON,
    )


def answer_lines(model: TextVerbs, options: AnswerOptions) -> LineWork:
    """Answer each line: a question, a tab and its context. Places are in characters of the context from 0.

    Writes {"question": ..., "context": ..., "answer": {"text": ..., "probability": ..., "start": ..., "end": ...}}, or
    null as the answer if the context is empty. Raises `UserError` for a line without a tab.
    """
    encoder = model.encoder_head("spans", "answer")

    def read(line: str, number: int) -> tuple[str, str]:
        question, separator, context = line.partition(SEPARATOR)
        if not separator:
            raise UserError(f"line {number}: has no tab: give a question, a tab, and the context")
        return question, context

    def show(asked: tuple[str, str], best: Any) -> dict[str, Any]:
        return {"question": asked[0], "context": asked[1], "answer": None if best is None else asdict(best)}

    return LineWork(
        name="answer",
        read=read,
        run=lambda pairs, report: answer(encoder, pairs, options, report),
        show=show,
        suffixes=JSON,
        overlong=cut_at(encoder.tokenizer.pair_form(encoder.most).half),
        options=asdict(options),
    )
