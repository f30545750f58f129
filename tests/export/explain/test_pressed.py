"""Each control of the walk changes what it says, and nothing else: the page's own scripts, run in Node and pressed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from drawn_walk import random_row, short
from explained_models import write_explained
from imports import ROOT
from pressed import visited
from shipped_models import RIVER, TIRED
from walk import plain

from export.explain.command import explain
from export.explain.page import page as walk_page
from mlx_transformer.data.built_in import NOTES

FIRST = {"token", "row", "position"}
LOOK = {"qkv", "cell", "mixed", "heads"}
LAYER = {*LOOK, "norm", "feed-forward"}
WORD = {*FIRST, *LAYER, "next"}
"""Stations that show the chosen word, the chosen layer, one head."""
OUT = {"logits", "search"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pressed") / "walk.html"
    explain(out=out)
    return out


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The stations that show something else."""
    return {name for name, each in after["sections"].items() if each["digest"] != before["sections"][name]["digest"]}


def after_each(page: Path, steps: list[tuple[str, str, Any]], hash: str = "") -> list[Any]:
    return visited(page, {"hash": hash, "steps": steps})[0]


LONG = "the lion kills the deer " * 30


def test_what_is_typed_is_read_after_a_rest_and_in_parts(page: Path) -> None:
    """An empty text says so, strange words are marked and known ones offered; of a long text the beginning is read."""
    steps = [
        ("type", "#text", ""),
        ("type", "#text", "The zebra sat on the mat"),
        ("read", ".chip.strange .tok", None),
        ("click", "[data-old=zebra]", None),
        ("type", "#text", LONG),
        ("read", "#chips [data-word]", None),
        ("type", "#text", "Lion kills deer"),
    ]
    first, empty, zebra, marked, bear, long, read, last = after_each(page, steps)
    assert first["output"] == f"→ {NOTES[TIRED]}"
    assert empty["wrong"].startswith("There is no text")
    assert changed(first, empty) == set()
    assert zebra["strange"].startswith("‹zebra› stands in none of the sentences")
    assert "".join(map(plain, marked)) == "·zebra"
    assert (bear["strange"], bear["wrong"]) == ("", "")
    assert "zebra" not in bear["hash"]
    assert "64 tokens" in long["strange"]
    assert len(read) == 64
    assert last["output"] == f"→ {NOTES['Lion kills deer']}"


def test_what_one_looks_at(page: Path) -> None:
    """Layer, head, stack, word, step and column."""
    steps = [
        ("click", "#picks [data-layer='0']", None),
        ("click", "#picks [data-head='1']", None),
        ("click", "#picks [data-stack=decoder]", None),
        ("click", "#chips [data-word='1']", None),
        ("click", "#chips [data-step='2']", None),
        ("key", "body", {"key": "."}),
        ("key", "body", {"key": "ArrowRight"}),
        ("key", "body", {"key": "ArrowUp", "shiftKey": True}),
        ("key", "body", {"key": "ArrowLeft", "shiftKey": True}),
        ("click", "#lanes [data-go=cross][data-layer='0']", None),
        ("click", "#cell [data-key='1']", None),
    ]
    states = after_each(page, steps)
    found = [changed(*pair) for pair in pairwise(states)]
    layer, head, stack, word, step, column, right, up, left, cross, key = found
    assert layer == {*LAYER, "cross"}
    assert head == {*LOOK, "cross"}
    assert stack == WORD
    assert word == WORD
    assert step == {*WORD, "cross", *OUT}
    assert column == {*WORD, "cross", "logits"} - {"token", "cell"}
    assert right == {*WORD, "cross", *OUT}
    assert up == {*LAYER, "cross"}
    assert left == {*LOOK, "cross"}
    assert cross == {*LAYER, "cross"}
    assert key == {"cell", "cross"}
    chosen = [state["chosen"] for state in states]
    assert [each["layer"] for each in chosen] == [["1"], *[["0"]] * 7, ["1"], ["1"], ["0"], ["0"]]
    assert [each["head"][0] for each in chosen] == ["3", "3", *["1"] * 7, "0", "0", "0"]
    assert [each["stack"][0] for each in chosen[:6]] == [
        "encoder",
        "encoder",
        "encoder",
        "decoder",
        "encoder",
        "decoder",
    ]
    assert [chosen[n][name][0] for n, name in ((4, "word"), (5, "step"), (7, "step"))] == ["1", "2", "3"]
    assert states[-2]["seen"] == "cross"
    assert all(state["output"] == states[0]["output"] for state in states)
    assert "(layer 1, head 2)" in states[5]["said"]


