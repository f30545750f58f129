"""LibreTranslate's forms of requests and answers: what its clients send to /translate, and read.

    {"q": one text or a list, "source": "en", "target": "de", "format": "text", "alternatives": 2}
    {"translatedText": text or list, "alternatives": [texts], "detectedLanguage": {...} for source "auto"}

A text may have several lines; each is translated by itself, and with "format": "html" what stands between two tags.
Settings of our own form may stand beside these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_transformer.generation.translate import Translation

from .frames import Frame
from .models import Models
from .requests import AUTO, LIMITS, RequestError, TranslateRequest, texts

EXAMPLE = '{"q": "Good morning.", "source": "en", "target": "de"}'
MOST = int(LIMITS["n_best"][1]) - 1  # alternatives
FORMATS = {"text": Frame.of_text, "html": Frame.of_html}


@dataclass(frozen=True)
class LibreRequest:
    """`wanted`: its lines, of all texts, as our own form would ask for them. frames: the texts. single: it was no list.
    alternatives: most further translations of each."""

    request: TranslateRequest
    frames: list[Frame]
    single: bool
    alternatives: int

    @classmethod
    def of(cls, values: dict[str, Any]) -> LibreRequest:
        """Read the fields of a body with "q". `RequestError` for what is wrong, or is nothing that this server does."""
        values = dict(values)
        q, format = values.pop("q"), values.pop("format", "text")
        for name in ("text", "n_best", "alignment"):
            if name in values:
                raise RequestError(
                    400, f"{name}: is not for a request with q; send text in place of q, or leave it out"
                )
        for name in ("source", "target"):
            if values.get(name) is None:
                raise RequestError(400, f"{name}: is needed; send {EXAMPLE}")
        if not isinstance(format, str) or format not in FORMATS:
            raise RequestError(400, f"format: must be {' or '.join(FORMATS)}")
        alternatives = values.pop("alternatives", 0)
        if isinstance(alternatives, bool) or not isinstance(alternatives, int) or not 0 <= alternatives <= MOST:
            raise RequestError(400, f"alternatives: must be a whole number of 0 to {MOST}")
        if alternatives:
            values |= {"n_best": alternatives + 1, "beam": values.get("beam", alternatives + 1)}
        frames = list(map(FORMATS[format], texts("q", q)))
        lines = [line for frame in frames for line in frame.lines]
        request = TranslateRequest.of({"overlong": "split", **values, "text": lines})
        return cls(request, frames, isinstance(q, str), alternatives)

    def answer(self, translations: Sequence[list[Translation]], source: str) -> dict[str, Any]:
        """Return what its translations are written as. source: the language they were translated from."""
        each, end = [], 0
        for frame in self.frames:
            begin, end = end, end + len(frame.lines)
            each.append(_whole(frame, translations[begin:end]))
        of = lambda values: values[0] if self.single else values  # noqa: E731
        answer: dict[str, Any] = {"translatedText": of([best[0] for best in each])}
        if self.alternatives:
            answer["alternatives"] = of([best[1:] for best in each])
        if self.request.languages[0] == AUTO:
            answer["detectedLanguage"] = of([undetected(source)] * len(each))
        return answer


def _whole(frame: Frame, lines: Sequence[list[Translation]]) -> list[str]:
    """Return the best of all lines together, the second best, and so on, each text once."""
    ranks = range(max(map(len, lines), default=1))
    return list(dict.fromkeys(frame.filled([best[min(k, len(best) - 1)].text for best in lines]) for k in ranks))


def undetected(language: str) -> dict[str, Any]:
    """Return the only language that it can be: nothing was detected, so the confidence is 0, as LibreTranslate's is
    then."""
    return {"confidence": 0, "language": language}


def detect(values: dict[str, Any], models: Models) -> list[dict[str, Any]]:
    """Answer a request to /detect; `RequestError` unless there is one language alone."""
    unknown = sorted(set(values) - {"q"})
    if unknown or not isinstance(values.get("q"), str):
        raise RequestError(400, 'body: send {"q": one text}')
    return [undetected(models.only_source())]


def languages(models: Models) -> list[dict[str, Any]]:
    """Answer a request to /languages. Names are the codes: which language a code means is the client's to say."""
    return [{"code": code, "name": code, "targets": targets} for code, targets in models.languages().items()]
