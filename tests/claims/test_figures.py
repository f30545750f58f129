"""The page of claims stands by itself; figures are written beside it."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from claims.command import claims

from mlx_transformer.system.errors import UserError

DRAWN = ["14", "43", "18", "35"]
"""Rows with two that share a figure, and one whose figure is a table."""


class Tags(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes) -> None:
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href"):
                self.links.append(value)


def test_page_and_folder(tmp_path: Path, capsys) -> None:
    page, folder = tmp_path / "made" / "page.html", tmp_path / "figures"
    claims(DRAWN, str(page), str(folder), False)
    text = page.read_text(encoding="utf-8")
    tags = Tags(text)
    assert len(tags.ids) == len(set(tags.ids))
    assert {f"row-{number}" for number in DRAWN} <= set(tags.ids)
    for link in tags.links:
        assert link.startswith("data:image/png;base64,") or (link[0] == "#" and link[1:] in tags.ids), link
    assert not re.search(r"url\((?!#)|@import|<script", text)
    assert text.count("<svg") == 2
    assert "does not hold" not in text
    names = [f"{start}.{kind}" for start in FILES for kind in ("png", "svg")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    for path in folder.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    assert f"{page}: 4 rows" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in folder.glob("*.svg")}
    for argument in ((str(page), None), (None, str(folder))):
        with pytest.raises(UserError, match="--force"):
            claims(DRAWN, *argument, False)
    claims(["14"], None, str(folder), True)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".svg"} == {
        "14-worked-sums.svg": before["14-worked-sums.svg"]
    }


FILES = ("14-worked-sums", "18-saturation", "35-contextual")


def test_without_matplotlib_the_numbers_are_there(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    claims(["7"], None, None, False)
    assert "sin 1, sin 2, sin 3" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"figures need matplotlib: pip install"):
        claims(["7"], str(tmp_path / "page.html"), None, False)
    assert not list(tmp_path.iterdir())


def test_rows_without_a_figure_make_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of these rows has a figure"):
        claims(["4"], None, str(tmp_path / "figures"), False)
    assert not list(tmp_path.iterdir())