def boxes(found: list[str]) -> list[str]:
    return [plain(each) for each in found]


def test_the_picture_is_drawn_from_the_config_and_lights_the_chosen_words_path(page: Path) -> None:
    """Each stack's stream, its sub-layers with their shapes; the memory leads into each cross-attention."""
    steps = [
        ("read", "#lanes [data-stack=encoder]", None),
        ("read", "#lanes [data-stack=decoder]", None),
        ("read", "#lanes .memory", None),
        ("read", "#lanes .lit", None),
        ("click", "#lanes [data-stack=decoder][data-go=position]", None),
        ("read", "#lanes .lit", None),
        ("read", "#lanes text", None),
        ("click", "#tabs [data-model='2']", None),
        ("read", "#lanes .box", None),
    ]
    _, encoder, decoder, memory, lit, place, later, texts, _, alone = after_each(page, steps)
    look, forward = "attention 4 × 14 × 14", "feed-forward 14 × 256"
    assert boxes(encoder) == ["token 14 ids", "+ place 14 × 64", look, forward, look, forward]
    layer = ["attention 4 × 13 × 13", "cross-attention 4 × 13 × 14", "feed-forward 13 × 256"]
    assert boxes(decoder) == ["token 13 ids", "+ place 13 × 64", *layer, *layer, "softmax 13 × 1,000"]
    assert len(memory) == 2
    assert [re.findall(r'class="(\w+)', each)[0] for each in lit] == ["memory", "stream", "box"]
    assert place["seen"] == "position"
    assert [re.findall(r'class="(\w+)', each)[0] for each in later] == ["stream", "box"]
    assert "→ ·es" in boxes(texts)
    assert boxes(alone)[-1] == "softmax 7 × 700"
    assert sum("cross" in each for each in boxes(alone)) == 0


def shares(state: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in state["sections"]["logits"]["named"].items() if name.startswith("p ")}


def test_temperature_divides_logits_and_the_penalty_is_a_power_of_the_length(page: Path) -> None:
    steps = [
        ("set", "#temperature", "2"),
        ("set", "#top-k", "2"),
        ("set", "#top-k", "0"),
        ("set", "#temperature", "1"),
        ("set", "#alpha", "0"),
        ("set", "#beam-size", "1"),
        ("read", "#search .tree", None),
        ("set", "#alpha", "2"),
    ]
    first, warm, few, _, again, plain_score, one, nodes, penalised = after_each(page, steps)
    assert changed(first, warm) == {"logits"}
    assert changed(first, again) == set()
    cold, hot = shares(first), shares(warm)
    a, b = list(cold)[:2]
    kept = shares(few)
    assert kept[a] == pytest.approx(hot[a] / (hot[a] + hot[b]), rel=1e-6), "the two likeliest share all"
    assert [share for name, share in kept.items() if name not in (a, b)] == [0] * (len(kept) - 2)
    assert "topK=2" in few["hash"]
    assert math.log(hot[a] / hot[b]) == pytest.approx(math.log(cold[a] / cold[b]) / 2, rel=1e-6)
    assert changed(again, plain_score) == changed(plain_score, one) == changed(one, penalised) == {"search"}
    scores = [state["sections"]["search"]["named"]["score"] for state in (plain_score, one, penalised)]
    assert scores[0] == pytest.approx(-0.272, abs=1e-3), "without a penalty it is log p"
    assert scores[1] == pytest.approx(scores[0])
    assert scores[2] == pytest.approx(scores[0] / ((5 + 13) / 6) ** 2)
    assert "26 candidates" in nodes[0], "two of each step"


def test_random_queries_and_keys_of_any_width(page: Path) -> None:
    """Divided, the row and what training feels stay as they are; undivided, both are lost."""
    steps = [("set", "#width", "2"), ("set", "#width", "10"), ("read", "#cell .controls output", None)]
    first, narrow, wide, output = after_each(page, steps)
    assert changed(first, narrow) == changed(narrow, wide) == {"cell"}
    assert "width=1024" in wide["hash"]
    assert plain(output[0]) == "1024"
    for state, width in ((first, 16), (narrow, 4), (wide, 1024)):
        found = {name: value for name, value in random_row(width).items() if " " in name}
        assert {name: state["sections"]["cell"]["named"][name] for name in found} == pytest.approx(found)
    gradients = [[state["sections"]["cell"]["named"][f"gradient {n}"] for n in (0, 1)] for state in (narrow, wide)]
    assert min(gradients[0][0], gradients[1][0]) > 0.6
    assert gradients[1][1] < 0.2 * gradients[1][0]


