"""LibreTranslate's form of /translate, which its clients send and read.

    {"q": a text or a list, "source": "en", "target": "de", "format": "text", "alternatives": 2}
    {"translatedText": a text or a list, "alternatives": [texts], "detectedLanguage": {...} with source "auto"}

Each line of a text is translated by itself; with "format": "html" each text between two blocks, and its tags are put
back (`markup.py`). Fields of our own form may be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_transformer.generation.translate import Translation

from .markup import Frame
from .models import AUTO, Models
from .requests import LIMITS, RequestError, texts, whole

EXAMPLE = '{"q": "Good morning.", "source": "en", "target": "de"}'
MOST = int(LIMITS["n_best"][1]) - 1  # alternatives

FORMATS = {"text": Frame.of_text, "html": Frame.of_html}


@dataclass(frozen=True)
class LibreForm:
    """A request in LibreTranslate's form. ours: the same in our own form; single: q was a text, not a list;
    alternatives: how many more translations of each; detects: source was "auto"."""

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
                raise RequestError(400, f"{name}: is needed; send {EXAMPLE}")
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
