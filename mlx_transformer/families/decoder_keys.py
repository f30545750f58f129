"""Lines of config.json that decoders share: sizes that may be null, rotary positions, and ids of special tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .keys import Given, Values


@dataclass(frozen=True)
class Implied:
    """A size that follows from others if it is null: those of lines before this one.

    E.g. Implied("num_key_value_heads", ("key_value_heads",), 8, lambda fields: fields["heads"]).
    """

    theirs: str
    ours: tuple[str, ...]
    default: int | None
    """Value in `transformers` if the key is missing."""
    follows: Callable[[Values], int]

    @property
    def defaults(self) -> Values:
        return {self.theirs: self.default}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        value = None if theirs.is_null(self.theirs) else theirs.value(self.theirs, self.default)
        if value is None:
            try:
                value = self.follows(fields)
            except (KeyError, TypeError, ZeroDivisionError):  # the other line has told the problem
                return []
        elif problems := theirs.mistyped(self.theirs, 0):
            return problems
        fields |= dict.fromkeys(self.ours, value)
        return []

    def write(self, config: Any) -> Values:
        return {self.theirs: getattr(config, self.ours[0])}


def heads_of_keys(default: int | None) -> Implied:
    return Implied("num_key_value_heads", ("key_value_heads",), default, lambda fields: fields["heads"])


def head_width(default: int | None = None) -> Implied:
    return Implied("head_dim", ("d_k", "d_v"), default, lambda fields: fields["d_model"] // fields["heads"])


@dataclass(frozen=True)
class Specials:
    """The ids of a decoder's start, end and padding. Comes after vocab_size. A model may lack each of them, or have one
    outside its vocabulary, which it can't write.

    Without a start, the end stands for it; without an end, the last id. Padding that is missing or also an end is the
    start, which isn't written either; if that is an end too, the id `spare`, else the last that isn't an end.
    """

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    """Values in `transformers` if the keys are missing."""
    spare: int = -1
    """An id that stands for no text of published models, e.g. of a byte that UTF-8 never has; -1: the last."""

    @property
    def defaults(self) -> Values:
        return dict(bos_token_id=self.bos, eos_token_id=self.eos, pad_token_id=self.pad)

    def read(self, theirs: Given, fields: Values) -> list[str]:
        size, ids, problems = fields.get("vocab_size"), dict[str, list[int]](), list[str]()
        for key, default in self.defaults.items():
            values = theirs.values(key) or [default]
            each = [id for value in values for id in (value if isinstance(value, list) else [value]) if id is not None]
            wrong = [id for id in each if type(id) is not int]
            problems += [f"{key}={wrong[0]!r:.60} must be a whole number"] if wrong else []
            ids[key] = [id for id in each if not wrong and isinstance(size, int) and 0 <= id < size]
        if problems or not isinstance(size, int) or size < 2:
            return problems
        start, ends, padding = ids.values()
        eos = (ends or [size - 1])[0]
        bos = (start or [eos])[0]
        likely = [*padding, bos, self.spare % size, size - 1, size - 2, 0]
        pad = next(id for id in likely if id not in (eos, *ends)) if set(range(size)) - {eos, *ends} else likely[0]
        fields |= dict(bos_id=bos, eos_id=eos, pad_id=pad)
        return []

    def write(self, config: Any) -> Values:
        return dict(bos_token_id=config.bos_id, eos_token_id=config.eos_id, pad_token_id=config.pad_id)


DEFAULT = ("default", None)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions, in the keys of both versions of transformers: rope_theta and rope_scaling beside each other, or
    since version 5 both in rope_parameters. Both are written."""

    base: float = 10000.0

    @property
    def defaults(self) -> Values:
        return dict(rope_theta=self.base, rope_scaling=None, rope_parameters=None)

    def read(self, theirs: Given, fields: Values) -> list[str]:
        if problems := theirs.mistyped("rope_theta", self.base):
            return problems
        tables = {key: theirs.value(key, None) or {} for key in ("rope_scaling", "rope_parameters")}
        if wrong := [key for key, table in tables.items() if not isinstance(table, dict)]:
            return [f"{key}={tables[key]!r:.60} must be an object" for key in wrong]
        table = tables["rope_scaling"] | tables["rope_parameters"]
        kind = table.get("rope_type", table.get("type"))
        fields["rotary_base"] = table.get("rope_theta", theirs.value("rope_theta", self.base))
        return [] if kind in DEFAULT else [f"rope_type={kind!r:.60} is not one of default"]

    def write(self, config: Any) -> Values:
        base = config.rotary_base
        parameters = {"rope_type": "default", "rope_theta": base}
        return {"rope_theta": base, "rope_scaling": None, "rope_parameters": parameters}


@dataclass(frozen=True)
class Windows:
    """The width of a decoder's local attention in all layers: a query sees this many keys, with its own."""

    default: int | None

    @property
    def defaults(self) -> Values:
        return dict(sliding_window=self.default)

    def read(self, theirs: Given, fields: Values) -> list[str]:
        width = None if theirs.is_null("sliding_window") else theirs.value("sliding_window", self.default)
        fields["window"] = width
        return [] if width is None else theirs.mistyped("sliding_window", 0)

    def write(self, config: Any) -> Values:
        return dict(sliding_window=config.window)
