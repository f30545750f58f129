"""Draw the phrases of Unicode CLDR in mlx_transformer/data/cldr_phrases, by babel 2.18.0, whose CLDR is 47.

    python tests/mlx_transformer/data/make_cldr.py en-de | gzip -9n >mlx_transformer/data/cldr_phrases/en-de.tsv.gz

A value (a date, an amount, names) is drawn and written in both locales, so every reference is exact. The source
determines the target: a pattern is used only when the source shows every field of the target (`determines`), and
when two styles look the same in the source but not in the target, only the first one is used (`Styles`).
The same babel gives the same bytes on every platform, in a process of its own: locales that babel has loaded before
leak into later ones (after German, French quarters are "1. Quartal").
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from random import Random
from typing import Any, Literal

from babel import Locale
from babel.core import get_global
from babel.dates import get_day_names, get_month_names, get_quarter_names, parse_pattern, tokenize_pattern
from babel.numbers import (
    format_compact_currency,
    format_compact_decimal,
    format_currency,
    format_decimal,
    format_percent,
    format_scientific,
    get_currency_precision,
    get_currency_symbol,
)

SEED, TRAIN_PAIRS, VALID_PER_KIND, HELD_OUT_PER_KIND = 1, 60_000, 50, 100
Phrase = tuple[str, str]  # the same thing in source and target
Draw = Callable[[Random], Phrase | None]  # makes one phrase; None when the draw gave none


@dataclass(frozen=True)
class Pair:
    source: Locale
    target: Locale

    def both(self, render: Callable[[Locale], str]) -> Phrase:
        return render(self.source), render(self.target)

    def each(self, render: Callable[[Any, Locale], str], parts: Sequence) -> Phrase:
        """Render what there is of the source in its locale, and what there is of the target in the other."""
        return render(parts[0], self.source), render(parts[1], self.target)


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
    return parse_pattern(pattern).apply(value, locale)  # babel parses each pattern once


class Styles:
    """Ways to render one value, earlier ones first; draws among those that are unambiguous for the value.

    Two styles clash for a value when the source texts are equal and the target texts differ ("May 5" is both the
    long and the short form); the later one is left out. Whether they clash depends on `key(value)` only (the month,
    say), so it is worked out once for each key.
    """

    def __init__(
        self,
        styles: Iterable[tuple[Any, float]],  # with their weights in the draw
        render: Callable[[Any, Any], Phrase],
        key: Callable[[Any], Hashable],
    ):
        self._styles, self._render, self._key = list(styles), render, key
        self._usable: dict[Hashable, tuple[list, list[float]]] = {}

    def draw(self, random: Random, value: Any) -> Phrase | None:
        """Write `value` in a style drawn by weight, or return None when no style is left."""
        key = self._key(value)
        if key not in self._usable:
            self._usable[key] = self._choose(value)
        styles, weights = self._usable[key]
        return self._render(random.choices(styles, weights)[0], value) if styles else None

    def _choose(self, value: Any) -> tuple[list, list[float]]:
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

    if len(items) == 2:
        return join("2", *items)
    text = join("start", items[0], items[1])
    for item in items[2:-1]:
        text = join("middle", text, item)
    return join("end", text, items[-1])


def join_phrases(pair: Pair, phrases: Sequence[Phrase], style: str) -> Phrase:
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


Length = Literal["long", "short"]
COMPACT_POWERS = range(3, 13)  # thousands to trillions
MAJOR_CURRENCIES = (
    "USD", "EUR", "JPY", "GBP", "CNY", "AUD", "CAD", "CHF", "HKD", "SEK", "NOK", "DKK", "NZD", "MXN", "INR", "BRL",
    "ZAR", "KRW", "PLN", "CZK", "HUF", "ILS", "THB", "TRY", "SGD",
)  # fmt: skip


def random_decimal(random: Random, max_digits: int, max_fraction: int) -> Decimal:
    """Draw 1 to `max_digits` digits before and 0 to `max_fraction` after the point, without a trailing zero after it.

    So the shown number is the number that CLDR's plural rules see.
    """
    integer = random.randrange(10 ** random.randint(1, max_digits))
    fraction = random.randint(0, max_fraction)
    if not fraction or random.random() < 0.4:
        return Decimal(integer)
    digits = random.randrange(10 ** (fraction - 1)) * 10 + random.randint(1, 9)
    return Decimal(integer) + Decimal(digits).scaleb(-fraction)


def choose(random: Random, draws: list[tuple[Draw, float]]) -> Phrase | None:
    """Draw one phrase of one of several sorts, by weight."""
    return random.choices([draw for draw, _ in draws], [weight for _, weight in draws])[0](random)


def numbers(pair: Pair) -> Draw:
    """Draw decimals, percentages, scientific and compact numbers: "-1,234.5", "12.5%", "2.5E-7", "14.2 million"."""

    def decimal(random: Random) -> Phrase:
        value = random_decimal(random, 9, 3)
        value = -value if random.random() < 0.15 else value
        return pair.both(lambda x: format_decimal(value, locale=x))

    def percent(random: Random) -> Phrase:
        value = random_decimal(random, 3, 2).scaleb(-2)
        return pair.both(lambda x: format_percent(value, locale=x, decimal_quantization=False))

    def scientific(random: Random) -> Phrase:
        value = (random_decimal(random, 1, 3) + random.randint(1, 9)).scaleb(random.randint(-12, 15))
        return pair.both(lambda x: format_scientific(value, locale=x, decimal_quantization=False))

    def render_compact(length: Length, value: Decimal) -> Phrase:
        return pair.both(lambda x: format_compact_decimal(value, format_type=length, locale=x, fraction_digits=6))

    lengths = Styles([("long", 1.0), ("short", 1.0)], render_compact, key=lambda v: v)

    def compact(random: Random) -> Phrase | None:
        return lengths.draw(random, _round_number(random))

    return lambda random: choose(random, [(decimal, 3.0), (percent, 1.5), (scientific, 1.0), (compact, 2.0)])


def _round_number(random: Random) -> Decimal:
    """Draw two or three digits and a power of ten, 1000 or more, so that no compact form has to round it."""
    digits = random.randint(10, 99) if random.random() < 0.7 else random.randint(100, 999)
    return Decimal(digits).scaleb(random.choice(COMPACT_POWERS) - (1 if digits < 100 else 2))


def currencies_in_use() -> list[str]:
    """Return the codes of all currencies that are legal tender somewhere today, sorted."""
    used = {
        code
        for entries in get_global("territory_currencies").values()
        for code, _, end, tender in entries
        if tender and end is None
    }
    return sorted(used)


def money(pair: Pair) -> Draw:
    """Draw amounts with symbol or code, with the currency's name, and compact: "$12.50", "3 Swiss francs", "€1.2M"."""
    codes = _distinct(pair, currencies_in_use())
    major = [code for code in MAJOR_CURRENCIES if code in codes]

    def code(random: Random) -> str:
        return random.choice(major if random.random() < 0.6 else codes)

    def symbol(random: Random) -> Phrase:
        currency, value = code(random), random_decimal(random, 6, 0) + Decimal(random.randrange(100)).scaleb(-2)
        if random.random() < 0.3:
            value = value.to_integral_value()
        return pair.both(lambda x: format_currency(value, currency, locale=x))

    def name(random: Random) -> Phrase:
        currency, value = code(random), random_decimal(random, 5, 0)
        cents = random.random() < 0.3 and get_currency_precision(currency) > 0
        if cents:
            value = value + Decimal(random.randint(1, 99)).scaleb(-2)
        elif random.random() < 0.15:
            value = Decimal(1)  # the singular
        return pair.both(
            lambda x: format_currency(value, currency, locale=x, format_type="name", currency_digits=cents)
        )

    def compact(random: Random) -> Phrase:
        currency, value = random.choice(major), _round_number(random)
        return pair.both(lambda x: format_compact_currency(value, currency, locale=x, fraction_digits=6))

    return lambda random: choose(random, [(symbol, 2.0), (name, 3.0), (compact, 1.0)])


