"""JSON of others with one value of another type: every node of a file in turn."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, 3, -1, 0, 2.5, True, False, float("nan"), float("inf"), 10**400, "x", "", "\ud800", "a\nb", "y" * 9999),
    *([], {}, [["cls"]], [None], ["x"], [3, "x"], {"x": 3}, {"0": {}}, [[[[[[3]]]]]], {"a": {"a": {"a": {}}}}),
)
MOST_ENTRIES = 12
"""Of a longer object or list, such as a vocabulary, the first and the last are changed."""


def nodes(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside another one, the whole first."""
    yield ()
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys if len(keys) <= MOST_ENTRIES or isinstance(value, dict) and len(keys) < 60 else [keys[0], keys[-1]]:
        yield from ((key, *rest) for rest in nodes(value[key]))


def replaced(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    if not way:
        return new
    key, *rest = way
    inner = replaced(value[key], tuple(rest), new)
    if isinstance(value, dict):
        return {**value, key: inner}
    return [*value[:key], inner, *value[key + 1 :]]


def linked(source: Path, folder: Path) -> Path:
    """The same folder, of links, of which one can become another file."""
    for file in source.rglob("*"):
        if file.is_file():
            place = folder / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file.resolve())
    return folder


def write(file: Path, values: Any) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(text_of(values))


def text_of(values: Any) -> bytes:
    """JSON, with the numbers that Python doesn't write."""
    return json.dumps(values, default=str).encode(errors="surrogatepass")


def files_of(folder: Path) -> dict[Path, Any]:
    found = {}
    for file in sorted(folder.rglob("*.json")):
        found[file] = json.loads(file.read_text(encoding="utf-8"))
    return found


__all__ = ["VALUES", "files_of", "linked", "nodes", "os", "replaced", "write"]
