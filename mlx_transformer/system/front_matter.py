"""YAML front matter, as the Hugging Face Hub reads it at the top of a README.md: written, and cut into its keys.

Whatever is cut stays text: a key that others wrote is handed on as it is, and nothing here has to understand all of
YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

FENCE = "---"
KEY = re.compile(r"([A-Za-z][\w-]*):(?:\s|$)")
PLAIN = re.compile(r"[a-z][a-z0-9-]*")
NO_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
"""Words that YAML 1.1 takes for something else, Norwegian's code among them."""


def keys_of(text: str) -> dict[str, str]:
    """Return {key: its lines} of a document's front matter, {} if it has none that ends."""
    first, *lines = text.lstrip("\ufeff").splitlines() or [""]
    if first.rstrip() != FENCE or FENCE not in (ends := [line.rstrip() for line in lines]):
        return {}
    keys: dict[str, list[str]] = {}
    key = None
    for line in lines[: ends.index(FENCE)]:
        if match := KEY.match(line):
            key = match[1]
            keys[key] = []
        elif line.startswith("#"):
            key = None
        if key is not None:
            keys[key].append(line)
    return {name: "\n".join(part) for name, part in keys.items()}


def front_matter(keys: Mapping[str, str], comment: str = "") -> str:
    """Put keys together, each the lines of `keys_of` or `yaml_of`, below a comment of one line."""
    return "\n".join([FENCE, *([f"# {comment}"] if comment else []), *keys.values(), FENCE, ""])


def yaml_of(key: str, value: Any) -> str:
    """Write a key with strings, numbers, lists and objects of them."""
    return "\n".join(_lines({key: value}))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if inner and isinstance(inner, Mapping | list):
                yield f"{key}:"
                yield from (f"  {line}" for line in _lines(inner))
            else:
                yield f"{key}: {_scalar(inner)}"
    else:
        for inner in value:
            first, *rest = _lines(inner) if inner and isinstance(inner, Mapping | list) else [_scalar(inner)]
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _scalar(value: Any) -> str:
    plain = isinstance(value, str) and PLAIN.fullmatch(value) and value not in NO_TEXT
    return str(value) if plain else json.dumps(value, ensure_ascii=False)
