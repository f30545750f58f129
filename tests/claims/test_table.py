"""The table of claims: every number is what the code computes, every figure is drawn, every name leads somewhere."""

import ast
import base64
import inspect
import io
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from claims import cost, drawing, index, table
from claims.row import RECORDED, Row, above, below, dotted, equal
from imports import ROOT

from mlx_transformer.system.errors import UserError

SHOWN = {row.picture: row for row in table.ROWS.values() if row.shown}
LATER = () if "MUTATED" in os.environ else pytest.mark.slow
"""In `make test-slow`, and where a mechanism of the row is taken out (tests/mutations/claim_run.py)."""
TRAINS = {22, 26, 41}  # for seconds
COMPUTED = [
    pytest.param(number, marks=pytest.mark.slow if row.slow else LATER if number in TRAINS else ())
    for number, row in table.ROWS.items()
    if not row.trained
]
PICTURED = {table.ROWS[number].picture: number for number in index.shown()}
WRITTEN = [
    pytest.param(name, marks=pytest.mark.slow if row.slow else LATER if i % 3 or row.number in TRAINS else ())
    for i, (name, row) in enumerate(SHOWN.items())
]
"""Those on a page are what is committed, words, curves and all."""


@cache
def found(number: int) -> dict[str, tuple[float, ...]]:
    return table.computed(table.ROWS[number])


@pytest.mark.parametrize("number", COMPUTED)
def test_the_numbers_hold(number: int) -> None:
    row, numbers = table.ROWS[number], found(number)
    assert numbers.keys() == row.numbers.keys()
    for name, claimed in row.numbers.items():
        assert claimed.holds(numbers[name]), f"{name}: claimed {claimed.text()}, found {numbers[name]}"


@pytest.fixture(scope="module")
def made(model) -> Callable[[str], Any]:
    """made(name): the figure or the table of this name, made once, in the style of the figures."""

    @cache
    def shown(name: str) -> Any:
        row = SHOWN[name]
        assert row.shown is not None
        with drawing.style():
            return table.called(row.shown, *([model] if row.trained else []))

    return shown


@pytest.mark.parametrize("name", WRITTEN)
def test_every_figure(name: str, made) -> None:
    """In this file because some take a training that the numbers take as well."""
    figure = made(name)
    with drawing.style():
        assert isinstance(figure, drawing.Table) == (SHOWN[name].figure is None)
        if isinstance(figure, drawing.Table):
            assert {len(row) for row in figure.rows} == {len(figure.head)}
            figure = drawing.as_figure(figure)
        text = drawing.inline_svg(figure, "f1", "a < b")
    if name in PICTURED:
        committed = (index.PICTURES / f"{PICTURED[name]:02}.svg").read_text(encoding="utf-8")
        assert moved(committed, drawing.both_palettes(text)) <= TOLERANCE
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "a < b"
    assert "<text" in text
    assert not [color for color in drawing.PAGE_COLOURS if color in text]
    assert set(re.findall(r'\bid="([^-"]+)', text)) == {"f1"}
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', text)) <= set(re.findall(r'\bid="([^"]+)', text))
    assert len(text) < 120_000


TOLERANCE = 1.0
"""Points of 1/72 inch: what other machines' last digits move."""
ROUNDING = re.compile(r"\b(\d(\.\d+)?e-0[678]|0\.0e\+00)\b")
"""What float32 leaves of a zero, which each BLAS rounds in its own way."""
COLOUR = 0.01
"""Of a picture's mean, where black is 0 and white 1."""


def moved(committed: str, fresh: str) -> float:
    """How far the outline of any path of a picture lies from where it is drawn now. The words must be the same."""
    old, new = (ElementTree.fromstring(text) for text in (committed, fresh))
    words = [[ROUNDING.sub("0", "".join(node.itertext())) for node in root.iter(f"{SVG}text")] for root in (old, new)]
    assert words[0] == words[1]
    boxes = [[_box(path.get("d", "")) for path in root.iter(f"{SVG}path")] for root in (old, new)]
    assert [len(box) for box in boxes[0]] == [len(box) for box in boxes[1]]
    for one, other in zip(*(_images(root) for root in (old, new)), strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).mean() < COLOUR
    return max((abs(a - b) for old, new in zip(*boxes, strict=True) for a, b in zip(old, new, strict=True)), default=0)


SVG = "{http://www.w3.org/2000/svg}"


def _images(root: ElementTree.Element) -> list[np.ndarray]:
    """The pixels of what is drawn as such: maps of weights, strips of numbers."""
    from matplotlib.image import imread

    links = (
        node.get("href") or node.get("{http://www.w3.org/1999/xlink}href") or "" for node in root.iter(f"{SVG}image")
    )
    return [imread(io.BytesIO(base64.b64decode(link.partition(",")[2]))) for link in links]


def _box(d: str) -> list[float]:
    """Left, right, top and bottom of a path without curves; nothing for one with them."""
    if re.search("[CQAS]", d):
        return []
    numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", d)]
    return [min(numbers[0::2]), max(numbers[0::2]), min(numbers[1::2]), max(numbers[1::2])] if numbers else []


