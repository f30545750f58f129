"""Two texts as one row of ids: what stands before, between and behind them, and which kind each token is of; and
where the tokens of a text stand in it."""

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
    """The first character of each token and the one after its last, counted from 0; None of what stands around a
    text."""

    @classmethod
    def of(cls, encoding: tokenizers.Encoding) -> Located:
        """As the library has it."""
        around = encoding.special_tokens_mask
        return cls(encoding.ids, [None if a else place for a, place in zip(around, encoding.offsets, strict=True)])

    def cut(self, most: int) -> Located:
        """The same without its last tokens but the one that ends it, so that it has so many."""
        return Located([*self.ids[: most - 1], self.ids[-1]], [*self.places[: most - 1], self.places[-1]])


class PairForm:
    """The form that a parsed tokenizer.json gives to pairs. `UserError` for one that has none, or no room for any text
    in `max_length` tokens."""

    def __init__(self, specification: Mapping[str, Any], max_length: int | None = None) -> None:
        template = specification.get("post_processor") or {}
        if template.get("type") != "TemplateProcessing":
            raise UserError("the vocabulary has no form for pairs of texts")
        self._special = {name: token["ids"] for name, token in template["special_tokens"].items()}
        self._parts: Sequence[Mapping[str, Any]] = template["pair"]
        around = sum(len(self._special[part["SpecialToken"]["id"]]) for part in self._parts if "SpecialToken" in part)
        self._room = None if max_length is None else max_length - around
        if self._room is not None and self._room < 1:
            raise UserError(f"max_length={max_length}: {around} tokens stand around two texts: give more")

    def row(self, first: list[int], second: list[int]) -> Pair:
        """Join the ids of two texts. Where they are too many, the longer text loses its last ones, then both."""
        texts = dict(zip("AB", self._fitting(first, second), strict=True))
        pair = Pair([], [])
        for part in self._parts:
            [(kind, entry)] = part.items()
            ids = self._special[entry["id"]] if kind == "SpecialToken" else texts[entry["id"]]
            pair.ids.extend(ids)
            pair.token_types.extend([entry["type_id"]] * len(ids))
        return pair

    def _fitting(self, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
        """What is kept of both: half of the room each, and of an odd one the last place for the longer text."""
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
