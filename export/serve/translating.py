"""Translators: our own form of requests, the endpoints, and the way from text to rows of ids to text.

POST /translate         {"text": a text or a list, "beam": 4, ...} -> {"translations": [...]}
POST /translate/stream  {"text": a text, ...} -> server-sent events
GET /languages, POST /detect

/translate also takes LibreTranslate's form:

    {"q": a text or a list, "source": "en", "target": "de", "format": "text", "alternatives": 2}
    {"translatedText": a text or a list, "alternatives": [texts], "detectedLanguage": {...} with source "auto"}

In this form, each line of a text is translated by itself; with "format": "html" each text between two block elements,
and its tags are put back (`markup.py`). Fields of our own form may be added.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from starlette.responses import JSONResponse

from mlx_transformer.families.languages import own_code
from mlx_transformer.generation.settings import (
    LANGUAGES,
    SOURCE_LANGUAGE,
    TARGET_IN_SOURCE,
    TARGET_LANGUAGE,
    chosen_options,
    with_languages,
)
from mlx_transformer.generation.translate import Overlong, Translation
from mlx_transformer.system.fields import FieldType

from .batching import streamed
from .calls import Call, event
from .markup import Frame
from .models import AUTO, Loaded, Models, Row, Search, check_lengths, without_blocking
from .requests import (
    FLAG,
    LIMITS,
    SETTINGS,
    TEXT,
    TEXTS,
    Form,
    RequestError,
    check_count,
    field_schema,
    flag,
    number,
    search_fields,
    search_options,
    texts,
    unknown_field,
    whole,
)

LIBRE_EXAMPLE = '{"q": "Good morning.", "source": "en", "target": "de"}'
MOST = int(LIMITS["n_best"][1]) - 1  # alternatives

FORMATS = {"text": Frame.of_text, "html": Frame.of_html}


@dataclass(frozen=True)
class LibreForm:
    """A request in LibreTranslate's form. ours: the same request in our form; single: q was a text, not a list;
    alternatives: number of further translations of each text; detects: source was "auto"."""

    ours: dict[str, Any]
    frames: list[Frame]
    single: bool
    alternatives: int
    detects: bool

    @property
    def has_elements(self) -> bool:
        """Whether tags stand inside lines, so that their places depend on the alignment."""
        return any(frame.has_elements for frame in self.frames)

    @classmethod
    def of(cls, values: dict[str, Any]) -> LibreForm:
        """Read the fields of a body with "q"."""
        values = dict(values)
        q, format = values.pop("q"), values.pop("format", "text")
        for name in ("text", "n_best", "alignment"):
            if name in values:
                raise RequestError(400, f"{name}: does not go with q; send text in place of q, or leave it out")
        for name in ("source", "target"):
            if values.get(name) is None:
                raise RequestError(400, f"{name}: is needed; send {LIBRE_EXAMPLE}")
        if not isinstance(format, str) or format not in FORMATS:
            raise RequestError(400, f"format: must be {' or '.join(FORMATS)}")
        alternatives = whole("alternatives", values.pop("alternatives", 0), 0, MOST)
        if alternatives:
            values |= {"n_best": alternatives + 1, "beam": values.get("beam", alternatives + 1)}
        frames = list(map(FORMATS[format], texts("q", q)))
        lines = [line for frame in frames for line in frame.lines]
        ours = {"overlong": "split", **values, "text": lines}
        return cls(ours, frames, isinstance(q, str), alternatives, values["source"] == AUTO)

    def answer(self, translations: Sequence[list[Translation]], source: str) -> dict[str, Any]:
        """Write the answer. source: the language of the text."""
        each, end = [], 0
        for frame in self.frames:
            begin, end = end, end + len(frame.lines)
            each.append(_joined(frame, translations[begin:end]))
        of = lambda values: values[0] if self.single else values  # noqa: E731
        answer: dict[str, Any] = {"translatedText": of([best[0] for best in each])}
        if self.alternatives:
            answer["alternatives"] = of([best[1:] for best in each])
        if self.detects:
            answer["detectedLanguage"] = of([undetected(source)] * len(each))
        return answer


def _joined(frame: Frame, lines: Sequence[list[Translation]]) -> list[str]:
    """Join the best translations of all lines, then the second best, and so on, without repeats."""
    ranks = range(max(map(len, lines), default=1))
    return list(dict.fromkeys(frame.filled([best[min(k, len(best) - 1)] for best in lines]) for k in ranks))


def undetected(language: str) -> dict[str, Any]:
    """The only possible language, as a "detection" of confidence 0, which LibreTranslate uses for a guess."""
    return {"confidence": 0, "language": language}


def detected(values: dict[str, Any], models: Models) -> list[dict[str, Any]]:
    """Answer /detect, if there is a single source language."""
    if set(values) - {"q"} or not isinstance(values.get("q"), str):
        raise RequestError(400, 'body: send {"q": one text}')
    return [undetected(models.only_source())]


def language_list(models: Models) -> list[dict[str, Any]]:
    """Answer /languages; a language's name is its code."""
    return [{"code": code, "name": code, "targets": targets} for code, targets in models.languages().items()]