def _distinct(pair: Pair, codes: list[str]) -> list[str]:
    """Return the currencies that both locales name, and that neither share a name nor a symbol in the source."""

    def named(locale: Locale) -> dict[str, str]:
        return {code: locale.currencies[code] for code in codes if code in locale.currencies}

    names = {source for source, _ in common_names(named(pair.source), named(pair.target))}
    symbols = [get_currency_symbol(code, pair.source) for code in codes]
    distinct = []
    for code in codes:
        symbol = get_currency_symbol(code, pair.source)
        if named(pair.source).get(code) in names and code in pair.target.currencies and symbols.count(symbol) == 1:
            distinct.append(code)
    return distinct


UNITS = (
    "acceleration-g-force", "acceleration-meter-per-square-second", "angle-degree", "angle-radian", "area-acre",
    "area-hectare", "area-square-centimeter", "area-square-foot", "area-square-inch", "area-square-kilometer",
    "area-square-meter", "area-square-mile", "concentr-karat", "concentr-mole",
    "consumption-liter-per-100-kilometer", "consumption-mile-per-gallon", "digital-bit", "digital-byte",
    "digital-gigabit", "digital-gigabyte", "digital-kilobyte", "digital-megabit", "digital-megabyte",
    "digital-petabyte", "digital-terabyte", "duration-century", "duration-day", "duration-decade", "duration-hour",
    "duration-millisecond", "duration-minute", "duration-month", "duration-nanosecond", "duration-second",
    "duration-week", "duration-year", "electric-ampere", "electric-ohm", "electric-volt", "energy-calorie",
    "energy-joule", "energy-kilocalorie", "energy-kilojoule", "energy-kilowatt-hour", "force-newton",
    "frequency-gigahertz", "frequency-hertz", "frequency-kilohertz", "frequency-megahertz", "graphics-megapixel",
    "graphics-pixel", "length-astronomical-unit", "length-centimeter", "length-fathom", "length-foot", "length-inch",
    "length-kilometer", "length-light-year", "length-meter", "length-micrometer", "length-mile", "length-millimeter",
    "length-nanometer", "length-nautical-mile", "length-parsec", "length-yard", "light-lumen", "light-lux",
    "mass-carat", "mass-gram", "mass-kilogram", "mass-milligram", "mass-ounce", "mass-pound", "mass-stone",
    "mass-tonne", "power-gigawatt", "power-horsepower", "power-kilowatt", "power-megawatt", "power-watt",
    "pressure-atmosphere", "pressure-bar", "pressure-hectopascal", "pressure-kilopascal", "pressure-pascal",
    "speed-kilometer-per-hour", "speed-knot", "speed-meter-per-second", "speed-mile-per-hour",
    "temperature-celsius", "temperature-fahrenheit", "temperature-kelvin", "torque-newton-meter", "volume-barrel",
    "volume-bushel", "volume-centiliter", "volume-cubic-centimeter", "volume-cubic-foot", "volume-cubic-kilometer",
    "volume-cubic-meter", "volume-cup", "volume-deciliter", "volume-fluid-ounce", "volume-gallon", "volume-hectoliter",
    "volume-liter", "volume-milliliter", "volume-pint", "volume-quart", "volume-tablespoon", "volume-teaspoon",
)  # fmt: skip
RATES = (  # what is counted, and for each of which it is
    ("mass-gram", "mass-kilogram", "mass-tonne", "volume-liter", "volume-cubic-meter", "digital-gigabyte",
     "digital-megabyte", "length-meter", "length-kilometer", "length-millimeter", "energy-kilojoule", "graphics-pixel"),
    ("duration-second", "duration-minute", "duration-hour", "duration-day", "duration-week", "duration-month",
     "duration-year", "mass-kilogram", "volume-liter", "area-square-meter"),
)  # fmt: skip
LENGTHS = {"long": 3.0, "short": 2.0, "narrow": 0.5}  # weight in the draw
UNIT_LIST_STYLES = {"long": "unit", "short": "unit-short", "narrow": "unit-narrow"}
SPAN_LIMITS = {"year": 120, "month": 36, "week": 52, "day": 120, "hour": 72, "minute": 120, "second": 120}
MIXED_SPANS = (  # units that go together, each with the largest count
    (("year", 40), ("month", 11)),
    (("month", 24), ("day", 30)),
    (("week", 12), ("day", 6)),
    (("day", 30), ("hour", 23)),
    (("hour", 23), ("minute", 59)),
    (("minute", 59), ("second", 59)),
    (("hour", 23), ("minute", 59), ("second", 59)),
)


