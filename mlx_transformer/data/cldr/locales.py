"""Two locales, and the facts about both that every kind of phrase needs: the fields of date patterns, common names.

The rule of the corpus is that the source determines the target. So a pattern is used only when the source
shows every field of the target (`determines`), and when two styles look the same in the source but not in the
target, only the first one is used (`Styles`).
"""

import difflib
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

from babel import Locale, localedata
from babel.dates import parse_pattern, tokenize_pattern

from mlx_transformer.system.errors import UserError

Value = TypeVar("Value")
Style = TypeVar("Style")
Part = TypeVar("Part")
Phrase = tuple[str, str]  # the same thing in source and target
Draw = Callable[[Random], Phrase | None]  # makes one phrase; None when the draw gave none
EXAMPLE = "for example cldr:en-de or cldr:pt_BR-ja"


@dataclass(frozen=True)
class Pair:
    """Source and target locale; `source_name` and `target_name` are the identifiers, such as pt_BR."""

    source: Locale
    target: Locale

    @property
    def source_name(self) -> str:
        return str(self.source)

    @property
    def target_name(self) -> str:
        return str(self.target)

    def both(self, render: Callable[[Locale], str]) -> Phrase:
        return render(self.source), render(self.target)

    def each(self, render: Callable[[Part, Locale], str], parts: Sequence[Part]) -> Phrase:
        """Render what there is of the source in its locale, and what there is of the target in the other."""
        return render(parts[0], self.source), render(parts[1], self.target)


def parse_corpus(corpus_name: str) -> Pair:
    """Read `cldr:SRC-TGT`, locale names with underscores. `UserError` lists everything wrong with it."""
    scheme, _, names = corpus_name.partition(":")
    parts = names.split("-")
    if scheme != "cldr" or len(parts) != 2 or not all(parts):
        raise UserError(f"corpus {corpus_name!r}: expected cldr:SRC-TGT, {EXAMPLE} (parts of one locale joined by _)")
    known = {name.lower(): name for name in localedata.locale_identifiers()}
    problems = []
    for part in parts:
        if part.lower() not in known:
            close = difflib.get_close_matches(part.lower(), known, n=3)
            hint = f" (did you mean {', '.join(known[name] for name in close)}?)" if close else ""
            problems.append(f"CLDR has no locale {part!r}{hint}")
    if not problems and parts[0].lower() == parts[1].lower():
        problems.append("source and target are the same locale")
    if problems:
        raise UserError(f"corpus {corpus_name!r}: {'; '.join(problems)}; {EXAMPLE}")
    return Pair(*(Locale.parse(known[part.lower()]) for part in parts))


FIELDS = {
    "y": "year", "u": "year", "M": "month", "L": "month", "d": "day", "E": "weekday", "e": "weekday", "c": "weekday",
    "Q": "quarter", "q": "quarter", "H": "hour", "k": "hour", "h": "hour of 12", "K": "hour of 12",
    "a": "half of day", "b": "half of day", "B": "half of day", "m": "minute", "s": "second", "G": "era",
}  # fmt: skip


def fields(pattern: str) -> frozenset[str]:
    """Return the fields that a CLDR date or time pattern shows (UTS 35, part 4, "Date Field Symbol Table").

    The era is left out, since all dates here are of one era. Week numbers count differently by country and have
    no name in FIELDS: they come out as the letter, which no other pattern determines.
    """
    names = set()
    for token_type, value in tokenize_pattern(pattern):
        if token_type == "field":
            letter, width = value
            name = FIELDS.get(letter, letter)
            names.add("year of century" if name == "year" and width == 2 else name)
    if {"hour of 12", "half of day"} <= names:
        names.add("hour")
    return frozenset(names - {"era"})


def determines(source: frozenset[str], target: frozenset[str]) -> bool:
    """Say whether `target`'s fields can be derived from `source`'s."""
    derived = set(source)
    if "year" in source:
        derived.add("year of century")
    if "hour" in source:
        derived |= {"hour of 12", "half of day"}
    return target <= derived and not {"w", "W", "Y"} & (source | target)


