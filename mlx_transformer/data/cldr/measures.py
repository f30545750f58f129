"""Measures and spans of time, by CLDR's unit patterns and plural rules: "12.5 km/h", "3 days ago"."""

from collections.abc import Sequence
from decimal import Decimal
from random import Random

from babel import Locale
from babel.numbers import format_decimal

from .locales import Draw, Pair, Phrase, Styles, join_phrases
from .numbers import choose, random_decimal

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
LIST_STYLES = {"long": "unit", "short": "unit-short", "narrow": "unit-narrow"}
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
    share = 0.2 * sum(w for _, w in simple) / sum(w for _, w in rates) if rates and simple else 1.0
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

    single: Styles = Styles(styles, render, key=lambda value: value)

    def relative(random: Random) -> Phrase | None:
        direction = random.choices((1, -1, 0), (4, 4, 1))[0]
        return single.draw(random, (random_count(random, random.choice((12, 60, 120))), direction))

    def render_mixed(length: str, value: Sequence[tuple[str, int]]) -> Phrase:
        parts = [measure(f"duration-{unit}", length, count) for unit, count in value]
        if not all(source for source, _ in parts):
            return "", ""
        return join_phrases(pair, parts, LIST_STYLES[length])

    lengths: Styles = Styles(LENGTHS.items(), render_mixed, key=lambda value: tuple(unit for unit, _ in value))

    def mixed(random: Random) -> Phrase | None:
        units = random.choice(MIXED_SPANS)
        return lengths.draw(random, [(unit, random_count(random, limit)) for unit, limit in units])

    return lambda random: choose(random, [(relative, 3.0), (mixed, 2.0)])