def test_a_picture_that_changed_is_seen() -> None:
    old = (index.PICTURES / "10.svg").read_text(encoding="utf-8")
    assert moved(old, old) == 0
    place = re.search(r'<path d="M ([\d.]+) ', old[old.index("line2d") :])
    assert place is not None
    assert moved(old, old.replace(place[1], f"{float(place[1]) + 3}")) > TOLERANCE
    with pytest.raises(AssertionError):
        moved(old, old.replace("249.10", "249.20"))


def test_every_picture_is_shown_and_no_other() -> None:
    assert sorted(int(path.stem) for path in index.PICTURES.glob("*.svg")) == sorted(PICTURED.values())


def test_bytes_and_times_stand_at_their_names() -> None:
    """In the figure and the table that no page shows, since they have this machine's times."""
    memory = table.called(cost.draw_growth).axes[0]
    for label, slope in (("weights of a head, slope 2", 2), ("activations, slope 1", 1)):
        [line] = [line for line in memory.lines if line.get_label() == label]
        np.testing.assert_allclose(np.diff(np.log(line.get_ydata())) / np.diff(np.log(line.get_xdata())), slope)
    (here,) = cost.powers_of_two().values()
    rows = dict(cost.list_by_machine().rows)
    assert rows == {"this machine, now": f"{here:.2f}"} | {
        machine: ", ".join(f"{ratio:.2f}" for ratio in ratios) for machine, ratios in cost.MACHINES.items()
    }


@pytest.mark.parametrize(
    ("claimed", "right", "wrong"),
    [
        (equal(1, 2, within=0.1), (1.05, 1.95), (1.05, 2.15)),
        (equal(1), (1.0,), (1.0, 1.0)),
        (below(3), (2.9,), (3.0,)),
        (above(3, 0), (3.1, 0.1), (3.1, 0.0)),
        (equal(0), (0.0,), (float("nan"),)),
    ],
)
def test_what_is_claimed_can_be_wrong(claimed, right, wrong) -> None:
    assert claimed.holds(right)
    assert not claimed.holds(wrong)
    assert RECORDED.holds(right)
    assert not RECORDED.holds([float("inf")])


NUMBER = re.compile(r"(?<![\w.^])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def numbers_in(text: str) -> set[float]:
    return {float(number.rstrip(",").replace(",", "")) for number in NUMBER.findall(text)}


def unproved(row: Row) -> set[float]:
    """Numbers of what a row says that it neither claims of what it computes nor names as the notes' own."""
    proved = {value for claimed in row.numbers.values() for value in claimed.values}
    said = f"{row.claim} {row.missing} {row.slip}"
    return numbers_in(said) - proved.union(*map(numbers_in, row.numbers))


@pytest.mark.parametrize("row", table.ROWS.values(), ids=lambda row: str(row.number))
def test_the_numbers_that_a_row_says_are_its_own(row: Row) -> None:
    assert not unproved(row)


def test_a_number_from_nowhere_is_seen() -> None:
    row = table.ROWS[16]
    assert unproved(replace(row, claim=f"{row.claim} In 17 of 18.")) == {17, 18}
    assert unproved(replace(row, slip=row.slip.replace("0.00642", "0.00643"))) == {0.00643}
    assert unproved(replace(row, slip="They have 6,116 rows, not 1.001, -3 or 2e-5.")) == {6116, -3, 2e-5}


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", table.ROWS.values(), ids=lambda row: str(row.number))
def test_every_name_of_a_row_leads_somewhere(row) -> None:
    for symbol in row.symbols:
        found = sys.modules[symbol.__module__]
        for part in symbol.__qualname__.split("."):
            found = getattr(found, part)
        assert found is symbol, dotted(symbol)
    assert row.symbols
    assert not (row.figure and row.table)
    if row.shown:
        assert row.shown.__name__ == f"{'draw' if row.figure else 'list'}_{row.picture}"
    assert row.tests
    for test in row.tests:
        file, _, name = test.partition("::")
        assert name in functions(file), test


def test_rows_are_chosen_by_number_and_range() -> None:
    def numbers(*names):
        return [row.number for row in table.chosen(names)]

    assert list(table.ROWS) == sorted(table.ROWS)
    assert numbers() == [number for number, row in table.ROWS.items() if not row.slow]
    assert numbers("45") == [45]
    assert numbers("7", "2-4") == [2, 3, 4, 7]
    for wrong in ("0", "57", "99", "x", "-3", "2-99", "1.5", "²"):
        with pytest.raises(UserError, match="claims "):
            table.chosen([wrong])


def _stems(text: str) -> set[str]:
    return {word[:5] for word in re.findall("[a-z]{3,}", text.lower())}


def test_a_caption_says_what_its_row_is_about() -> None:
    """It shares more words with its own row than with any other, rare words counting more: exchanged ones are seen."""
    about = {
        number: _stems(" ".join([row.claim, row.formula, row.picture.replace("_", " "), *row.numbers,
                                 inspect.getdoc(row.shown) or ""]))
        for number, row in ((number, table.ROWS[number]) for number in index.shown())
    }  # fmt: skip
    rows_with = Counter(word for words in about.values() for word in words)

    def shared(label: str, number: int) -> float:
        return sum(math.log(len(about) / rows_with[word]) + 0.1 for word in _stems(label) & about[number])

    for number, label in index.shown().items():
        best = max(about, key=lambda other: (shared(label, other), other == number))
        assert best == number, f"the caption of row {number}, {label!r}, says more of row {best}"