def test_the_mask_is_a_triangle_and_is_switched_beside_it(page: Path) -> None:
    steps = [
        ("click", "#chips [data-step='1']", None),
        ("read", "#cell .mask path", None),
        ("click", "#cell [data-flip=mask]", None),
        ("read", "#cell .mask path", None),
        ("click", "#cell [data-flip=mask]", None),
        ("click", "#heads [data-large='1']", None),
        ("read", "#heads .large", None),
        ("click", "#heads .large .map", None),
    ]
    _, on, triangle, off, square, again, large, one, small = after_each(page, steps)
    assert [path.count("M") for path in triangle] == [13 * 14 // 2, 13 * 12 // 2]
    assert "M1 193" in triangle[0], "the last row may look at the first column"
    assert "M193 1h" in triangle[1]
    assert [path.count("M") for path in square] == [169, 0]
    assert off["broken"] == "off: mask"
    assert changed(on, again) == set()
    assert changed(again, large) == {"heads", "cross"}
    assert 'data-of="1"' in one[0]
    assert changed(again, small) == set()
    columns = re.findall(r"<span>(.*?)</span>", one[0].partition('class="columns"')[2].partition("</div>")[0])
    assert columns == ["start", "Das", *columns[2:]]
    assert len(columns) == 13


def test_nothing_moves_for_those_who_want_it_still(page: Path) -> None:
    style = re.findall(r"<style>(.*?)</style>", page.read_text(encoding="utf-8"), re.S)[0]
    wanted = style.split("@media (prefers-reduced-motion:no-preference){")[1].partition("}}")[0]
    assert style.count("animation:") == wanted.count("animation:") == 4
    assert "transition" not in style


def test_switches_take_a_part_out_and_put_it_back(page: Path) -> None:
    names = ["positions", "mask", "scale", "residual", "norm"]
    steps = [step for name in names for step in (("check", f"[data-off={name}]", True), ("click", "#all-on", None))]
    steps += [("set", "#part", "decoder,0,self_attention,1"), ("read", "#mixed .off", None), ("click", "#all-on", None)]
    steps += [("click", "#try-all", None), ("read", "#turns tbody tr", None)]
    first, *states = after_each(page, steps)
    broken = dict(zip(names, states[0:10:2], strict=True))
    for name, state in broken.items():
        assert state["broken"] == f"off: {name}"
        assert state["sections"]["break"]["named"]["right-off"] < first["sections"]["break"]["named"]["right"]
        assert f"off={name}" in state["hash"]
        assert state["scores"].startswith(
            f"log p {short(state['sections']['break']['named']['log-p-off'])} (whole: −0.272)"
        )
    assert all(changed(first, state) == set() for state in states[1:10:2])
    assert all(state["broken"] == "" for state in states[1:10:2])
    assert FIRST & changed(first, broken["positions"]) == {"position"}
    assert changed(first, broken["mask"]) == {"logits", "cross", "search", "break"}
    assert {"norm", "feed-forward"} <= changed(first, broken["norm"])
    off = {name: state["sections"]["break"]["named"] for name, state in broken.items()}
    assert off["positions"]["moved-off"] < 1e-12 < 0.1 < off["positions"]["moved"]
    assert off["mask"]["ahead"] == 0 < 0.1 < off["mask"]["ahead-off"]
    assert off["scale"]["bits-encoder-off"] < off["scale"]["bits-encoder"]
    assert off["residual"]["right-off"] < -3
    assert off["norm"]["right-off"] < off["norm"]["right"]
    head, taken, whole, turns, rows = states[10:]
    assert head["broken"] == "off: decoder, layer 1, self-attention, head 2"
    assert head["sections"]["break"]["named"]["right-off"] < -4
    assert taken == []
    assert changed(first, whole) == set()
    assert changed(whole, turns) == {"break"}
    assert len(rows) == 34


def test_a_training_is_told_as_it_was_measured(page: Path) -> None:
    told = json.loads((ROOT / "export/explain/walk/training.json").read_text(encoding="utf-8"))
    steps = [
        ("read", "#training figure path", None),
        ("read", "#training .head i", None),
        ("read", "#training small", None),
    ]
    first, [path], cells, [before, after] = after_each(page, steps)
    named = first["sections"]["training"]["named"]
    looks = {when: max(told[when][0]) for when in ("before", "after")}
    losses = {"first": told["losses"][0], "last": told["losses"][-1], "guess": math.log(9)}
    assert named == pytest.approx(losses | looks)
    heights = [120 - float(point.split()[1]) for point in re.findall(r"[ML]([\d.]+ [\d.]+)", path)]
    assert heights == pytest.approx([loss * 116 / max(told["losses"]) for loss in told["losses"]], abs=0.06)
    rows = [[float(value) for value in re.findall(r'data-values="(.*?)"', cell)[0].split()] for cell in cells]
    assert rows == told["before"] + told["after"]
    assert f"‹word {told['words'][0]}›, {short(max(told['after'][0]))}" in plain(after)
    assert plain(before) != plain(after)


def test_spreads_are_bits_and_rows_add_up_to_one(page: Path) -> None:
    steps = [("read", "#heads .head.on .map .line.on i", None)]
    first, [row] = after_each(page, steps)
    weights = [float(value) for value in re.findall(r'data-values="(.*?)"', row)[0].split()]
    found = first["sections"]["cell"]["named"]
    assert sum(weights) == pytest.approx(found["row"], abs=1e-8)
    assert found["row"] == pytest.approx(1)
    assert found["bits"] == pytest.approx(-sum(w * math.log2(w) for w in weights if w), abs=1e-6)


def test_a_link_opens_the_page_as_it_was(page: Path) -> None:
    """Also of another model; what an address of the guide leaves out is as at first."""
    steps = [
        ("click", "#examples [data-example='2']", None),
        ("set", "#temperature", "0.5"),
        ("check", "[data-off=scale]", True),
        ("click", "#picks [data-head='2']", None),
        ("key", "body", {"key": "."}),
        ("click", "#copy", None),
    ]
    _, example, *_, last, copied = after_each(page, steps)
    assert example["said"].startswith("‹·bank› looks most at ‹·river›")
    [link] = copied["copied"]
    [[same], [guide], [other]] = visited(
        page,
        {"hash": link[link.index("#") :]},
        {"hash": "#stack=decoder&layer=1&head=2&at=cross"},
        {"hash": "#model=1"},
    )
    assert last["hash"] in link
    assert "river" in link
    assert RIVER.split()[0] in link
    assert (same["output"], same["said"], same["broken"]) == (last["output"], last["said"], last["broken"])
    assert changed(last, same) == set()
    assert guide["output"] == f"→ {NOTES[TIRED]}"
    assert [guide["chosen"][name] for name in ("stack", "layer", "head")] == [["decoder"], ["1"], ["2"]]
    assert guide["seen"] == "cross"
    assert guide["said"].startswith("while writing ‹·es›")
    assert other["chosen"]["model"] == ["1"]
    assert other["output"].startswith("→ CAT")


def test_other_models_words_and_the_tour(page: Path) -> None:
    tour = [("click", "#tour [data-tour=next]", None)] * 8
    steps = [
        ("click", "#tabs [data-model='1']", None),
        ("click", "#tabs [data-model='2']", None),
        ("click", "#tabs [data-model='0']", None),
        ("click", "[data-gl=softmax]", None),
        ("read", "#gloss", None),
        ("click", "#tour-start", None),
        *tour,
        ("read", "#tour", None),
    ]
    first, decoder, encoder, translator, _, gloss, *toured, tour_html = after_each(page, steps)
    assert not {"cross"} & set(decoder["sections"])
    assert decoder["output"] == "→ CAT"
    assert not {"cross", "search"} & set(encoder["sections"])
    assert encoder["scores"].startswith("log p −")
    assert changed(first, translator) == set()
    assert "shares that add up to 1" in gloss[0]
    assert [state["seen"] for state in toured[:-1]] == [
        "token", "row", "position", "cell", "heads", "norm", "logits", "break",
    ]  # fmt: skip
    assert "hidden" in tour_html[0].partition(">")[0]


ID = re.compile(r'id="([^"]*)"')
GOLDEN = Path(__file__).with_name("golden_walk.json")
DRAWN = ("#breaker", "#tabs", "#examples", "#chips", "#picks", "#lanes", "#key", "#glossary-list", ".station")


def as_read(page: Path) -> dict[str, dict[str, list[str]]]:
    """Of each model and part of the page, as it begins, and of the tour: text, and a digest of what is drawn."""
    reads = [("read", part, None) for part in DRAWN]
    seen = {f"model {n}": [("click", f"#tabs [data-model='{n}']", None), *reads] for n in range(3)}
    seen["tour"] = [("click", "#tour-start", None), *[("read", "#tour", None), ("click", "[data-tour=next]", None)] * 8]
    states = iter(after_each(page, [step for steps in seen.values() for step in steps])[1:])
    found: dict[str, dict[str, list[str]]] = {}
    for name, steps in seen.items():
        drawn = [html for _, state in zip(steps, states, strict=False) if isinstance(state, list) for html in state]
        found[name] = {f"{n} {ID.findall(html)[0]}": as_words(html) for n, html in enumerate(drawn)}
    return found


def as_words(html: str) -> list[str]:
    words = plain(re.sub(r'<i .*?</i>|<div class="terms">.*?</div>', "", html.replace("<", " <")))
    return [hashlib.sha1(html.encode()).hexdigest()[:12], " ".join(words.split())]


def looked_at(name: str, found: Any) -> Any:
    """What stood there when people last read it.

    After a change that is meant: look at the page, then run these tests with GOLDEN_WALK=write in the environment.
    """
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if os.environ.get("GOLDEN_WALK") == "write":
        golden[name] = found
        GOLDEN.write_text(json.dumps(golden, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    return golden[name]


def test_the_page_is_the_one_that_was_looked_at(page: Path) -> None:
    """Words, formulas, captions, controls and pictures."""
    for name, parts in as_read(page).items():
        golden = looked_at(name, parts)
        assert {part: words for part, (_, words) in parts.items()} == {
            part: words for part, (_, words) in golden.items()
        }
        assert parts == golden, f"{name}: the same words, drawn otherwise"


FAMILY = {
    "positions": "rotary", "norm": "rmsnorm", "norm_placement": "pre", "gated": True, "activation": "silu",
    "heads": 4, "key_value_heads": 2, "query_key_norm": True, "decoder_layers": 6, "layer_pattern": [{}, {"window": 2}],
}  # fmt: skip


def test_a_decoder_of_a_family_is_told_in_its_own_words(tmp_path: Path) -> None:
    """Grouped heads, turned queries, RMSNorm, a gate, windows; of a stack of many layers the chosen one is drawn."""
    model = write_explained(tmp_path / "family", "decoder", onnx=False, **FAMILY) / "model"
    explain(model, ["one two three."], out=tmp_path / "whole.html", max_new_tokens=4)
    whole = (tmp_path / "whole.html").read_text(encoding="utf-8")
    [data] = re.findall(r'id="walk-data">(.*?)</script>', whole, re.S)
    (tmp_path / "page.html").write_text(walk_page(json.loads(data)["models"]), encoding="utf-8")  # without more views
    steps = [
        ("read", ".station .answer p", None),
        ("read", ".station .formula", None),
        ("read", "#position .name", None),
        ("read", "#lanes .box", None),
        ("click", "#lanes [data-layer='1']", None),
        ("read", "#cell .answer p", None),
        ("read", "#cell .not", None),
        ("read", "#lanes .box", None),
        ("click", "#picks [data-head='3']", None),
    ]
    first, answers, formulas, names, before, second, cell, hidden, after, head = after_each(
        tmp_path / "page.html", steps
    )
    read = [*map(plain, answers), *map(plain, formulas)]
    assert read == looked_at("family", read)
    said = " ".join(map(plain, answers))
    told = ("share 2 keys and values, 2 queries each", "turned already", "window of this one: none", "the gate, says")
    for words in (*told, "root of its mean square", "brought to one size"):
        assert words in said, words
    shown = " ".join(map(plain, formulas))
    assert "4 heads of" in shown
    assert "2 of keys and values" in shown
    assert "RMSNorm(X)" in shown
    assert "LayerNorm" not in shown
    assert "· x W1" in shown
    assert "turn of each pair, in radians" in map(plain, names)
    assert sum("attention" in each for each in boxes(before)) == 1
    assert any(each.startswith("layers 2 to 6") for each in boxes(before))
    assert "window of this one: 2" in plain(cell[0])
    assert hidden[0].count("M") > 20
    assert boxes(after)[2].startswith("layer 1 ")
    assert any(each.startswith("layers 3 to 6") for each in boxes(after))
    assert {*LAYER} <= changed(first, second) | {"next"}
    assert changed(second, head) == LOOK
