"""axe-core finds no barrier in the pages of `explain`, `claims` and a site with taps: as they open, with a head
enlarged, in the tour, with all that unfolds, and broken."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cases import HERE, SECONDS, served
from explained_models import write_explained
from test_inside_page import translating_site

from export.explain.command import explain
from mlx_transformer.cli import main

pytestmark = pytest.mark.consumers

ARCHITECTURES = ("encoder-decoder", "decoder", "encoder")
WALKED = (".gl", "#norm .numbers summary", "#tour-start")  # a word of the glossary, numbers as a table, the tour
PLAYED = ("#tour [data-tour=stop]", "#cell .sum summary", "#search .body summary", "[data-off=residual]", "#try-all")
OPENED = (*WALKED, PLAYED[0], "#more .chip", "#more .map", "dialog summary")  # and a head enlarged
SCREENS = 6  # light and dark, of a screen, a tablet and a phone


def asked(pages: list[tuple[Path | str, tuple[str, ...]]], folder: Path) -> list[dict[str, Any]]:
    """What was found in each page, which is shown in every state."""
    folder.mkdir()
    tasks = [{"page": str(page), "opened": opened} for page, opened in pages]
    (folder / "tasks.json").write_text(json.dumps(tasks), encoding="utf-8")
    command = ["node", str(HERE / "node" / "with_axe.mjs"), str(folder / "tasks.json"), str(folder / "answers.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answers.json").read_text(encoding="utf-8"))


def test_explain(tmp_path: Path) -> None:
    pages = []
    for architecture in ARCHITECTURES:
        place = write_explained(tmp_path / architecture, architecture)
        page = tmp_path / f"{architecture}.html"
        beam = {} if architecture == "encoder" else {"beam": 3, "max_new_tokens": 6}
        explain(place / "onnx", ["one two three."], beside=str(place / "model"), out=page, **beam)
        pages.append((page, OPENED))
    for architecture, found in zip(ARCHITECTURES, asked(pages, tmp_path / "asked"), strict=True):
        assert found["checks"] == SCREENS * (1 + len(OPENED))
        assert found["violations"] == [], architecture
        assert found["problems"] == [], architecture


def test_the_walk(tmp_path: Path) -> None:
    page = tmp_path / "walk.html"
    explain(out=page)
    states = (*WALKED, *PLAYED)
    [found] = asked([(page, states)], tmp_path / "asked")
    assert (found["checks"], found["violations"], found["problems"]) == (SCREENS * (1 + len(states)), [], [])


def test_a_site_with_taps(tmp_path: Path) -> None:
    """The graphs' points stand beside those of the page's own engine."""
    states = ("#beside summary", *WALKED[:2])
    with served(translating_site(tmp_path)) as origin:
        [found] = asked([(f"{origin}/inside.html", states)], tmp_path / "asked")
    assert (found["checks"], found["violations"], found["problems"]) == (SCREENS * (1 + len(states)), [], [])


def test_claims(tmp_path: Path) -> None:
    page = tmp_path / "claims.html"
    assert not main(["claims", "--out", str(page)])
    [found] = asked([(page, ())], tmp_path / "asked")
    assert (found["checks"], found["violations"], found["problems"]) == (SCREENS, [], [])


def test_a_barrier_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<!doctype html><html lang="en"><title>x</title><main><h1>x</h1><button></button></main>')
    [found] = asked([(page, ())], tmp_path / "asked")
    assert len(found["violations"]) == SCREENS
    assert any(each.startswith("light, screen, at first: button-name: button: ") for each in found["violations"])
