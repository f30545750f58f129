"""Numbers and money, by CLDR's number patterns, symbols, compact forms and plural rules."""

from decimal import Decimal
from random import Random
from typing import Literal

from babel import Locale
from babel.core import get_global
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

from .locales import Draw, Pair, Phrase, Styles, common_names

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
        return pair.both(lambda x: format_compact(value, length, x))

    lengths: Styles[Decimal, Length] = Styles([("long", 1.0), ("short", 1.0)], render_compact, key=lambda v: v)

    def compact(random: Random) -> Phrase | None:
        return lengths.draw(random, _round_number(random))

    return lambda random: choose(random, [(decimal, 3.0), (percent, 1.5), (scientific, 1.0), (compact, 2.0)])


def _round_number(random: Random) -> Decimal:
    """Draw two or three digits and a power of ten, 1000 or more, so that no compact form has to round it."""
    digits = random.randint(10, 99) if random.random() < 0.7 else random.randint(100, 999)
    return Decimal(digits).scaleb(random.choice(COMPACT_POWERS) - (1 if digits < 100 else 2))


def format_compact(value: Decimal, length: Length, locale: Locale) -> str:
    """Write `value` in compact form, in the short one where the locale has no long one (an alias in CLDR's root).

    Six fraction digits: a locale that counts by 10^4 or 10^5 needs more of them than one that counts by 10^3.
    """
    known: Length = length if length in locale.compact_decimal_formats else "short"
    if known not in locale.compact_decimal_formats:
        return ""
    return format_compact_decimal(value, format_type=known, locale=locale, fraction_digits=6)


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
        return random.choice(major if major and random.random() < 0.6 else codes)

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

    def compact(random: Random) -> Phrase | None:
        if any("short" not in x.compact_currency_formats for x in (pair.source, pair.target)):
            return None
        currency, value = random.choice(major or codes), _round_number(random)
        return pair.both(lambda x: format_compact_currency(value, currency, locale=x, fraction_digits=6))

    return lambda random: choose(random, [(symbol, 2.0), (name, 3.0), (compact, 1.0)]) if codes else None


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
