"""The body of a request, checked: lines of text and the settings of their search."""

from __future__ import annotations

import json
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
LONGEST_MESSAGE = 400  # characters


class RequestError(Exception):
    """A request that is not served: the status of the answer, and one line that says what to do."""

    def __init__(self, status: int, message: str):
        super().__init__(one_line(message))
        self.status = status


def one_line(message: str) -> str:
    """As a message is shown: it may repeat what the client sent, which may be long."""
    line = " ".join(message[:2000].split())
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + " ..."


@dataclass(frozen=True)
class TranslateRequest:
    """lines: sentences. options: those of `Options` and the languages that were given, by name. wants_n_best: the
    answer lists all hypotheses with their scores. wants_alignment: it says which source word their words were made of.
    """

    lines: list[str]
    options: dict[str, Any]
    overlong: Overlong
    wants_n_best: bool
    wants_alignment: bool = False

    @classmethod
    def parse(cls, body: bytes) -> TranslateRequest:
        """From JSON: {"text": one string or a list, and any of SETTINGS, "overlong" and "alignment"}. `RequestError`
        otherwise."""
        try:
            values = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"body: not JSON ({error}); send {EXAMPLE}") from None
        if not isinstance(values, dict) or "text" not in values:
            raise RequestError(400, f'body: an object with "text" is needed; send {EXAMPLE}')
        text = values.pop("text")
        lines = [text] if isinstance(text, str) else text
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise RequestError(400, "text: must be a string or a list of strings")
        overlong = values.pop("overlong", "error")
        if overlong not in get_args(Overlong):
            raise RequestError(400, f"overlong: {overlong!r} is not one of {', '.join(get_args(Overlong))}")
        alignment = values.pop("alignment", False)
        if not isinstance(alignment, bool):
            raise RequestError(400, "alignment: must be true or false")
        spoken = {name: values.pop(name) for name in (SOURCE_LANGUAGE, TARGET_LANGUAGE) if name in values}
        for name, code in spoken.items():
            if not isinstance(code, str):
                raise RequestError(400, f"{name}: must be a string, one of the model's codes")
        unknown = sorted(set(values) - set(SETTINGS))
        if unknown:
            known = ", ".join([*SETTINGS, "overlong", "alignment", SOURCE_LANGUAGE, TARGET_LANGUAGE])
            raise RequestError(400, f"{unknown[0][:50]!r}: no such setting; there are {known}")
        for name in ("early_stopping", "sample"):
            if not isinstance(values.get(name, False), bool):
                raise RequestError(400, f"{name}: must be true or false")
        try:
            options = Options(**values)
        except UserError as error:
            raise RequestError(400, str(error)) from None
        for name, (least, most) in LIMITS.items():
            if not least <= getattr(options, name) <= most:
                raise RequestError(400, f"{name}={values[name]}: this server takes {least} to {most}")
        return cls(lines, dict(sorted({**values, **spoken}.items())), overlong, "n_best" in values, alignment)


EXAMPLE = '{"text": "Good morning.", "beam": 4}'
