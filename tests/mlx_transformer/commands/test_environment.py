"""What the environment says of a terminal, which anybody may set to anything."""

from __future__ import annotations

import os

import pytest

from mlx_transformer.system.process import run


@pytest.mark.parametrize("name", ["COLUMNS", "TERMINAL_WIDTH"])
@pytest.mark.parametrize("width", ["9999999", "\u00b2", "wide", "9" * 5000, ""])
def test_a_width_that_no_terminal_has_is_none(monkeypatch, name, width):
    monkeypatch.setenv(name, width)
    seen = []
    assert run("program", lambda: seen.append(os.environ.get(name)), whole=False) == 0
    assert seen == [None]


def test_the_width_of_a_terminal_stays(monkeypatch):
    monkeypatch.setenv("COLUMNS", "132")
    seen = []
    assert run("program", lambda: seen.append(os.environ.get("COLUMNS")), whole=False) == 0
    assert seen == ["132"]