def random_count(random: Random, limit: int) -> int:
    """Draw 1 to `limit`; every sixth is 1, so that the singular is learned."""
    return 1 if random.random() < 1 / 6 else random.randint(1, limit)


def format_measure(value: Decimal | int, unit: str, length: str, locale: Locale, per: str | None = None) -> str:
    """Write `value` of `unit`, or of `unit` for each `per`: "12.5 liters per second".

    Plural forms that the locale leaves out are those of "other" (babel's `format_unit` takes the unit's display
    name there, and writes "1 Kilometer" where German has "1 km").
    """
    patterns = _patterns(locale, unit, length)
    pattern = patterns.get(locale.plural_form(value)) or patterns["other"]
    text = pattern.replace("{0}", format_decimal(value, locale=locale))
    return _patterns(locale, per, length)["per"].replace("{0}", text) if per else text


def format_relative(count: int, unit: str, length: str, locale: Locale) -> str:
    """Write `count` units from now, or ago when negative: "in 3 days". Empty when the locale has no pattern.

    A length that the locale doesn't tell apart takes the long patterns (babel's `format_timedelta` raises
    KeyError where only one direction is told apart).
    """
    fields, direction = locale._data["date_fields"], "future" if count > 0 else "past"
    for name in (f"{unit}-{length}", unit):
        patterns = fields.get(name, {}).get(direction, {})
        pattern = patterns.get(locale.plural_form(abs(count))) or patterns.get("other")
        if pattern:
            return pattern.replace("{0}", format_decimal(abs(count), locale=locale))
    return ""


def _patterns(locale: Locale, unit: str, length: str):
    return locale._data["unit_patterns"].get(unit, {}).get(length, {})


def available(pair: Pair, unit: str, length: str, form: str = "other") -> bool:
    """Say whether both locales have a pattern for it; `form` "per" is that of "... per unit"."""
    return all(_patterns(locale, unit, length).get(form) for locale in (pair.source, pair.target))


