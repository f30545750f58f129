"""Dates, times of day and intervals, by the CLDR patterns of both locales."""

import datetime
from collections.abc import Callable, Hashable
from functools import partial
from random import Random

from babel import Locale

from .locales import Draw, Pair, Phrase, Styles, apply_pattern, determines, fields

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
    """Return the patterns of those skeletons that can be used."""
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

    return draw if groups else lambda random: None


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
