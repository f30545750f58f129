"""Two texts as a row of ids with special tokens and token types; long texts as overlapping windows; tokens' places in
their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_transformer.system.errors import UserError

if TYPE_CHECKING:
    import tokenizers


class Pair(NamedTuple):
    """Two texts as a single row of tokens."""

    ids: list[int]
    token_types: list[int]
    """0 or 1 for each token, usually 0 in the first text and 1 in the second."""


class Located(NamedTuple):
    """A text's ids, and the place of each token in it."""

    ids: list[int]
    places: list[tuple[int, int] | None]
    """(start, end) of each token, in characters; None for special tokens."""

    @classmethod
    def of(cls, encoding: tokenizers.Encoding) -> Located:
        """Read an encoding of the library `tokenizers`."""
        around = encoding.special_tokens_mask
        return cls(encoding.ids, [None if a else place for a, place in zip(around, encoding.offsets, strict=True)])

    def cut(self, most: int) -> Located:
        """Truncate to `most` tokens and keep the end token."""
        return Located([*self.ids[: most - 1], self.ids[-1]], [*self.places[: most - 1], self.places[-1]])

    def windows(self, most: int) -> list[Window]:
        """Split into overlapping rows of at most `most` tokens, each with the special tokens. Raises `UserError` if
        these leave no room."""
        inside = [i for i, place in enumerate(self.places) if place is not None]
        before, end = (inside[0], inside[-1] + 1) if inside else (len(self.ids), len(self.ids))
        head, text, tail = self.ids[:before], self.ids[before:end], self.ids[end:]
        size = most - len(head) - len(tail)
        if size < 1:
            raise UserError(
                "{max_length}: {} tokens stand around a text: give more", len(head) + len(tail), max_length=most
            )
        windows = []
        for start in _starts(len(text), size):
            part = text[start : start + size]
            ids = [*head, *part, *tail]
            windows.append(Window(Pair(ids, [0] * len(ids)), before, start, len(part)))
        return windows

    def alone(self) -> Located:
        """The text without special tokens."""
        pairs = [(id, place) for id, place in zip(self.ids, self.places, strict=True) if place is not None]
        return Located([id for id, _ in pairs], [place for _, place in pairs])


class Window(NamedTuple):
    """A part of a text as a row, by itself or after another text: tokens `first` to `first + count - 1` of the text are
    tokens `at` to `at + count - 1` of the row."""

    row: Pair
    at: int
    first: int
    count: int


OVERLAP = 128
"""Tokens that neighbouring windows share; at most half a window."""


def _starts(count: int, size: int) -> range:
    """Starts of overlapping parts of `size` tokens in a text of `count`.

    >>> list(_starts(10, 4))
    [0, 2, 4, 6]
    """
    step = size - min(OVERLAP, size // 2)
    return range(0, max(1, count - size + step), step)


class PairForm:
    """Joins two texts by a tokenizer.json's template for pairs, with special tokens and token types.

    max_length: most tokens of a row. Raises `UserError` without a template, or if `max_length` leaves no room for text.
    """

    def __init__(self, specification: Mapping[str, Any], max_length: int | None = None) -> None:
        template = specification.get("post_processor") or {}
        if template.get("type") != "TemplateProcessing":
            raise UserError("the tokenizer has no template for pairs of texts")
        self._special = {name: token["ids"] for name, token in template["special_tokens"].items()}
        self._parts: Sequence[Mapping[str, Any]] = template["pair"]
        around = sum(len(self._special[part["SpecialToken"]["id"]]) for part in self._parts if "SpecialToken" in part)
        self._room = None if max_length is None else max_length - around
        if self._room is not None and self._room < 1:
            raise UserError("{max_length}: {} tokens stand around two texts: give more", around, max_length=max_length)

    def row(self, first: list[int], second: list[int]) -> Pair:
        """Join the ids of two texts. Too long texts are truncated at the end: the longer text to the other's length,
        then both."""
        texts = dict(zip("AB", self._fitting(first, second), strict=True))
        pair = Pair([], [])
        for part in self._parts:
            [(kind, entry)] = part.items()
            ids = self._special[entry["id"]] if kind == "SpecialToken" else texts[entry["id"]]
            pair.ids.extend(ids)
            pair.token_types.extend([entry["type_id"]] * len(ids))
        return pair

    @property
    def half(self) -> int:
        """Half of the row's room for text, in tokens; at least 1."""
        assert self._room is not None
        return max(1, self._room // 2)

    def windows(self, first: list[int], second: list[int]) -> list[Window]:
        """Join a first text, usually of at most `half` tokens, with each overlapping part of a second text. Raises
        `UserError` if the first leaves no room."""
        assert self._room is not None
        size = self._room - len(first)
        if size < 1:
            raise UserError(f"a text of {len(first)} tokens leaves no room for another one")
        starts = _starts(len(second), size)
        parts = [second[start : start + size] for start in starts]
        return [
            Window(self.row(first, part), self._place_of("B", len(first)), start, len(part))
            for start, part in zip(starts, parts, strict=True)
        ]

    @property
    def before(self) -> int:
        """Number of tokens before the first text."""
        return self._place_of("A", 0)

    def _place_of(self, text: str, first: int) -> int:
        """Place in a row where text A or B begins, after a first text of `first` tokens."""
        at = 0
        for part in self._parts:
            [(kind, entry)] = part.items()
            if kind == "Sequence" and entry["id"] == text:
                break
            at += first if kind == "Sequence" else len(self._special[entry["id"]])
        return at

    def _fitting(self, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
        """Truncate texts to the room: half for each and the odd token for the longer, or all that a short text
        leaves."""
        room = self._room
        if room is None or len(first) + len(second) <= room:
            return first, second
        half = room // 2
        if len(first) <= half:
            return first, second[: room - len(first)]
        if len(second) <= half:
            return first[: room - len(second)], second
        most = half if len(first) <= len(second) else room - half
        return first[:most], second[: room - most]