EXAMPLE = '{"text": "Good morning.", "beam": 4}'
STREAM_EXAMPLE = '{"text": "Good morning."}'
FEW_LINES = 64  # a larger answer is written in a thread
NO_STREAM = f"q: LibreTranslate has no streams; send {EXAMPLE}"
NO_ALIGNMENT = "alignment: this server's model returns no attention; export it with --attention, for a folder or a file"
STREAMED = "alignment: a stream has none; send the text to /translate"


# The forms.
def _forms() -> tuple[Form, Form]:
    search = search_fields()
    own = {**TEXT, "description": "A language of a model with several languages, by the model's own code."}
    codes = {"source": {**TEXT, "description": "Code of the text's language, or auto."}, "target": TEXT}
    codes |= {SOURCE_LANGUAGE: own, TARGET_LANGUAGE: own}
    overlong = field_schema(
        FieldType(str, get_args(Overlong)), "What to do with a line that is longer than the model takes.", "error"
    )
    several = {"text": TEXTS, **search, "overlong": overlong, **codes}
    libre = {
        "q": TEXTS,
        **codes,
        "format": {"enum": list(FORMATS), "default": "text"},
        "api_key": TEXT,
        "alternatives": number(0, "More translations of each text.", 0, MOST),
        **{name: schema for name, schema in search.items() if name != "n_best"},
    }
    theirs = Form(libre, ["q", "source", "target"], LIBRE_EXAMPLE)
    single = {name: schema for name, schema in several.items() if name not in ("beam", "n_best")} | {"text": TEXT}
    ours = {**several, "alignment": {**FLAG, "default": False, "description": "Links of source and target words."}}
    return Form(ours, ["text"], EXAMPLE, theirs), Form(single, ["text"], STREAM_EXAMPLE)


TRANSLATE, STREAM = _forms()
DETECT = Form({"q": TEXT, "api_key": TEXT}, ["q"], '{"q": "Good morning."}')


@dataclass(frozen=True)
class TranslateRequest:
    """A request in our own form. options: fields of `Options`, and the model's own language codes;
    languages: source and target, or None."""

    lines: list[str]
    options: dict[str, Any]
    overlong: Overlong
    wants_n_best: bool
    wants_alignment: bool = False
    languages: tuple[str | None, str | None] = (None, None)

    @classmethod
    def of(cls, values: dict[str, Any]) -> TranslateRequest:
        """Read the fields of a body."""
        values = dict(values)
        if "text" not in values:
            raise RequestError(400, f'body: an object with "text" is needed; send {EXAMPLE}')
        text = values.pop("text")
        languages = _code(values, "source"), _code(values, "target")
        overlong = values.pop("overlong", "error")
        if overlong not in get_args(Overlong):
            raise RequestError(400, f"overlong: {overlong!r} is not one of {', '.join(get_args(Overlong))}")
        alignment = flag("alignment", values.pop("alignment", False))
        own = {name: values.pop(name) for name in (SOURCE_LANGUAGE, TARGET_LANGUAGE) if name in values}
        for name, code in own.items():
            if not isinstance(code, str):
                raise RequestError(400, f"{name}: must be a string, one of the model's codes")
        for name in sorted(set(values) - set(SETTINGS)):
            known = (*SETTINGS, "overlong", "alignment", "source", "target", SOURCE_LANGUAGE, TARGET_LANGUAGE)
            raise unknown_field(name, known)
        lines = texts("text", text)
        options = dict(sorted({**search_options(values), **own}.items()))
        return cls(lines, options, overlong, "n_best" in values, alignment, languages)


def _code(values: dict[str, Any], name: str) -> str | None:
    code = values.pop(name, None)
    if code is not None and not isinstance(code, str):
        raise RequestError(400, f"{name}: must be the code of a language, e.g. en")
    return code


