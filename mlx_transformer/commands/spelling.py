"""Messages of the library, which name arguments of Python, in the words of the command line: beam=0 is --beam 0."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def spellings(parameters: Iterable[Any]) -> dict[str, tuple[str, bool]]:
    """{argument of Python: (its option, whether that takes no value)}, of the parameters of a command."""
    found = {}
    for each in parameters:
        option = next((name for name in each.opts if name.startswith("--")), None)
        if option is not None:
            found[each.name] = (option, bool(getattr(each, "is_flag", False)))
    return found


def spelled(message: str, known: Mapping[str, tuple[str, bool]], given: Sequence[str]) -> str:
    """The message with options for arguments. What the user has written himself (`given`), a path perhaps, stays."""
    for name, (option, flag) in known.items():
        if any(name in text for text in given if not text.startswith("-")):
            continue
        if flag:
            message = re.sub(rf"(?<![\w.-]){name}=True\b", option, message)
            message = re.sub(rf"(?<![\w.-]){name}=False\b", f"no {option}", message)
        else:
            message = re.sub(rf"(?<![\w.-]){name}=(?=\S)", f"{option} ", message)
        if "_" in name:  # a word of no other meaning
            message = re.sub(rf"(?<![\w.-]){name}\b(?!=)", option, message)
    return message
