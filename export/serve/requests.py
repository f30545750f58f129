"""The content of a request, checked: lines of text, their languages, and the settings of their search."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_args

from mlx_transformer.generation.options import Options
from mlx_transformer.generation.settings import SOURCE_LANGUAGE, TARGET_LANGUAGE
from mlx_transformer.generation.translate import Overlong
from mlx_transformer.system.errors import UserError

# How much is decoded at once is the server's to say.
SETTINGS = tuple(field.name for field in fields(Options) if field.name != "batch_tokens")
LIMITS: dict[str, tuple[float, float]] = {  # narrower than those of Options; the model bounds lengths (service.py)
    "beam": (1, 64),  # memory grows with it
    "n_best": (1, 64),
    "temperature": (0.01, 100),
    "top_p": (0.001, 1),
}
LANGUAGES = ("source", "target", SOURCE_LANGUAGE, TARGET_LANGUAGE)
"""The first two choose among a server's models; the others are codes of a model of several languages."""
AUTO = "auto"
"""LibreTranslate's source language of a text whose language is not known."""
LONGEST_MESSAGE = 800  # characters; all settings of a request take half of them


class RequestError(Exception):
    """A request that is not served: the status of the answer, and one line that says what to do. code: the same in a
    word, as OpenAI's clients read it."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(one_line(message))
        self.status, self.code = status, code


def one_line(message: str) -> str:
    """Shorten a message to one line: it may repeat what the client sent, which may be long."""
    line = " ".join(message[:2000].split())
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + " ..."


@dataclass(frozen=True)
class TranslateRequest:
    """lines: sentences. options: those of `Options` and the languages that were given, by name. wants_n_best: the
    answer lists all hypotheses with their scores. wants_alignment: it says which source word their words were made of.
    languages: source and target, each where it was given.
    """

    lines: list[str]
    options: dict[str, Any]
    overlong: Overlong
    wants_n_best: bool
    wants_alignment: bool = False
    languages: tuple[str | None, str | None] = (None, None)

    @classmethod
    def of(cls, values: dict[str, Any]) -> TranslateRequest:
        """From {"text": one string or a list, and any of SETTINGS, "overlong", "alignment", "source" and "target"}.
        `RequestError` otherwise."""
        if "text" not in values:
            raise RequestError(400, f'body: an object with "text" is needed; send {EXAMPLE}')
        text, values = values["text"], {name: value for name, value in values.items() if name != "text"}
        languages = language(values, "source"), language(values, "target")
        overlong = values.pop("overlong", "error")
        if overlong not in get_args(Overlong):
            raise RequestError(400, f"overlong: {overlong!r} is not one of {', '.join(get_args(Overlong))}")
        alignment = flag("alignment", values.pop("alignment", False))
        spoken = {name: values.pop(name) for name in (SOURCE_LANGUAGE, TARGET_LANGUAGE) if name in values}
        for name, code in spoken.items():
            if not isinstance(code, str):
                raise RequestError(400, f"{name}: must be a string, one of the model's codes")
        unknown = sorted(set(values) - set(SETTINGS))
        if unknown:
            known = ", ".join([*SETTINGS, "overlong", "alignment", *LANGUAGES])
            raise RequestError(400, f"{unknown[0][:50]!r}: no such setting; there are {known}")
        lines = texts("text", text)
        options = dict(sorted({**options_of(values), **spoken}.items()))
        return cls(lines, options, overlong, "n_best" in values, alignment, languages)


def check_count(what: str, count: int, most: int) -> None:
    """Refuse more than a request may have. what: so many of them, in words, such as "3 sentences"."""
    if count > most:
        raise RequestError(413, f"{what}, at most {most}; send it in parts")


def flag(name: str, value: Any) -> bool:
    """Return true or false; `RequestError` for anything else."""
    if not isinstance(value, bool):
        raise RequestError(400, f"{name}: must be true or false")
    return value


def texts(name: str, value: Any) -> list[str]:
    """Return one string or a list of them as a list; `RequestError` for anything else."""
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise RequestError(400, f"{name}: must be a string or a list of strings")
    return lines


def texts_or_ids(name: str, value: Any) -> list[str] | list[list[int]]:
    """Return texts, or rows of ids; one of either is a list of one. `RequestError` for anything else, and for none."""
    if isinstance(value, list) and value and all(type(id) is int for id in value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        if not all(row and all(type(id) is int for id in row) for row in value):
            raise RequestError(400, f"{name}: a row of ids must be a list of at least one whole number")
        return value
    strings = texts(name, value)
    if not strings:
        raise RequestError(400, f"{name}: must hold at least one text, or one row of ids")
    return strings


def language(values: dict[str, Any], name: str) -> str | None:
    """Take a language's code out of the values, None if there is none."""
    code = values.pop(name, None)
    if code is not None and not isinstance(code, str):
        raise RequestError(400, f"{name}: must be the code of a language, such as en")
    return code


def options_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a search in the order of their names, once `Options` and LIMITS allow them."""
    for name in ("early_stopping", "sample"):
        flag(name, values.get(name, False))
    try:
        options = Options(**values)
    except UserError as error:
        raise RequestError(400, str(error)) from None
    for name, (least, most) in LIMITS.items():
        if not least <= getattr(options, name) <= most:
            raise RequestError(400, f"{name}={values[name]}: this server takes {least} to {most}")
    return dict(sorted(values.items()))


EXAMPLE = '{"text": "Good morning.", "beam": 4}'
