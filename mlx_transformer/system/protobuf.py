"""Reads and writes the fields of protobuf messages, without its package."""

from __future__ import annotations

from collections.abc import Iterator

VARINT, DOUBLE, LENGTH, FLOAT = 0, 1, 2, 5
"""How a field is stored."""

Value = int | bytes


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield (number, value) of each field of a message: a number, or the bytes that are stored.

    Raises `ValueError` or `IndexError` if the message is damaged.
    """
    at, size = 0, len(data)
    while at < size:
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if not tag >> 3:
            raise ValueError(f"a field of number 0 at byte {at}")
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield tag >> 3, value
            continue
        if kind not in (DOUBLE, LENGTH, FLOAT):
            raise ValueError(f"a field of kind {kind} at byte {at}")
        length, at = _read_varint(data, at) if kind == LENGTH else (8 if kind == DOUBLE else 4, at)
        if length > size - at:
            raise ValueError(f"cut at byte {size}")
        yield tag >> 3, data[at : at + length]
        at += length


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError(f"a number without an end at byte {at}")


def field(number: int, value: Value) -> bytes:
    """The bytes of a field that holds a number, or bytes."""
    if isinstance(value, int):
        return tag(number, VARINT) + varint(value)
    return tag(number, LENGTH) + varint(len(value)) + value


def tag(number: int, kind: int) -> bytes:
    return varint(number << 3 | kind)


def varint(value: int) -> bytes:
    """A number in groups of seven bits, the lowest group first."""
    value &= (1 << 64) - 1
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])
