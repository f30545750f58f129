"""What the built-in corpus formats: dates, names, measures, numbers; what is ambiguous is left out."""

import random
from decimal import Decimal

import pytest
from babel import Locale

from mlx_transformer.data.cldr import parse_corpus
from mlx_transformer.data.cldr.locales import Styles, common_names, determines, fields, join_list, unambiguous
from mlx_transformer.data.cldr.measures import format_measure, format_relative
from mlx_transformer.data.cldr.names import all_names
from mlx_transformer.data.cldr.numbers import currencies_in_use, random_decimal
from mlx_transformer.data.cldr.times import date_styles, own_clock

EN, DE = Locale.parse("en"), Locale.parse("de")


def test_what_a_pattern_tells():
    assert fields("EEEE, MMMM d, y G") == {"weekday", "month", "day", "year"}
    assert fields("dd.MM.yy") == {"day", "month", "year of century"}
    assert fields("h:mm a") == {"hour of 12", "half of day", "minute", "hour"}
    assert fields("'week' w 'of' Y") == {"w", "Y"}
    assert determines(fields("M/d/y"), fields("dd.MM.yy"))
    assert not determines(fields("M/d/yy"), fields("dd.MM.y"))
    assert not determines(fields("HH:mm"), fields("HH:mm:ss"))
    assert not determines(fields("h:mm"), fields("HH:mm"))
    assert determines(fields("HH:mm"), fields("h:mm a"))
    assert not determines(fields("d. MMM"), fields("E, MMM d"))
    assert not determines(fields("'week' w 'of' Y"), fields("'Woche' w 'des' 'Jahres' Y"))


@pytest.mark.parametrize(
    "corpus_name", ["cldr:en-de", "cldr:de-en", "cldr:en-fr", "cldr:fr-en", "cldr:ja-en", "cldr:ar-pt_BR"]
)
def test_no_date_style_tells_more_in_the_target(corpus_name):
    styles = [style for style, _ in date_styles(parse_corpus(corpus_name))]
    assert len(styles) >= 8
    for source, target in styles:
        assert determines(fields(source), fields(target)), (source, target)
    # French writes the short date with the full year, English with two digits.
    if corpus_name == "cldr:en-fr":
        assert ("M/d/yy", "dd/MM/y") not in styles
    if corpus_name == "cldr:fr-en":
        assert ("dd/MM/y", "M/d/yy") in styles


def test_clashing_styles_are_left_out_value_by_value():
    def render(style, month):
        return {"long": ("May" if month == 5 else "June", "mai"), "short": ("May" if month == 5 else "Jun", "m.")}[
            style
        ]

    styles = Styles([("long", 1.0), ("short", 1.0)], render, key=lambda month: month)
    rng = random.Random(0)
    assert {styles.draw(rng, 5) for _ in range(50)} == {("May", "mai")}
    assert {styles.draw(rng, 6) for _ in range(50)} == {("June", "mai"), ("Jun", "m.")}


def test_names_that_are_codes_or_ambiguous_are_left_out():
    assert common_names(
        {"AA": "Aland", "BB": "BB", "CC": "Twin", "DD": "Twin", "EE": "", "ZZ": "Nowhere"},
        {"AA": "Åland", "BB": "B-Land", "CC": "Eins", "DD": "Zwei", "EE": "E", "ZZ": "Nirgends"},
        skip=("ZZ",),
    ) == [("Aland", "Åland")]
    assert unambiguous([("a", "b"), ("c", "d"), ("a", "b"), ("c", "e")]) == [("a", "b")]


def test_names_of_both_kinds_that_read_alike_are_left_out():
    # In English "Tokelau" is a territory and its language; in German the language is Tokelauanisch.
    assert EN.territories["TK"] == EN.languages["tkl"] == "Tokelau"
    assert DE.languages["tkl"] == "Tokelauanisch"
    every = all_names(parse_corpus("cldr:en-de"))
    assert "Tokelau" not in {source for source, _ in every.territories + every.languages}
    assert len(unambiguous(every.territories + every.languages)) == len(every.territories + every.languages)


def test_clocks():
    assert (own_clock(EN, "hm"), own_clock(DE, "Ehm"), own_clock(DE, "Bhm")) == ("hm", "EHm", "Bhm")


def test_measures_follow_plural_rules():
    assert format_measure(1, "length-kilometer", "short", DE) == "1 km"  # the plural form that German leaves out
    assert format_measure(Decimal("1.5"), "length-mile", "long", EN) == "1.5 miles"
    assert format_measure(1, "length-mile", "long", EN) == "1 mile"
    assert format_measure(5, "mass-gram", "long", DE, per="volume-liter") == "5 Gramm pro Liter"
    russian = Locale.parse("ru")
    assert [format_measure(n, "duration-day", "long", russian) for n in (1, 3, 5)] == ["1 день", "3 дня", "5 дней"]


def test_relative_times():
    assert format_relative(1, "day", "long", EN) == "in 1 day"
    assert format_relative(-3, "week", "long", DE) == "vor 3 Wochen"
    assert format_relative(-2, "year", "short", DE) == "vor 2 Jahren"  # no short form of its own


def test_lists():
    assert join_list(["a", "b", "c"], "standard", EN) == "a, b, and c"
    assert join_list(["a", "b"], "or", DE) == "a oder b"
    assert join_list(["a", "b", "c", "d"], "unit-short", DE) == "a, b, c und d"
    assert join_list(["{0}", "{1}"], "standard", EN) == "{0} and {1}"  # braces in an item are text
    assert join_list(["a"], "standard", EN) == "a"


def test_random_decimals_show_what_plural_rules_see():
    rng = random.Random(1)
    values = [random_decimal(rng, 4, 3) for _ in range(500)]
    assert all(v == v.to_integral_value() or str(v)[-1] != "0" for v in values)
    assert any(v != v.to_integral_value() for v in values)
    assert max(values) < 10_000


def test_currencies_are_those_in_use():
    codes = currencies_in_use()
    assert codes == sorted(codes)
    assert {"EUR", "USD", "JPY"} <= set(codes)
    assert not {"DEM", "FRF", "XAU"} & set(codes)
    assert 130 < len(codes) < 180
