"""Names of territories and languages, alone and combined, and lists by CLDR's list patterns."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from babel.dates import get_day_names, get_month_names, get_quarter_names

from .locales import Draw, Pair, Phrase, Styles, common_names, join_phrases, unambiguous
from .measures import available, format_measure
from .numbers import choose, random_decimal
from .times import common_pattern, random_moment, rendered

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

    styles: Styles = Styles(LIST_STYLES.items(), joined, key=len)
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

    return lambda random: choose(random, [(listed, 2.0), (used_in, 1.0 if names.territories else 0.0)])


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

    if units:
        sorts.append((amounts, 1.0))
    makers, weights = [make for make, _ in sorts], [weight for _, weight in sorts]
    return lambda random: join(random, random.choices(makers, weights)[0](random))


def _sample(random: Random, phrases: list[Phrase], sizes: tuple[int, ...]) -> list[Phrase]:
    return random.sample(phrases, min(random.choice(sizes), len(phrases)))