# The model.
class TranslationModel(Loaded):
    """A loaded translator."""

    label = "translation"
    use = "is a translator; send its text to /translate"
    translates = True

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.translator = self.model.translator
        self.languages: dict[str, int] = self.model.generation.get(LANGUAGES, {})

    def spoken(self, request: TranslateRequest) -> TranslateRequest:
        """Turn the request's languages into the model's own codes, if the model has several languages."""
        if not self.languages:
            return request
        names = dict(zip((SOURCE_LANGUAGE, TARGET_LANGUAGE), request.languages, strict=True))
        if self.model.generation.get(TARGET_IN_SOURCE):  # such a model gets no token for the source language
            names.pop(SOURCE_LANGUAGE)
        options: dict[str, Any] = dict(request.options)
        for name, code in names.items():
            if name in options or code is None:
                continue
            side = name.partition("_")[0]
            if code == AUTO:
                raise RequestError(400, f"{side}: this server detects no languages; say which it is")
            own = own_code(code, self.languages)
            if own is None:
                raise RequestError(400, f"{side}={code}: none of the model's languages; GET /languages lists them")
            options[name] = own
        options = with_languages(self.model.generation, options, lines=request.lines)
        return replace(request, options=dict(sorted(options.items())))

    async def translate(self, request: TranslateRequest, client: Hashable) -> list[list[Translation]]:
        """Return the n best translations of each line."""
        if request.wants_alignment and not self.translator.shows_attention:
            raise RequestError(400, NO_ALIGNMENT)
        owners, rows = await self._rows(request)
        around, search = chosen_options(self.model.generation, request.options)
        placed = around.before or around.behind
        if placed and not all(isinstance(ids, list) for ids in rows):
            raise RequestError(400, "source_language: this server's file takes text only")
        scored = request.wants_n_best or not self.model.has_steps
        task = Search(self.model, self.name, search, scored, request.wants_alignment)
        payloads = [Row(around(ids) if placed else ids, i) for i, ids in enumerate(rows)]
        hypotheses = await self.compute(task, payloads, [len(ids) for ids in rows], client, search.beam)
        self.count(len(request.lines), sum(len(n_best[0].ids) for n_best in hypotheses))
        links = [[[h.alignment for h in row] for row in hypotheses]] if request.wants_alignment else []
        size, lines = sum(map(len, request.lines)), len(request.lines)
        return await without_blocking(size, self.translator.texts, lines, owners, hypotheses, *links)

    async def stream(self, request: TranslateRequest, client: Hashable) -> AsyncIterator[tuple[int, str | None]]:
        """Return the translation of a single line in pieces; errors are raised before the first."""
        if len(request.lines) != 1:
            raise RequestError(400, "text: one string is streamed; send several lines to /translate")
        if request.wants_alignment:
            raise RequestError(400, STREAMED)
        [line] = request.lines
        _, rows = await self._rows(request)
        begin = partial(self.model.stream, line, overlong=request.overlong, **request.options)
        length, size = sum(map(len, rows)), max(1, len(rows))
        done = partial(self.count, 1)
        return await streamed(self.batcher, [begin], lengths=[length], size=size, client=client, done=done)

    async def _rows(self, request: TranslateRequest) -> tuple[list[int], list[list[int]]]:
        lengths = {name: request.options.get(name) for name in ("min_new_tokens", "max_new_tokens")}
        check_lengths(lengths, self.translator.config.max_positions)
        check_count(f"{len(request.lines)} sentences", len(request.lines), self.max_sentences)
        size = sum(map(len, request.lines))
        owners, rows = await without_blocking(size, self.translator.rows, request.lines, request.overlong)
        check_count(f"{len(rows)} sentences", len(rows), self.max_sentences)
        return owners, rows


# The endpoints.
async def translate(call: Call) -> Any:
    """Translate texts; with q, as LibreTranslate does."""
    values = await call.values()
    libre = await without_blocking(len(str(values["q"])), LibreForm.of, values) if "q" in values else None
    form = TranslateRequest.of(libre.ours if libre else values)
    model, source = call.models.translator(*form.languages)
    if libre and libre.has_elements and model.translator.shows_attention:
        form = replace(form, wants_alignment=True)
    translations = await call.result(model.translate(model.spoken(form), call.client))
    if libre:
        size = sum(map(len, form.lines))
        answer = await without_blocking(size, libre.answer, translations, source or "")
    else:
        answer = _answer(form, translations)
    # A large answer takes a while to write, and others shouldn't wait for it.
    large = len(form.lines) > FEW_LINES or form.wants_n_best or form.wants_alignment
    return await asyncio.to_thread(JSONResponse, answer) if large else answer


async def stream(call: Call) -> Any:
    """Translate a line, as server-sent events."""
    values = await call.values()
    if "q" in values:
        raise RequestError(400, NO_STREAM)
    form = TranslateRequest.of(values)
    model, _ = call.models.translator(*form.languages)
    pieces = await call.result(model.stream(model.spoken(form), call.client))
    return call.stream(pieces, _events(pieces))


async def languages(call: Call) -> Any:
    """Languages, each with its targets."""
    return language_list(call.models)


async def detect(call: Call) -> Any:
    """The only source language; nothing is detected."""
    return detected(await call.values(), call.models)


async def _events(pieces: AsyncIterator[tuple[int, str | None]]) -> AsyncIterator[str]:
    """`data: {"text": piece}` for each piece, then `event: done` with the whole text."""
    text = ""
    async for _, piece in pieces:
        if piece is not None:
            text += piece
            yield event({"text": piece})
    yield event({"text": text}, "done")


def _answer(request: TranslateRequest, translations: list[list[Translation]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"translations": [best[0].text for best in translations]}
    if request.wants_n_best:
        answer["n_best"] = [[_hypothesis(t, request.wants_alignment) for t in n_best] for n_best in translations]
    if request.wants_alignment:
        answer["alignment"] = [_links(best[0]) for best in translations]
    return answer


def _hypothesis(translation: Translation, aligned: bool) -> dict[str, Any]:
    links = {"alignment": _links(translation)} if aligned else {}
    return {"text": translation.text, "score": translation.score, **links}


def _links(translation: Translation) -> list[list[int]]:
    """Word links as `translate --alignment --json` writes them; an empty line has none."""
    return [[*link] for link in translation.alignment.links] if translation.alignment else []
