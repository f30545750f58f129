"""Two texts as a row of ids with special tokens and token types; long texts as overlapping windows; tokens' places in
their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_transformer.system.errors import UserError

if TYPE_CHECKING:
    import tokenizers


class Pair(NamedTuple):
    """Two texts as one row."""

    ids: list[int]
    token_types: list[int]
    """The kind of each token, 0 or 1."""


class Located(NamedTuple):
    """A text's ids, and where its tokens stand in it."""

    ids: list[int]
    places: list[tuple[int, int] | None]
    """First and last character + 1 of each token, from 0; None for special tokens."""

    @classmethod
    def of(cls, encoding: tokenizers.Encoding) -> Located:
        """Read an encoding of the library `tokenizers`."""
        around = encoding.special_tokens_mask
        return cls(encoding.ids, [None if a else place for a, place in zip(around, encoding.offsets, strict=True)])

    def cut(self, most: int) -> Located:
        """Cut the text to `most` tokens, the end token included."""
        return Located([*self.ids[: most - 1], self.ids[-1]], [*self.places[: most - 1], self.places[-1]])

    def windows(self, most: int) -> list[Window]:
        """Cut the text into overlapping parts, each with the special tokens: rows of at most `most` tokens. Raises
        `UserError` if the special tokens leave no room."""
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
        """Return the text without special tokens."""
        pairs = [(id, place) for id, place in zip(self.ids, self.places, strict=True) if place is not None]
        return Located([id for id, _ in pairs], [place for _, place in pairs])


class Window(NamedTuple):
    """A part of a text as one row, alone or behind another text."""

    row: Pair
    at: int
    """Where in the row the part begins."""
    first: int
    """Its first token in its text."""
    count: int
    """Tokens of the part."""


OVERLAP = 128
"""Tokens that neighbouring windows share; at most half a window."""


def _starts(count: int, size: int) -> range:
    """Return the starts of overlapping parts of `size` tokens in a text of `count`."""
    step = size - min(OVERLAP, size // 2)
    return range(0, max(1, count - size + step), step)


class PairForm:
    """A tokenizer.json's form of pairs: special tokens and token types. Raises `UserError` without such a form, or if
    `max_length` leaves no room for text."""

    def __init__(self, specification: Mapping[str, Any], max_length: int | None = None) -> None:
        template = specification.get("post_processor") or {}
        if template.get("type") != "TemplateProcessing":
            raise UserError("the vocabulary has no form for pairs of texts")
        self._special = {name: token["ids"] for name, token in template["special_tokens"].items()}
        self._parts: Sequence[Mapping[str, Any]] = template["pair"]
        around = sum(len(self._special[part["SpecialToken"]["id"]]) for part in self._parts if "SpecialToken" in part)
        self._room = None if max_length is None else max_length - around
        if self._room is not None and self._room < 1:
            raise UserError("{max_length}: {} tokens stand around two texts: give more", around, max_length=max_length)

    def row(self, first: list[int], second: list[int]) -> Pair:
        """Join the ids of two texts. If they are too long, the end of the longer text is cut, then both."""
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
        """Most tokens of a first text that leave as much room for the second."""
        assert self._room is not None
        return max(1, self._room // 2)

    def windows(self, first: list[int], second: list[int]) -> list[Window]:
        """Join a text of at most `half` tokens with each overlapping part of a second text. Raises `UserError` if the
        first leaves no room."""
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
        """Tokens before the first text."""
        return self._place_of("A", 0)

    def _place_of(self, text: str, first: int) -> int:
        """Return where text A or B begins in a row whose first text has `first` tokens."""
        at = 0
        for part in self._parts:
            [(kind, entry)] = part.items()
            if kind == "Sequence" and entry["id"] == text:
                break
            at += first if kind == "Sequence" else len(self._special[entry["id"]])
        return at

    def _fitting(self, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
        """Cut both texts to the room: half of it each, the odd token for the longer text."""
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