def measures(pair: Pair) -> Draw:
    """Draw a number with a unit, or with a rate of two units: "3 miles", "12.5 km/h", "40 grams per liter"."""

    def render(style: tuple[str, str | None, str], value: Decimal) -> Phrase:
        unit, per, length = style
        return pair.both(lambda x: format_measure(value, unit, length, x, per))

    simple = [((u, None, n), w) for u in UNITS for n, w in LENGTHS.items() if available(pair, u, n)]
    rates = [
        ((counted, per, n), w)
        for counted in RATES[0]
        for per in RATES[1]
        for n, w in LENGTHS.items()
        if n != "narrow" and counted != per and available(pair, counted, n) and available(pair, per, n, "per")
    ]
    # One table for both, so that a rate never reads like a unit of another meaning.
    share = 0.2 * sum(w for _, w in simple) / sum(w for _, w in rates)
    styles = [*simple, *((style, w * share) for style, w in rates)]
    units = Styles(styles, render, key=lambda value: pair.both(lambda x: x.plural_form(value)))

    def draw(random: Random) -> Phrase | None:
        value = Decimal(1) if random.random() < 0.08 else random_decimal(random, random.randint(1, 4), 2)
        return units.draw(random, value)

    return draw


def spans(pair: Pair) -> Draw:
    """Draw relative times and durations: "in 3 weeks", "5 min. ago", "2 hours, 40 minutes"."""
    styles = [((unit, length), weight) for unit in SPAN_LIMITS for length, weight in LENGTHS.items()]

    def measure(unit: str, length: str, count: int) -> Phrase:
        if not available(pair, unit, length):
            return "", ""
        return pair.both(lambda x: format_measure(count, unit, length, x))

    def render(style: tuple[str, str], value: tuple[int, int]) -> Phrase:
        """Write a span; `value` is a count, and 1 for the future, -1 for the past, 0 for a duration."""
        (unit, length), (count, direction) = style, value
        if count > SPAN_LIMITS[unit]:
            return "", ""  # "in 120 weeks" is no phrase of daily life
        if direction == 0:
            return measure(f"duration-{unit}", length, count)
        return pair.both(lambda x: format_relative(count * direction, unit, length, x))

    single = Styles(styles, render, key=lambda value: value)

    def relative(random: Random) -> Phrase | None:
        direction = random.choices((1, -1, 0), (4, 4, 1))[0]
        return single.draw(random, (random_count(random, random.choice((12, 60, 120))), direction))

    def render_mixed(length: str, value: Sequence[tuple[str, int]]) -> Phrase:
        parts = [measure(f"duration-{unit}", length, count) for unit, count in value]
        if not all(source for source, _ in parts):
            return "", ""
        return join_phrases(pair, parts, UNIT_LIST_STYLES[length])

    lengths = Styles(LENGTHS.items(), render_mixed, key=lambda value: tuple(unit for unit, _ in value))

    def mixed(random: Random) -> Phrase | None:
        units = random.choice(MIXED_SPANS)
        return lengths.draw(random, [(unit, random_count(random, limit)) for unit, limit in units])

    return lambda random: choose(random, [(relative, 3.0), (mixed, 2.0)])


FIRST_DAY, LAST_DAY = datetime.date(1900, 1, 1).toordinal(), datetime.date(2099, 12, 31).toordinal()
DATE_WIDTHS = {"full": 2.0, "long": 2.0, "medium": 2.0, "short": 2.0}  # weight in the draw
DATE_SKELETONS = {
    "yMMMEd": 1.0, "yMMMd": 1.0, "yMMMM": 1.0, "yMMM": 0.5, "MMMMd": 1.0, "MMMd": 1.0, "MMMEd": 1.0, "MMMMEd": 1.0,
    "yMEd": 0.5, "MEd": 0.5, "Md": 0.5, "yM": 0.5, "yQQQQ": 0.5, "yQQQ": 0.5,
}  # fmt: skip
CLOCK_SKELETONS = {"hm": 1.0, "hms": 1.0, "h": 0.3, "Ehm": 1.5, "Ehms": 0.7, "Bhm": 0.7}  # h: the locale's own clock
DATED_CLOCK = {"long": 0.7, "medium": 1.0, "short": 1.0}  # a date of this width with the short time
# Skeleton of an interval -> its greatest differences (the field in which both ends differ first), with weights.
DATE_INTERVALS = {
    "yMMMd": {"d": 2.0, "M": 2.0, "y": 0.5}, "MMMd": {"d": 1.5, "M": 1.5}, "yMMMEd": {"d": 0.7, "M": 0.7},
    "MMMEd": {"d": 0.7, "M": 0.7}, "yMMMM": {"M": 0.7, "y": 0.7}, "yMMM": {"M": 0.3, "y": 0.3},
    "yMd": {"d": 0.5, "M": 0.5, "y": 0.3}, "y": {"y": 0.3},
}  # fmt: skip
CLOCK_INTERVALS = {"hm": 3.0, "h": 0.5}


def random_date(random: Random) -> datetime.date:
    """Draw a day from 1900 to 2099; two thirds of them within 1990 to 2035, as in most texts."""
    if random.random() < 2 / 3:
        return datetime.date(random.randint(1990, 2035), 1, 1) + datetime.timedelta(random.randrange(365))
    return datetime.date.fromordinal(random.randint(FIRST_DAY, LAST_DAY))


