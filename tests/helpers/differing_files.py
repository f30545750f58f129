"""The files that differ between two folders, byte for byte, with a graph's first difference in words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import numpy_helper

READ_FIRST = ("input", "output", "initializer")
"""Fields of a graph, which explain what differs in its nodes. All others come in the order of the format."""
LONGEST = 160  # characters that are shown of a value


def differences(base: Path, other: Path) -> list[str]:
    """A line for each file that is not the same in both, by its path in the folder; none if all are, and some are."""
    names = sorted({str(path.relative_to(top)) for top in (base, other) for path in top.rglob("*") if path.is_file()})
    if not names:
        return [f"{base} and {other}: nothing was written"]
    lines = {name: _difference(base / name, other / name) for name in names}
    return [f"{name}: {line}" for name, line in lines.items() if line]


def _difference(base: Path, other: Path) -> str | None:
    if not base.is_file() or not other.is_file():
        return "is new" if other.is_file() else "is no longer written"
    before, after = base.read_bytes(), other.read_bytes()
    if before == after:
        return None
    if base.suffix == ".onnx":
        models = onnx.load_from_string(before), onnx.load_from_string(after)
        return _message_difference(*models, where="") or "the same model, serialised in another order"
    if base.suffix == ".json":
        return _first_other("line", before.decode().splitlines(), after.decode().splitlines())
    place = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), "the shorter one's end")
    return f"{len(before)} bytes before, {len(after)} now, the first other at {place}"


def _message_difference(before: Message, after: Message, where: str) -> str | None:
    """The first difference of two messages of one type, depth first, with the path and names that lead to it."""
    if isinstance(before, onnx.TensorProto) and isinstance(after, onnx.TensorProto):
        return _tensor_difference(before, after, where)
    fields = [field.name for field in before.DESCRIPTOR.fields]
    for name in sorted(fields, key=lambda field: [field != first for first in READ_FIRST]):
        old, new = getattr(before, name), getattr(after, name)
        if old == new:
            continue
        path = f"{where} {name}".strip()
        if isinstance(old, Message):
            return _message_difference(old, new, path)
        if not isinstance(old, Sequence) or isinstance(old, str | bytes):
            return f"{path}: {_short(old)} before, {_short(new)} now"
        for i, (one, two) in enumerate(zip(old, new, strict=False)):
            if isinstance(one, Message) and one != two:
                return _message_difference(one, two, f"{path} {i}{_titles(one, two)}")
        return _first_other(path, old, new)
    return None


def _tensor_difference(before: onnx.TensorProto, after: onnx.TensorProto, where: str) -> str | None:
    kinds, places = zip(*map(_described, (before, after)), strict=True)
    if kinds[0] != kinds[1]:
        return f"{where}: {kinds[0]} before, {kinds[1]} now"
    if places[0] or places[1]:
        return _first_other(f"{where} external_data", *places)
    old, new = (numpy_helper.to_array(tensor) for tensor in (before, after))
    places = np.argwhere(np.atleast_1d(old != new))
    if not len(places):
        return f"{where}: the same values, stored in another way" if before != after else None
    first = tuple(map(int, places[0])) if old.shape else ()
    values = f"{old[first]} before, {new[first]} now"
    return f"{where}: {len(places)} of {old.size} values differ, the first at {list(first)}: {values}"


def _described(tensor: onnx.TensorProto) -> tuple[str, list[str]]:
    """(type, shape and name, where its values are if they are in a data file)"""
    dtype = onnx.TensorProto.DataType.Name(tensor.data_type)  # pyright: ignore[reportArgumentType]
    return f"{dtype} {list(tensor.dims)} {tensor.name}", [f"{e.key}={e.value}" for e in tensor.external_data]


def _titles(before: Any, after: Any) -> str:
    """What two entries of a list are called: its name, of a node also its operator; both where they differ."""
    titles = [" ".join(filter(None, (getattr(e, "op_type", ""), getattr(e, "name", "")))) for e in (before, after)]
    return f" ({' / '.join(dict.fromkeys(titles))})" if any(titles) else ""


def _first_other(what: str, before: Sequence[Any], after: Sequence[Any]) -> str:
    """The first entry in which two lists differ, both shown."""
    missing = object()
    for i, (old, new) in enumerate(zip_longest(before, after, fillvalue=missing)):
        if old is missing or new is missing:
            extra, said = (new, "only now") if old is missing else (old, "only before")
            return f"{what} {i}, {said}: {_short(extra)}"
        if old != new:
            return f"{what} {i}: {_short(old)} before, {_short(new)} now"
    return f"{what}: the same, written in another way"


def _short(value: Any) -> str:
    text = " ".join(str(value).split()) if isinstance(value, Message | str) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
