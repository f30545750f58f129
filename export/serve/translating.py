"""The endpoints of translators, in our own form and in LibreTranslate's.

POST /translate         {"text": one string or a list, "beam": 4, ...} -> {"translations": [...]}
                        {"q": ..., "source": "en", "target": "de"} -> {"translatedText": ...} (libretranslate.py)
POST /translate/stream  {"text": one string, ...} -> server-sent events
GET /languages, POST /detect
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from mlx_transformer.generation.translate import Translation

from . import libretranslate
from .access import name_of
from .answers import broken_off, unless_gone
from .bodies import values_of
from .requests import EXAMPLE, RequestError, TranslateRequest
from .shared import Shared
from .streaming import EVENTS, UNBUFFERED, event

FEW_LINES = 64
STREAM = "/translate/stream"
NO_STREAM = f"q: LibreTranslate has no streams; send {EXAMPLE}"


class TranslatingEndpoints:
    """Those of one application."""

    def __init__(self, shared: Shared):
        self.shared = shared

    async def translate(self, request: Request) -> Response:
        """Translate what one request holds."""
        values = await self._values(request)
        libre = libretranslate.LibreRequest.of(values) if "q" in values else None
        form = libre.request if libre else TranslateRequest.of(values)
        service, source = self.shared.models.translator(*form.languages)
        translations = await unless_gone(request, service.translate(service.spoken(form), name_of(request)))
        answer = libre.answer(translations, source or "") if libre else _answer(form, translations)
        # Large ones take their time; others should not wait for it.
        large = len(form.lines) > FEW_LINES or form.wants_n_best or form.wants_alignment
        return await asyncio.to_thread(JSONResponse, answer) if large else JSONResponse(answer)

    async def stream(self, request: Request) -> Response:
        """Translate one line, and send it piece by piece."""
        values = await self._values(request)
        if "q" in values:
            raise RequestError(400, NO_STREAM)
        form = TranslateRequest.of(values)
        service, _ = self.shared.models.translator(*form.languages)
        pieces = await unless_gone(request, service.stream(service.spoken(form), name_of(request)))
        # Starlette ends the iterator when the client has left.
        return StreamingResponse(self._events(pieces), media_type=EVENTS, headers=UNBUFFERED)

    async def languages(self, _: Request) -> Response:
        """List the languages that there are translators of."""
        return JSONResponse(libretranslate.languages(self.shared.models))

    async def detect(self, request: Request) -> Response:
        """Name the only source language."""
        return JSONResponse(libretranslate.detect(await self._values(request), self.shared.models))

    async def _values(self, request: Request) -> dict[str, Any]:
        _ = self.shared.models  # or it is too early
        values = await values_of(request, self.shared.settings.body_seconds, EXAMPLE)
        self.shared.keys.admit(request, values.pop("api_key", None))
        return values

    async def _events(self, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
        """`data: {"text": piece}` each, then `event: done` with the whole text, or `event: error`."""
        text, complete = "", False
        try:
            async for piece in pieces:
                text += piece
                yield event({"text": piece})
            complete = True
            yield event({"text": text}, "done")
        except Exception as error:
            complete = True
            yield event(broken_off(STREAM, error), "error")
        finally:
            if not complete:
                self.shared.metrics.dropped.inc()
            await pieces.aclose()  # type: ignore[attr-defined] - an async generator


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
    """Return links as `translate --alignment --json` has them; an empty line has no words."""
    return [[*link] for link in translation.alignment.links] if translation.alignment else []