def random_moment(random: Random) -> datetime.datetime:
    """Draw a date with a time of day; half of the times are whole five minutes."""
    minute = random.randrange(60) if random.random() < 0.5 else 5 * random.randrange(12)
    time = datetime.time(random.randrange(24), minute, random.randrange(60))
    return datetime.datetime.combine(random_date(random), time)


def date_styles(pair: Pair) -> list[tuple[Phrase, float]]:
    """Return (source pattern, target pattern) of every usable style with its weight."""
    styles = [(pair.both(lambda x, w=width: x.date_formats[w].pattern), DATE_WIDTHS[width]) for width in DATE_WIDTHS]
    return _determined(styles + _skeletons(pair, DATE_SKELETONS))


def _clock_styles(pair: Pair) -> list[tuple[Phrase, float]]:
    styles = _skeletons(pair, CLOCK_SKELETONS)
    for width, weight in DATED_CLOCK.items():
        styles.append((pair.both(partial(_dated, width=width)), weight))
    return _determined(styles)


def _dated(locale: Locale, width: str) -> str:
    """Join the patterns of date and short time in the locale's order (babel, too, drops the quotes of this pattern)."""
    joined = str(locale.datetime_formats[width]).replace("'", "")
    date, time = locale.date_formats[width].pattern, locale.time_formats["short"].pattern
    return joined.replace("{0}", time).replace("{1}", date)


def own_clock(locale: Locale, skeleton: str) -> str:
    """Write `H` for `h` in a skeleton where the locale tells time by 24 hours (CLDR's skeleton letter j)."""
    twelve = "hour of 12" in fields(locale.time_formats["short"].pattern)
    return skeleton if twelve or "B" in skeleton else skeleton.replace("h", "H")


def common_pattern(pair: Pair, skeleton: str) -> Phrase | None:
    """Return the patterns of a skeleton, if both locales have it and the source's determines the target's."""
    patterns = pair.both(lambda x: getattr(x.datetime_skeletons.get(own_clock(x, skeleton)), "pattern", ""))
    return patterns if all(patterns) and determines(*map(fields, patterns)) else None


def _skeletons(pair: Pair, weights: dict[str, float]) -> list[tuple[Phrase, float]]:
    styles = [(common_pattern(pair, skeleton), weight) for skeleton, weight in weights.items()]
    return [(patterns, weight) for patterns, weight in styles if patterns]


def _determined(styles: list[tuple[Phrase, float]]) -> list[tuple[Phrase, float]]:
    return [(style, weight) for style, weight in styles if determines(fields(style[0]), fields(style[1]))]


def rendered(pair: Pair, style: Phrase, value: datetime.date) -> Phrase:
    return pair.each(lambda pattern, x: apply_pattern(pattern, value, x), style)


def _date_key(value: datetime.date) -> tuple:
    """Return what makes two date styles look alike: the names, and whether zero padding shows."""
    return value.month, value.weekday(), value.day < 10


def _moment_key(value: datetime.datetime) -> tuple:
    return *_date_key(value), value.hour


def dates(pair: Pair) -> Draw:
    """Draw calendar dates: "Tuesday, March 5, 2024", "3/5/24", "Mar 5", "3rd quarter 1987"."""
    styles = Styles(date_styles(pair), partial(rendered, pair), key=_date_key)
    return lambda random: styles.draw(random, random_date(random))


def times(pair: Pair) -> Draw:
    """Draw times of day, alone, with a weekday or with a date: "3:05 PM", "Fri 17:20", "Mar 5, 2024, 3:05 PM"."""
    styles = Styles(_clock_styles(pair), partial(rendered, pair), key=_moment_key)
    return lambda random: styles.draw(random, random_moment(random))


def intervals(pair: Pair) -> Draw:
    """Draw intervals from one day, month, year or time to another: "Mar 5 – 8, 2024", "10:15 AM – 1:00 PM"."""
    cases = []
    for skeleton, differences in DATE_INTERVALS.items():
        usable = {d: weight for d, weight in differences.items() if _usable_interval(pair, (skeleton, skeleton), d, d)}
        cases += [((skeleton, skeleton, difference), weight) for difference, weight in usable.items()]
    for skeleton, weight in CLOCK_INTERVALS.items():
        names = pair.both(lambda x, s=skeleton: own_clock(x, s))
        if all(_usable_interval(pair, names, *ends) for ends in _clock_differences(pair, names)):
            cases.append(((*names, "clock"), weight))

    def render(case: tuple[str, str, str], ends: tuple) -> Phrase:
        """Write an interval; `case` is both skeletons and the greatest difference, which is worked out for times."""
        if case[2] == "clock":
            return _render_clock(pair, (case[0], case[1]), ends)
        return pair.each(lambda skeleton, x: _render_interval(x, skeleton, case[2], ends), case)

    # Only cases of one difference share their values, so only these can clash.
    by_difference: dict[str, list] = {}
    for case, weight in cases:
        by_difference.setdefault(case[2], []).append((case, weight))
    totals = [sum(weight for _, weight in group) for group in by_difference.values()]
    keys: dict[str, Callable[[tuple], Hashable]] = {"clock": lambda ends: (ends[0].hour, ends[1].hour)}
    groups: dict[str, Styles] = {
        difference: Styles(group, render, key=keys.get(difference, _ends_key))
        for difference, group in by_difference.items()
    }

    def draw(random: Random) -> Phrase | None:
        difference = random.choices(list(groups), totals)[0]
        return groups[difference].draw(random, _random_ends(random, difference))

    return draw


