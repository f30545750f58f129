"""axe-core finds no barrier in the pages of `explain`, `claims` and a site with taps: as they open, with a head
enlarged, in the tour, with all that unfolds, and broken. Texts and lines of figures stand out in their photographs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assemble.captions import within
from cases import HERE, SECONDS, served
from explained_models import write_explained
from imports import ROOT
from PIL import Image
from test_inside_page import translating_site

from export.explain.command import explain
from mlx_transformer import page as kit
from mlx_transformer.cli import main

pytestmark = pytest.mark.consumers

ARCHITECTURES = ("encoder-decoder", "decoder", "encoder")
WALKED = (".gl", "#norm .numbers summary", "#tour-start")  # a word of the glossary, numbers as a table, the tour
PLAYED = ("#tour [data-tour=stop]", "#cell .sum summary", "#search .body summary", "[data-off=residual]", "#try-all")
OPENED = (*WALKED, PLAYED[0], "#more .chip", "#more .map", "dialog summary")  # and a head enlarged
SCREENS = 6  # light and dark, of a screen, a tablet and a phone


def asked(pages: list[tuple[Path | str, tuple[str, ...]]], folder: Path) -> list[dict[str, Any]]:
    """What was found in each page, which is shown in every state."""
    return answered("with_axe.mjs", [{"page": str(page), "opened": opened} for page, opened in pages], folder)


def answered(script: str, tasks: list[dict[str, Any]], folder: Path) -> list[Any]:
    folder.mkdir()
    (folder / "tasks.json").write_text(json.dumps(tasks), encoding="utf-8")
    command = ["node", str(HERE / "node" / script), str(folder / "tasks.json"), str(folder / "answers.json")]
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


def luminance(colours: np.ndarray) -> np.ndarray:
    """Of WCAG 2.2, of colours (..., 3) from 0 to 255."""
    share = colours / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


def ground_of(pixels: np.ndarray) -> np.ndarray:
    colours, counts = np.unique(pixels.reshape(-1, 3) @ [65536, 256, 1], return_counts=True)
    commonest = int(colours[counts.argmax()])
    return np.array([commonest >> 16, commonest >> 8 & 255, commonest & 255])


def contrast(pixels: np.ndarray, ground: np.ndarray) -> float:
    """The largest of any pixel with the ground."""
    if not pixels.size:
        return 0.0
    light = np.stack([luminance(pixels.reshape(-1, 3)), np.broadcast_to(luminance(ground), pixels.size // 3)])
    return float(((light.max(axis=0) + 0.05) / (light.min(axis=0) + 0.05)).max())


def faint(photographs: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Texts below 4.5 and lines below 3."""
    found = []
    for each in photographs:
        pixels, scale = np.asarray(Image.open(each["picture"]).convert("RGB")).astype(np.int64), each["scale"]
        for text in each["texts"]:
            x, y, width, height = (scale * length for length in text["box"])
            box = pixels[max(0, int(y)) : int(y + height) + 1, max(0, int(x)) : int(x + width) + 1]
            if (share := contrast(box, ground_of(box))) < 4.5:
                found.append((each["scheme"], each["figure"], text["text"], round(share, 2)))
        ground = ground_of(pixels)
        for line in each["lines"]:
            spots = [(int(scale * x), int(scale * y)) for x, y in line["points"]]
            share = max(contrast(pixels[max(0, y - 3) : y + 4, max(0, x - 3) : x + 4], ground) for x, y in spots)
            if share < 3:
                found.append((each["scheme"], each["figure"], line["stroke"], round(share, 2)))
    return found


FAINT = """<figure style="background: #fff"><svg width="200" height="80" aria-label="faint">
<text x="9" y="20" style="fill: #666">read</text><text x="9" y="40" style="fill: #8a8a8a">missed</text>
<path d="M9 60h90" stroke="#aaa"/><path d="M9 70h90" stroke="#666"/></svg></figure>"""


def test_texts_and_lines_of_figures_stand_out(tmp_path: Path) -> None:
    """In photographs of the walk and of each figure of the claims, light and dark."""
    explain(out=tmp_path / "walk.html")
    files = sorted((ROOT / "docs/pictures/claims").glob("*.svg"))
    drawn = "".join(kit.card(within(file.read_text(encoding="utf-8"), f"f{file.stem}", file.stem)) for file in files)
    (tmp_path / "claims.html").write_text(kit.page("claims", "figures", drawn), encoding="utf-8")
    (tmp_path / "faint.html").write_text(kit.page("claims", "faint", FAINT), encoding="utf-8")
    figures = {"walk": "#lanes .picture, .station svg, .station .map", "claims": "svg", "faint": "svg"}
    tasks = [{"page": str(tmp_path / f"{name}.html"), "figures": selector} for name, selector in figures.items()]
    walk, claims, seen = answered("with_contrast.mjs", tasks, tmp_path / "asked")
    assert [each[2] for each in faint(seen)] == ["missed", "rgb(170, 170, 170)"] * 2
    assert len(claims) == 2 * len(files)
    assert len(walk) > 30
    assert faint(walk + claims) == []
