"""The claims as text, as a page and as files."""

import re
from pathlib import Path

import pytest
from claims.command import claims
from claims.formula import as_html
from claims.index import written
from claims.table import ROWS

from mlx_transformer.system.errors import UserError

README = Path(__file__).parents[2] / "docs" / "claims" / "README.md"


def test_the_index_is_made_of_the_rows() -> None:
    text = README.read_text(encoding="utf-8")
    assert written(text) == text, "run PYTHONPATH=docs python -m claims.index"
    assert [
        int(n) for n in re.findall(r"^\| <a id=.row-\d+.></a>(\d+) \| .* \| .* \| .* \| .* \|$", text, re.MULTILINE)
    ] == list(ROWS)


def test_text_of_rows(capsys) -> None:
    claims(["7", "43"], None, None, False)
    printed = capsys.readouterr().out
    for number in (7, 43):
        assert ROWS[number].claim in printed
        assert ROWS[number].formula in printed
        for name, claimed in ROWS[number].numbers.items():
            assert name in printed
            assert f"({claimed.text()})" in printed
    assert "= CAT at 5" in printed  # the table of row 43
    assert "tests/claims/test_positions.py::test_rejected_a_single_sine" in printed
    assert "DOES NOT HOLD" not in printed


def test_rows_of_a_trained_model_say_that_there_is_none(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    claims(["36"], None, None, False)
    assert (
        "needs a trained model: make quickstart, or --model RUN (there is no quickstart/ here)"
        in capsys.readouterr().out
    )
    with pytest.raises(UserError, match="no such folder"):
        claims(["36"], None, None, False, model=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("formula", "html"),
    [
        ("w_j = 10000^(-2j/d)", "w<sub>j</sub> = 10000<sup>-2j/d</sup>"),
        ("w_(d/2-1) < x^2", "w<sub>d/2-1</sub> &lt; x<sup>2</sup>"),
        ("y_(<t) & h_(t-1)", "y<sub>&lt;t</sub> &amp; h<sub>t-1</sub>"),
        ("10^(-j/(d/2-1)) (a)", "10<sup>-j/(d/2-1)</sup> (a)"),
    ],
)
def test_formulas_as_html(formula: str, html: str) -> None:
    assert as_html(formula) == html
    for row in ROWS.values():
        assert not re.search(r"[_^][(\w]", as_html(row.formula)), row.number


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.html", tmp_path / "figures"
    page.write_text("mine", encoding="utf-8")
    folder.mkdir()
    (folder / "mine.txt").touch()
    for force in (False, True):
        with pytest.raises(UserError, match="holds no page of claims"):
            claims(["7"], str(page), None, force)
        with pytest.raises(UserError, match="holds files that are no folder of figures"):
            claims(["7"], None, str(folder), force)
    with pytest.raises(UserError, match="is a folder"):
        claims(["7"], str(folder), None, True)
    assert page.read_text(encoding="utf-8") == "mine"