def _render_interval(locale: Locale, skeleton: str, difference: str, ends: tuple) -> str:
    """Write both ends by the two parts of CLDR's pattern (UTS 35, part 4, "intervalFormats")."""
    parts = locale.interval_formats[skeleton][difference]
    return "".join(apply_pattern(part, end, locale) for part, end in zip(parts, ends, strict=True))


def _render_clock(pair: Pair, skeletons: Phrase, ends: tuple[datetime.time, datetime.time]) -> Phrase:
    start, end = ends
    if start.hour == end.hour:
        if "m" not in skeletons[0]:
            return "", ""  # "from 9 to 9"
        differences = ["m", "m"]
    else:
        half = "a" if (start.hour < 12) != (end.hour < 12) else "h"
        differences = [half if "h" in skeleton else "H" for skeleton in skeletons]
    names = list(zip(skeletons, differences, strict=True))
    return pair.each(lambda name, x: _render_interval(x, *name, ends), names)


def _ends_key(ends: tuple[datetime.date, datetime.date]) -> tuple:
    return ends[0].month, ends[1].month, ends[0].day < 10, ends[1].day < 10


def _random_ends(random: Random, difference: str) -> tuple:
    if difference == "clock":
        first, last = sorted(random.sample(range(288), 2))  # steps of five minutes
        return tuple(datetime.time(step // 12, step % 12 * 5) for step in (first, last))
    start = random_date(random)
    if difference == "d":
        days = sorted(random.sample(range(1, 29), 2))
        return start.replace(day=days[0]), start.replace(day=days[1])
    day = random.randint(1, 28)
    if difference == "M":
        months = sorted(random.sample(range(1, 13), 2))
        return start.replace(month=months[0], day=start.day % 28 + 1), start.replace(month=months[1], day=day)
    years = random.randint(1, 10)
    end = start.replace(year=start.year + years, month=random.randint(1, 12), day=day)
    return start, end


def _clock_differences(pair: Pair, names: Phrase) -> list[Phrase]:
    """Return the pairs of greatest differences that one pair of times can have in the two locales."""
    sides = [["a", "h"] if "h" in name else ["H"] for name in names]
    differences = [(a, b) for a in sides[0] for b in sides[1] if not (len(sides[0]) == len(sides[1]) == 2 and a != b)]
    return differences + ([("m", "m")] if "m" in names[0] else [])


def _usable_interval(pair: Pair, names: Phrase, source_difference: str, target_difference: str) -> bool:
    """Say whether both locales have a pattern of two parts, and the source's shows all that the target's shows."""
    formats = (pair.source.interval_formats.get(names[0], {}), pair.target.interval_formats.get(names[1], {}))
    parts = (formats[0].get(source_difference, ()), formats[1].get(target_difference, ()))
    if len(parts[0]) != 2 or len(parts[1]) != 2:
        return False
    known = [frozenset().union(*(fields(part) for part in side)) for side in parts]
    if {"hour of 12", "half of day"} <= known[0]:  # "9 – 11 AM": one half of the day for both ends
        known[0] |= {"hour"}
    weekdays = [sum("weekday" in fields(part) for part in side) for side in parts]
    return determines(known[0], known[1]) and weekdays[0] >= weekdays[1]


NO_TERRITORIES = ("ZZ", "XA", "XB")  # unknown, pseudo-accents, pseudo-bidi
NO_LANGUAGES = ("und", "mul", "zxx", "mis")  # unknown, several, none, uncoded
LIST_STYLES = {"standard": 3.0, "or": 1.0}  # "and", "or"; weight in the draw
LISTED_UNITS = ("length-meter", "length-kilometer", "mass-kilogram", "volume-liter", "power-watt")
Join = Callable[[Random, list[Phrase]], Phrase | None]


@dataclass(frozen=True)
class Names:
    """The names in use: (source, target), unambiguous."""

    territories: list[Phrase]
    languages: list[Phrase]


def all_names(pair: Pair) -> Names:
    """Return all names that CLDR has in both locales.

    Without those that stand for a territory and a language with different translations ("Tokelau").
    """
    territories = common_names(dict(pair.source.territories), dict(pair.target.territories), NO_TERRITORIES)
    languages = common_names(dict(pair.source.languages), dict(pair.target.languages), NO_LANGUAGES)
    clear = set(unambiguous(territories + languages))
    return Names([name for name in territories if name in clear], [name for name in languages if name in clear])


def joiner(pair: Pair) -> Join:
    """Return a function that joins phrases to a list in both locales: "Peru, Chad, and Togo".

    It gives None where the two styles read alike.
    """

    def joined(style: str, items: list[Phrase]) -> Phrase:
        return join_phrases(pair, items, style)

    styles = Styles(LIST_STYLES.items(), joined, key=len)
    return lambda random, items: styles.draw(random, items)


def territories(pair: Pair, names: Names) -> Draw:
    """Draw two or three names of territories in a list: "Chad and Peru"."""
    join = joiner(pair)
    return lambda random: join(random, _sample(random, names.territories, (2, 2, 2, 3)))


def languages(pair: Pair, names: Names) -> Draw:
    """Draw languages in a list, or one as used in a territory: "Catalan or Swiss German", "Arabic (Chad)"."""
    join = joiner(pair)

    def used_in(random: Random) -> Phrase | None:
        # The form of babel's Locale.get_display_name; a name with brackets of its own would read badly.
        language, territory = random.choice(names.languages), random.choice(names.territories)
        if any(bracket in text for text in (*language, *territory) for bracket in "(（"):
            return None
        return f"{language[0]} ({territory[0]})", f"{language[1]} ({territory[1]})"

    def listed(random: Random) -> Phrase | None:
        return join(random, _sample(random, names.languages, (2, 2, 2, 3)))

    return lambda random: choose(random, [(listed, 2.0), (used_in, 1.0)])


def lists(pair: Pair) -> Draw:
    """Draw lists of two to four of a sort: weekdays, months, quarters, years, numbers, days, times, amounts."""
    join = joiner(pair)
    sorts: list[tuple[Callable[[Random], list[Phrase]], float]] = []
    for get, weight in ((get_day_names, 2.0), (get_month_names, 2.0), (get_quarter_names, 0.5)):
        source, target = (dict(get("wide", "stand-alone", locale=locale)) for locale in (pair.source, pair.target))
        if calendar := common_names(source, target):
            sorts.append((lambda random, calendar=calendar: _sample(random, calendar, (2, 2, 3, 3, 4)), weight))

    def counts(random: Random, low: int, high: int, spread: int, sizes: tuple[int, ...]) -> list[Phrase]:
        first = random.randint(low, high)
        return [(str(n), str(n)) for n in sorted(random.sample(range(first, first + spread), random.choice(sizes)))]

    sorts.append((lambda random: counts(random, 1, 95, 20, (2, 3, 4)), 1.0))
    sorts.append((lambda random: counts(random, 1900, 2060, 30, (2, 3)), 1.0))
    for skeleton in ("MMMMd", "hm"):
        if pattern := common_pattern(pair, skeleton):

            def moments(random: Random, pattern: Phrase = pattern) -> list[Phrase]:
                values = sorted(random_moment(random) for _ in range(2))
                return [rendered(pair, pattern, value) for value in values]

            sorts.append((moments, 1.0))
    units = [unit for unit in LISTED_UNITS if available(pair, unit, "short")]

    def amounts(random: Random) -> list[Phrase]:
        unit = random.choice(units)
        values = [random_decimal(random, 3, 1) for _ in range(random.choice((2, 2, 3)))]
        return [pair.both(lambda x, v=value: format_measure(v, unit, "short", x)) for value in values]

    sorts.append((amounts, 1.0))
    makers, weights = [make for make, _ in sorts], [weight for _, weight in sorts]
    return lambda random: join(random, random.choices(makers, weights)[0](random))


def _sample(random: Random, phrases: list[Phrase], sizes: tuple[int, ...]) -> list[Phrase]:
    return random.sample(phrases, min(random.choice(sizes), len(phrases)))


# How often a kind comes in training. Names have hundreds of entries to learn by heart, numbers a few rules.
KIND_WEIGHTS = {
    "date": 1.0, "time": 0.7, "interval": 1.0, "relative": 0.7, "number": 0.8, "unit": 1.5, "currency": 1.5,
    "list": 0.8, "territory": 1.7, "language": 2.8,
}  # fmt: skip
NAME_SHARE = 3  # each name of a kind stands alone once in training, in at most a third of the kind's phrases
MOST_MISSED_DRAWS = 300  # draws without a new phrase after which a kind counts as exhausted


class Pool:
    """Different phrases by kind, in the order in which they were drawn; a source has one target."""

    def __init__(self):
        self.kind_of: dict[Phrase, str] = {}
        self.count: Counter[str] = Counter()
        self._target_of: dict[str, str] = {}
        self._ambiguous: set[str] = set()

    def add(self, kind: str, phrase: Phrase | None) -> bool:
        """Add a phrase if it is new and usable, and say whether it was."""
        if phrase is None or phrase in self.kind_of or any("\n" in side or not side.strip() for side in phrase):
            return False
        if self._target_of.setdefault(phrase[0], phrase[1]) != phrase[1]:
            self._ambiguous.add(phrase[0])
            return False
        self.kind_of[phrase] = kind
        self.count[kind] += 1
        return True

    def phrases(self) -> list[Phrase]:
        """Return all phrases except those whose source was drawn with a second target."""
        return [phrase for phrase in self.kind_of if phrase[0] not in self._ambiguous]


def makers(pair: Pair) -> tuple[dict[str, Draw], Names]:
    """Return the function that draws a phrase of each kind, and the names that they draw from: as many as can stand
    alone in training and still be met in other phrases."""
    every, quotas = all_names(pair), shares(TRAIN_PAIRS, KIND_WEIGHTS)

    def some(kind: str, phrases: list[Phrase]) -> list[Phrase]:
        return Random(f"{SEED}:names:{kind}").sample(phrases, min(len(phrases), quotas[kind] // NAME_SHARE))

    used = Names(some("territory", every.territories), some("language", every.languages))
    draws = {
        "date": dates(pair),
        "time": times(pair),
        "interval": intervals(pair),
        "relative": spans(pair),
        "number": numbers(pair),
        "unit": measures(pair),
        "currency": money(pair),
        "list": lists(pair),
        "territory": territories(pair, used),
        "language": languages(pair, used),
    }
    return draws, used


def draw(pair: Pair) -> list[list[tuple[str, str, str]]]:
    """Return the rows (kind, source, target) of training, in the order in which they were drawn, validation and test.

    They share no source and no target. Every name in a test phrase also stands alone in training.
    """
    draws, used = makers(pair)
    quotas, pool = shares(TRAIN_PAIRS, KIND_WEIGHTS), Pool()
    for kind, phrases in (("territory", used.territories), ("language", used.languages)):
        for phrase in phrases:
            pool.add(kind, phrase)
    name_phrases = set(pool.kind_of)
    randoms = {kind: Random(f"{SEED}:{kind}") for kind in quotas}
    needed = {kind: quota + VALID_PER_KIND + HELD_OUT_PER_KIND for kind, quota in quotas.items()}
    while True:
        for kind in quotas:
            missed = 0
            while pool.count[kind] < needed[kind] and missed < MOST_MISSED_DRAWS:
                missed = 0 if pool.add(kind, draws[kind](randoms[kind])) else missed + 1
        sets = divide(pool, name_phrases)
        missing = TRAIN_PAIRS - len(sets[0])
        if missing <= 0:
            return [[(pool.kind_of[phrase], *phrase) for phrase in phrases] for phrases in sets]
        # Kinds that are exhausted, and phrases that proved ambiguous, are made up for by the others.
        plentiful = {kind: quotas[kind] for kind in quotas if pool.count[kind] >= needed[kind]}
        for kind, more in shares(missing, plentiful).items():
            needed[kind] = pool.count[kind] + more


def shares(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Divide `total` by weight into whole numbers (the largest remainders are rounded up)."""
    exact = {kind: total * weight / sum(weights.values()) for kind, weight in weights.items()}
    shares = {kind: int(value) for kind, value in exact.items()}
    for kind in sorted(exact, key=lambda kind: shares[kind] - exact[kind])[: total - sum(shares.values())]:
        shares[kind] += 1
    return shares


def divide(pool: Pool, name_phrases: set[Phrase]) -> tuple[list[Phrase], list[Phrase], list[Phrase]]:
    """Return training, validation and test phrases, the last two with as many of each kind, kinds taking turns.

    A phrase may be set aside when no other has its target, and when it isn't a name alone.
    """
    phrases = pool.phrases()
    targets = Counter(target for _, target in phrases)
    candidates: dict[str, list[Phrase]] = {kind: [] for kind in KIND_WEIGHTS}
    for phrase in phrases:
        if targets[phrase[1]] == 1 and phrase not in name_phrases:
            candidates[pool.kind_of[phrase]].append(phrase)
    for kind, phrases_of_kind in candidates.items():
        Random(f"{SEED}:aside:{kind}").shuffle(phrases_of_kind)
    turns = [candidates[kind][turn] for turn in range(VALID_PER_KIND + HELD_OUT_PER_KIND) for kind in KIND_WEIGHTS]
    valid, set_aside = VALID_PER_KIND * len(KIND_WEIGHTS), set(turns)
    return [phrase for phrase in phrases if phrase not in set_aside], turns[:valid], turns[valid:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pair", help="two locales, such as en-de")
    parser.add_argument("--first", type=int, help="only the first draws of each kind, to compare")
    options = parser.parse_args()
    pair = Pair(*map(Locale.parse, options.pair.split("-")))
    if options.first is None:
        sets = draw(pair)
    else:
        randoms = {kind: Random(f"{SEED}:{kind}") for kind in KIND_WEIGHTS}
        draws = [(kind, make(randoms[kind])) for kind, make in makers(pair)[0].items() for _ in range(options.first)]
        sets = [[(kind, *phrase) for kind, phrase in draws if phrase is not None]]
    text = "\n".join("".join("\t".join(row) + "\n" for row in rows) for rows in sets)
    sys.stdout.buffer.write(text.encode())


if __name__ == "__main__":
    main()
