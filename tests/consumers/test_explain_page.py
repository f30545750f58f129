"""A page of `explain` in headless Chromium: it draws all it has, follows a word, opens a head; nothing goes wrong."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from explained_models import write_explained
from waiting import PATIENCE

from export.explain.command import explain

pytestmark = pytest.mark.consumers

CHROMIUM = os.environ.get("CHROMIUM", "chromium")
WATCH = "<script>window.wrong = []; addEventListener('error', (event) => wrong.push(String(event.message)));</script>"
TRY = """<script>
const all = (chosen) => [...document.querySelectorAll(chosen)];
const ink = (canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set([...Array(data.length / 4).keys()].map((i) => data.slice(4 * i, 4 * i + 3).join())).size;
};
const key = (name) => new KeyboardEvent("keydown", { key: name, bubbles: true });
const canvases = all("#more .map canvas");
const found = { maps: canvases.length, drawn: canvases.filter((c) => ink(c) > 1).length };
const chips = all("#more .chip");
chips.at(-1).focus();
found.said = document.querySelector("#more .said").textContent;
found.lit = chips.filter((chip) => chip.style.background).length;
all("#more .map")[1].click();
const large = document.querySelector("dialog canvas");
large.focus();
large.dispatchEvent(key("ArrowRight"));
found.value = document.querySelector("dialog .value").textContent;
found.title = document.querySelector("dialog strong").textContent;
document.querySelector("dialog details").open = true;
document.querySelector("dialog details").dispatchEvent(new Event("toggle"));
found.cells = all("dialog td").length;
document.querySelector("dialog").close();
const difference = all("#maps input").at(-1);
if (difference) difference.click();
found.note = document.querySelector("#maps .note").textContent;
found.steps = all(".step").length;
found.nodes = all("svg.tree rect").length;
found.lens = all(".lens td").length;
found.sections = all("#more section").filter((section) => !section.hidden).map((section) => section.id);
found.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
found.wide = document.documentElement.scrollWidth - innerWidth;
found.wrong = wrong;
document.body.append(Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify(found) }));
</script>"""


TYPE = """<script>
const read = () => ({
  title: document.getElementById("more-views").textContent,
  lens: [...document.querySelectorAll(".lens td[title]")].map((cell) => cell.title),
  steps: [...document.querySelectorAll(".bar")].map((bar) => bar.title),
  said: document.querySelector("#more .said").textContent,
});
const before = read();
addEventListener("walked", ({ detail }) => {
  if (detail.pass.text !== "TYPED" || document.getElementById("found")) return;
  const found = { before, after: read(), wrong };
  const place = Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify(found) });
  document.body.append(place);
});
const box = document.getElementById("text");
box.value = "TYPED";
box.dispatchEvent(new Event("input", { bubbles: true }));
</script>"""


def opened(page: Path, size: str = "1200,900", script: str = TRY) -> dict[str, Any]:
    """What the browser found in the page."""
    text = page.read_text(encoding="utf-8")
    tried = page.with_name("tried.html")
    tried.write_text(text.replace("<main>", f"{WATCH}<main>").replace("</body>", f"{script}</body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={size}", "--virtual-time-budget=8000"]
    command = [CHROMIUM, *flags, f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", tried.as_uri()]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENCE, check=True)
    shown = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert shown is not None, done.stdout[-2000:]
    return json.loads(html.unescape(shown[1]))


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder", "encoder"])
def test_a_page_of_two_runtimes(architecture, tmp_path):
    place = write_explained(tmp_path / "made", architecture)
    beam = {} if architecture == "encoder" else {"beam": 3, "max_new_tokens": 6}
    explain(place / "onnx", ["one two three."], beside=str(place / "model"), out=tmp_path / "page.html", **beam)
    found = opened(tmp_path / "page.html")
    assert found["wrong"] == []
    assert found["requests"] == []
    heads = 4 * {"encoder-decoder": 2 + 3 + 3, "decoder": 3, "encoder": 2}[architecture]
    assert (found["maps"], found["drawn"]) == (heads, heads)
    assert "looks at" in found["said"]
    assert found["lit"] > 1
    assert "head 2" in found["title"]
    assert re.search(r"looks at .*: \d", found["value"])
    assert found["cells"] > 1
    assert "Second less first" in found["note"]
    assert found["steps"] > 1
    assert found["lens"] > found["steps"]
    assert (found["nodes"] > 3) == (architecture != "encoder")
    absent = {"encoder-decoder": 0, "decoder": 1, "encoder": 2}[architecture]  # no alignment, no beam search
    assert len(found["sections"]) == 7 - absent


def test_a_phone(tmp_path):
    place = write_explained(tmp_path / "made", "encoder-decoder")
    explain(place / "onnx", ["one two three. four five six!"], out=tmp_path / "page.html", max_new_tokens=20)
    found = opened(tmp_path / "page.html", "500,900")  # the narrowest window that the browser makes
    assert found["wrong"] == []
    assert found["wide"] <= 0  # what is wider scrolls within its card


def numbers_of(said: dict[str, Any]) -> tuple[list[str], list[float]]:
    """The words of what is shown, and its numbers."""
    lines = [*said["lens"], *said["steps"], said["said"]]
    words = [re.sub(r"\d[\d.]*(e-?\d+)?", "#", line) for line in lines]
    return words, [float(number[0]) for line in lines for number in re.finditer(r"\d+(\.\d+)?(e-?\d+)?", line)]


def test_more_views_follow_what_is_typed(tmp_path):
    """They show what a page that is made with this text shows."""
    place = write_explained(tmp_path / "made", "encoder", onnx=False)
    texts = ("one two three.", "seven five four!")
    for name, text in zip(("first", "other"), texts, strict=True):
        explain(place / "model", [text], out=tmp_path / f"{name}.html")
    script = TYPE.replace("TYPED", texts[1])
    typed, made = opened(tmp_path / "first.html", script=script), opened(tmp_path / "other.html", script=script)
    assert typed["wrong"] == made["wrong"] == []
    assert typed["before"]["title"] == f"More views: {texts[0]}"
    assert typed["after"]["title"] == f"More views: {texts[1]}"
    assert typed["before"]["lens"] != typed["after"]["lens"]
    (words, numbers), (expected, wanted) = numbers_of(typed["after"]), numbers_of(made["before"])
    assert words == expected
    assert len(numbers) > 100
    assert numbers == pytest.approx(wanted, rel=2e-3, abs=1e-3)  # four digits, three of shares; made by MLX in float32