def apply_pattern(pattern: str, value: Any, locale: Locale) -> str:
    """Write a date, time or datetime by a CLDR pattern; empty when a rare locale lacks a name that it asks for."""
    try:
        return parse_pattern(pattern).apply(value, locale)  # babel parses each pattern once
    except (KeyError, ValueError):
        return ""


class Styles(Generic[Value, Style]):
    """Ways to render one value, earlier ones first; draws among those that are unambiguous for the value.

    Two styles clash for a value when the source texts are equal and the target texts differ ("May 5" is both the
    long and the short form); the later one is left out. Whether they clash depends on `key(value)` only (the month,
    say), so it is worked out once for each key.
    """

    def __init__(
        self,
        styles: Iterable[tuple[Style, float]],
        render: Callable[[Style, Value], Phrase],
        key: Callable[[Value], Hashable] = lambda value: None,
    ):
        """`styles` come with their weight in the draw."""
        self._styles, self._render, self._key = list(styles), render, key
        self._usable: dict[Hashable, tuple[list[Style], list[float]]] = {}

    def __len__(self) -> int:
        return len(self._styles)

    def draw(self, random: Random, value: Value) -> Phrase | None:
        """Write `value` in a style drawn by weight, or return None when no style is left."""
        key = self._key(value)
        if key not in self._usable:
            self._usable[key] = self._choose(value)
        styles, weights = self._usable[key]
        return self._render(random.choices(styles, weights)[0], value) if styles else None

    def _choose(self, value: Value) -> tuple[list[Style], list[float]]:
        target_of: dict[str, str] = {}
        usable = []
        for style, weight in self._styles:
            source, target = self._render(style, value)
            if source and target and target_of.setdefault(source, target) == target:
                usable.append((style, weight))
        return [style for style, _ in usable], [weight for _, weight in usable]


LIST_FALLBACKS = {
    "standard": ("standard",),
    "or": ("or",),
    "unit": ("unit", "unit-short", "standard"),
    "unit-short": ("unit-short", "unit", "standard"),
    "unit-narrow": ("unit-narrow", "unit-short", "unit", "standard"),
}


def join_list(items: list[str], style: str, locale: Locale) -> str:
    """Join items by the locale's list patterns (UTS 35, part 2, "List Patterns"); each part falls back on its own.

    babel's `format_list` falls back for a style as a whole and raises KeyError where a locale gives only some parts.
    """

    def pattern(part: str) -> str:
        return next(entry for name in LIST_FALLBACKS[style] if (entry := locale.list_patterns.get(name, {}).get(part)))

    def join(part: str, first: str, second: str) -> str:
        before, between, after = re.split(r"\{[01]\}", pattern(part))
        return f"{before}{first}{between}{second}{after}"

    if len(items) <= 2:
        return join("2", *items) if len(items) == 2 else "".join(items)
    text = join("start", items[0], items[1])
    for item in items[2:-1]:
        text = join("middle", text, item)
    return join("end", text, items[-1])


def join_phrases(pair: Pair, phrases: Sequence[Phrase], style: str) -> Phrase:
    """Join phrases to a list in both locales."""
    return pair.each(lambda items, x: join_list(list(items), style, x), list(zip(*phrases, strict=True)))


def common_names(source: dict[str, str], target: dict[str, str], skip: Iterable[str] = ()) -> list[Phrase]:
    """Return the names that both locales have under one code, sorted by code.

    Left out are codes that stand for themselves, the codes in `skip`, and names that would make the translation
    ambiguous: two codes with one source name.
    """
    skip = set(skip)
    codes = [code for code in sorted(set(source) & set(target)) if code not in skip]
    named = [(source[c], target[c]) for c in codes if source[c] not in ("", c) and target[c] not in ("", c)]
    return unambiguous(named)


def unambiguous(phrases: Iterable[Phrase]) -> list[Phrase]:
    """Leave out repetitions, and all phrases whose source has two targets; the order stays."""
    phrases = list(dict.fromkeys(phrases))
    targets: dict[str, set[str]] = {}
    for source, target in phrases:
        targets.setdefault(source, set()).add(target)
    return [(source, target) for source, target in phrases if len(targets[source]) == 1]
