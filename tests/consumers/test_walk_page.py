"""The walk through a model in headless Chromium: what is typed is translated, every number on the page is that of the
reference, sums add up, switches break it, a link brings it back, and ten questions are answered."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import HERE, SECONDS
from drawn_walk import Passes, elsewhere, hold_drawn
from explained_models import write_explained
from head_models import head_model
from shipped_models import RIVER

from export.explain.command import explain
from export.explain.inside import FOLDER, MODELS
from export.validate.reference import Reference
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.data.built_in import NOTES
from mlx_transformer.generation.heads import ids_with_masks
from mlx_transformer.text.tokenizer import Tokenizer

pytestmark = pytest.mark.consumers

TEXTS = {
    "sentences": tuple(NOTES),
    "sentences-decoder": ("YOUR CAT IS A LOVELY", "My fried chicken was very"),
    "sentences-encoder": ("My ▢ chicken was very good", "YOUR ▢ IS A LOVELY CAT"),
}
QUESTIONS = {  # each question, and what its answer must hold
    "What is a token?": "piece of text",
    "Why is a word a vector?": "near",
    "How does the model know the order?": "wave",
    "What are q, k and v?": "looks for",
    "Where does this number come from, and why divide by √d_k?": "products grows",
    "What do four heads do that one can't?": "at once",
    "Why is x added again, and what does the norm do?": "mean of each vector 0",
    "How does the German side see the English?": "memory",
    "Why this word?": "fits",
    "What would a beam have done?": "best K beginnings",
}
SWITCHES = ["positions", "mask", "scale", "residual", "norm"]
MOST_BYTES = 1_900_000
MOST_CODE = 125_000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("walk") / "walk.html"
    explain(out=out)
    return out


@pytest.fixture(scope="module")
def answers(page: Path) -> dict[str, dict[str, Any]]:
    tasks = [
        {"page": str(page), "model": n, "texts": TEXTS[name], "switches": SWITCHES if n == 0 else [], "width": width}
        for (n, name), width in zip(enumerate(MODELS), (1100, 768, 360), strict=True)
    ]
    return dict(zip(MODELS, answered(page.parent, tasks), strict=True))


def answered(folder: Path, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the browser finds in pages that it opens from files."""
    (folder / "tasks.json").write_text(json.dumps(tasks), encoding="utf-8")
    command = ["node", str(HERE / "node" / "with_walk.mjs"), str(folder / "tasks.json"), str(folder / "answers.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answers.json").read_text(encoding="utf-8"))


def passed(name: str, text: str) -> tuple[dict[str, Any], list[int], list[tuple[int, int]], str]:
    """The points of the reference's own pass over a text, ids of what the model writes, or of an encoder's
    text; the rows of the logits and the ids whose log p the page says; and what is written, as text."""
    checkpoint = open_checkpoint(FOLDER / name)
    config = checkpoint.config
    tokenizer = Tokenizer(str(checkpoint.tokenizer_json()), name)
    reference = Reference(config, dict(checkpoint.tensors()), inner_points=True)
    points: dict[str, Any] = {}

    def tap(point: str, value: Any) -> None:
        points[point] = value[0]

    if config.architecture == "encoder":
        ids = ids_with_masks(tokenizer, text.replace("▢", "<mask>"))
        reference([ids], tap=tap)
        at = ids.index(tokenizer.mask_id)
        return points, ids, [(at, int(points["logits"][at].argmax()))], ""
    source = tokenizer.encode(text)
    given = [config.bos_id] if config.has_encoder else [config.bos_id, *source[:-1]]
    limit, begin = (len(source) + 50 if config.has_encoder else 50), len(given)
    while len(given) <= limit:
        logits = reference([source], [given]) if config.has_encoder else reference([given])
        best = logits[0, -1].copy()
        best[[config.pad_id, config.bos_id]] = -np.inf
        given.append(int(best.argmax()))
        if given[-1] == config.eos_id:
            break
    if config.has_encoder:
        reference([source], [given[:-1]], tap=tap)
    else:
        reference([given[:-1]], tap=tap)
    return points, given[1:], list(enumerate(given[1:]))[begin - 1 :], tokenizer.decode(given[begin:]).strip()


def runs(name: str) -> Passes:
    """The reference's passes."""
    checkpoint = open_checkpoint(FOLDER / name)
    reference = Reference(checkpoint.config, dict(checkpoint.tensors()))

    def run(source: Sequence[int], written: Sequence[int]) -> dict[str, Any]:
        points: dict[str, Any] = {}

        def tap(point: str, value: Any) -> None:
            points[point] = value[0]

        read = [checkpoint.config.bos_id, *written[:-1]]
        if checkpoint.config.architecture == "encoder-decoder":
            reference([source], [read], tap=tap)
        else:
            reference([source if checkpoint.config.has_encoder else read], tap=tap)
        return points

    return run


def given_to(name: str, text: str, ids: Sequence[int]) -> tuple[Sequence[int], int]:
    """Ids of the source, and how many of the written ones are the text's own."""
    checkpoint = open_checkpoint(FOLDER / name)
    if checkpoint.config.architecture == "encoder":
        return ids, 0
    source = Tokenizer(str(checkpoint.tokenizer_json()), name).encode(text)
    return source, 0 if checkpoint.config.has_encoder else len(source) - 1


@pytest.mark.parametrize("name", list(MODELS))
def test_every_number_is_the_references(answers: dict[str, Any], name: str) -> None:
    answer = answers[name]
    assert (answer["problems"], answer["requests"], answer["unknown"]) == ([], [], [])
    assert answer["wide"] <= 0, "what is wider scrolls within its strip"
    model = open_checkpoint(FOLDER / name)
    for shown in answer["texts"]:
        points, ids, scored, output = passed(name, shown["text"])
        assert shown["output"] == (f"→ {output}" if output else "")
        source, given = given_to(name, shown["text"], ids)
        others = elsewhere(runs(name), model.config, source, ids, given)
        parameters = dict(model.tensors())
        assert hold_drawn(shown, points, model.config, parameters, ids, scored, elsewhere=others) > 3000
        seen = {each for state in shown["states"] for _, numbers, _ in state["named"] for each, _ in numbers}
        assert set(others) <= seen
        layers = {point for point in points if re.search(r"layers\.\d+$", point)}
        assert layers <= set(shown["numbers"]), "each layer of each stack is shown"
        assert max(abs(total - terms) for terms, total in shown["sums"]) < 1e-7


def test_translations_are_right(answers: dict[str, Any]) -> None:
    assert {each["text"]: each["output"] for each in answers["sentences"]["texts"]} == {
        text: f"→ {translation}" for text, translation in NOTES.items()
    }


def test_switches_break_it_and_nothing_stays(answers: dict[str, Any]) -> None:
    off = answers["sentences"]["off"]
    assert off["positions"]["moved-off"] < 1e-12 < 0.1 < off["positions"]["moved"]
    assert off["mask"]["ahead"] == 0 < 0.1 < off["mask"]["ahead-off"]
    for name in ("encoder", "cross-attention"):
        assert off["scale"][f"bits-{name}-off"] < off["scale"][f"bits-{name}"]
    assert off["residual"]["right-off"] < off["residual"]["right"] - 3
    assert all(each["right-off"] < each["right"] for each in off.values())
    assert answers["sentences"]["same"], "on again, the same bits as before"
    assert answers["sentences"]["linked"], "a copied link shows the same page"


def test_ten_questions_have_an_answer(answers: dict[str, Any]) -> None:
    found = {question: (answer, numbers) for question, answer, numbers in answers["sentences"]["questions"]}
    for question, said in QUESTIONS.items():
        assert said in found[question][0], question
    assert sum(numbers > 0 for _, numbers in found.values()) > len(QUESTIONS)
    assert [each["unseen"] for each in answers.values()] == [[], [], []], "each is on one screen with what shows it"
    assert answers["sentences"]["glossary"] >= 40


MODERN = {"positions": "rotary", "norm": "rmsnorm", "norm_placement": "pre", "gated": True, "key_value_heads": 2}
PLACES = {  # options of a model, and what the tour says of its positions
    "sinusoidal": ({"max_positions": 60}, "A wave for its place is added"),
    "learned": ({"positions": "learned"}, "A vector for its place, which training found"),
    "rotary": (MODERN, "queries and keys will be turned"),
    "relative": ({"positions": "relative", "attention_scale": 0.3}, "how far apart two words are will count"),
    "none": ({"positions": "none"}, "from the mask alone"),
}

RECORDED = ("rotary", "relative", "vector", "pair")
"""Also an encoder whose folder says how a text's vector is made, and one that reads two texts as a pair."""


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Of a model of each kind its page as it begins; that of some is one recorded pass."""
    folder = tmp_path_factory.mktemp("places")
    models: dict[str, tuple[Path, list[str]]] = {}
    for name, (options, _) in PLACES.items():
        models[name] = (
            write_explained(folder / name, "encoder-decoder", onnx=False, **options) / "model",
            ["one two three."],
        )
    place = write_explained(folder / "vector", "encoder", onnx=False) / "model"
    opened, embedding = open_checkpoint(place), TextEmbedding(pooling=("mean", "cls"), normalize=True)
    save_checkpoint(
        place, opened.config, dict(opened.tensors()), opened.tokenizer_json(), force=True, texts=embedding.texts()
    )
    models["vector"] = place, ["one two three."]
    models["pair"] = head_model("bert-classes", folder / "pair"), ["a good film .", "a bad film ."]
    pages = {name: folder / f"{name}.html" for name in models}
    for name, (model, texts) in models.items():
        changes = {"max_new_tokens": 5} if name in PLACES else {}
        explain(model, texts, out=pages[name], **changes)
    tasks = [
        {"page": str(page), "model": 0, "texts": [None] if name in RECORDED else []} for name, page in pages.items()
    ]
    found = answered(folder, tasks)
    return {name: (models[name][0], each) for name, each in zip(pages, found, strict=True)}


@pytest.mark.parametrize("name", list(PLACES))
def test_the_tour_says_what_is_done_for_the_place(name: str, others: dict[str, Any]) -> None:
    _, answer = others[name]
    assert answer["problems"] == []
    assert PLACES[name][1] in answer["tour"][2]
    assert len(answer["tour"]) == 8
    assert sum("wave" in said for said in answer["tour"]) == (name == "sinusoidal")


@pytest.mark.parametrize("name", RECORDED)
def test_every_number_of_a_recorded_pass_is_an_element_of_it(name: str, others: dict[str, Any]) -> None:
    model, answer = others[name]
    data = re.search(r'id="walk-data">(.*?)</script>', (model.parents[1] / f"{name}.html").read_text("utf-8"), re.S)
    assert data is not None
    [spec] = json.loads(data[1])["models"]
    points, parameters = recorded(spec["points"]), recorded({"arrays": spec["parameters"], "equal": {}})
    config = open_checkpoint(model).config
    for shown in answer["texts"]:
        assert hold_drawn(shown, points, config, parameters, spec["tokens"]["written"], types=spec["types"]) > 500


def recorded(points: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a page; rows that it has not are no numbers."""
    found = {}
    for name, each in points["arrays"].items():
        raw = np.frombuffer(base64.b64decode(each["values"]), "<f4" if each["bits"] == 32 else "<f2")
        rows, shape = each.get("rows"), each["shape"]
        if rows is None:
            found[name] = raw.reshape(shape).astype(np.float64)
            continue
        held = [*shape[:-2], len(rows), shape[-1]]
        found[name] = np.full([*shape[:-2], max(rows) + 1, shape[-1]], np.nan)
        found[name][..., rows, :] = raw.reshape(held)
    return found | {name: found[other].reshape(shape) for name, (other, shape) in points["equal"].items()}


TYPED, STRANGE = RIVER, "The zebra sat on the mat"
SAME = ""
KEYED = (  # what Tab looks for, the keys pressed there, what has the focus then, what is read, and what it says
    ("#text", ["Control+a", json.dumps(TYPED)], SAME, "#output", NOTES[TYPED]),
    (".skip", ["Enter"], "#token-title", "#output", NOTES[TYPED]),
    ("#chips [data-word='2']", ["Enter"], SAME, "#chips .on .tok", "·the"),
    ("#chips [data-word='2']", ["ArrowRight", "PageDown", "PageUp"], SAME, "#chips .on .tok", "·river"),
    ("#chips [data-word='2']", [".", ".", ","], SAME, "#row .cell", "column 1: "),
    ("#picks [data-head='1']", [" "], SAME, "#said", "(layer 2, head 2)"),
    ("#picks [data-head='1']", ["Shift+ArrowRight", "Shift+ArrowDown"], SAME, "#said", "(layer 1, head 3)"),
    ("#lanes [data-go=cross]", ["Enter"], "#cross-title", "#picks [data-stack][aria-pressed=true]", "decoder"),
    ("#lanes [data-go=position]", ["Enter"], "#position-title", "#picks [data-stack][aria-pressed=true]", "encoder"),
    ("#picks [data-stack=decoder]", [" "], SAME, "#picks [data-stack][aria-pressed=true]", "decoder"),
    ("#cell [data-key='2']", ["Enter"], SAME, "#cell .total", "÷ √16"),
    ("[data-flip=mask]", ["Enter"], SAME, "#broken", "off: mask"),
    ("[data-flip=mask]", ["Enter"], SAME, "#broken", None),
    ("#width", ["ArrowRight"], SAME, "#cell output", "32"),
    ("#heads [data-large='0']", ["Enter"], SAME, "#heads .large button", "head 1"),
    ("#temperature", ["ArrowRight", "ArrowRight"], SAME, "#logits output", "1.2"),
    ("#top-k", ["ArrowDown"], SAME, "#logits .said", "‹end› 1,"),
    ("#alpha", ["ArrowLeft"], SAME, "#search output", "0.5"),
    ("#beam-size", ["ArrowDown", "ArrowDown"], SAME, "#tree .said", NOTES[TYPED]),
    ("#break .gl", [], SAME, "#gloss", "positional encoding"),
    ("#break .gl", ["Escape"], SAME, "#gloss", None),
    ("#try-all", ["Enter"], SAME, "#turns tbody th", "all of it"),
    ("[data-off=norm]", [" "], SAME, "#broken", "off: norm"),
    ("#part", ["ArrowDown"], SAME, "#broken", "off: norm, encoder, layer 1, self-attention, head 1"),
    ("#all-on", ["Enter"], SAME, "#broken", None),
    ("#tour-start", ["Enter", " ", " "], "[data-tour=next]", "#tour p", "3 of 8"),
    (SAME, ["Escape"], "#position-title", "#tour", None),
    ("#tour-start", ["Enter", *[" "] * 8], "h2", "#tour", None),
    ("#text", ["Control+a", json.dumps(STRANGE)], SAME, "#strange", "‹zebra› stands in none"),
    ("[data-old=zebra]", ["Enter"], "#text", "#strange", None),
    ("[data-example='2']", ["Enter"], SAME, "#output", NOTES[TYPED]),
    ("[data-model='1']", ["Enter"], SAME, "#output", "CAT"),
)


def hidden(stop: dict[str, Any] | None, height: int) -> str:
    """What one at the keyboard doesn't see or hear of where the focus is."""
    if stop is None:
        return "the focus is lost"
    small = stop["tall"] < height / 3
    width, contrast = stop["outline"], stop["contrast"]
    faults = {
        f"{stop['seen']:.0%} in sight": stop["seen"] < (0.9 if small else 0.4),
        f"{stop['sides']} sides of its outline": stop["sides"] < (3 if small else 2),
        f"an outline of {width} and contrast {contrast:.1f}": width < 2 or contrast < 3,
        "no name": not stop["name"],
    }
    found = ", ".join(fault for fault, there in faults.items() if there)
    return f"{stop['what']}: {found}" if found else ""


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 844, "light"), (360, 740, "dark")])
def test_all_is_reached_by_keys_alone(page: Path, tmp_path: Path, width: int, height: int, scheme: str) -> None:
    """From the page's beginning to its end and back, and each kind of control is pressed: what has the focus is in
    sight, outlined and named, and all that a mouse presses has had it."""
    keys = [(wanted, keys, keeps or wanted or "*", read) for wanted, keys, keeps, read, _ in KEYED]
    task = {"page": str(page), "keys": keys, "width": width, "height": height, "colorScheme": scheme}
    [found] = answered(tmp_path, [task])
    assert (found["problems"], found["wrong"], found["unreached"], found["unvisited"]) == ([], [], [], [])
    assert sorted(each["what"] for each in found["stops"]) == sorted(each["what"] for each in found["back"])
    visited = [*found["stops"], *found["back"]]
    assert [fault for each in visited if (fault := hidden(each, height))] == []
    for (wanted, pressed, _, _, said), step in zip(KEYED, found["steps"], strict=True):
        assert [fault for each in step["after"] if (fault := hidden(each, height))] == [], (wanted, pressed)
        assert step["kept"], (wanted, pressed)
        read = step["read"]
        assert read == [] if said is None else any(said in each for each in read), (wanted, read)


def test_times_are_measured(answers: dict[str, Any]) -> None:
    """And printed (`-s`): first text, everything drawn, a key to other strips, a text to its whole output."""
    for name, answer in answers.items():
        print(f"{name}: {answer['times']}")
        assert set(answer["times"]) == {"paint", "all", "key", "text"}
        assert 0 < answer["times"]["paint"] <= answer["times"]["all"]


def test_the_page_is_small_and_asks_for_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    code = re.findall(r"<style>.*?</style>|<script>.*?</script>", text, re.S)
    assert len("".join(code).encode()) < MOST_CODE
    assert not re.search(
        r"\beval\(|new Function|\bfetch\(|XMLHttpRequest|https?://", "".join(code).replace("http://www.w3.org/", "")
    )


def shown_by(page: Path) -> tuple[dict[str, float], str]:
    """What headless Chromium makes of a page: numbers that have a name, and its text as HTML."""
    chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([chromium, *flags, page.as_uri()], capture_output=True, text=True, timeout=SECONDS)
    named = re.findall(r'data-name="([^"]*)" data-derived="([^"]*)"', done.stdout)
    return {name: float(value) for name, value in named}, done.stdout


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x - x.max(axis=0)) / np.exp(x - x.max(axis=0)).sum(axis=0)


@pytest.mark.parametrize("name", ["bert-classes", "bert-tokens", "bert-spans", "bert-pooled", "bert-hidden"])
def test_what_heads_give_stands_on_the_page(name: str, tmp_path: Path) -> None:
    """Shares of labels, the span of an answer, the length of a vector are those of the reference."""
    folder = head_model({"bert-pooled": "bert"}.get(name, name), tmp_path)
    explain(folder, ["a good film ."], out=tmp_path / "page.html")
    shown, html = shown_by(tmp_path / "page.html")
    opened = open_checkpoint(folder)
    ids = Tokenizer.load(folder / "tokenizer.json").encode("a good film .")
    [out] = Reference(opened.config, dict(opened.tensors()))(np.array([ids]))
    at = len(ids) - 2  # where the page looks at first
    kind = opened.config.head.kind
    if kind == "spans":
        start, end = softmax(out).T
        best = max(start[a] * end[b] for a in range(len(ids)) for b in range(a, len(ids)))
        wanted = {f"{side} {n}": p for side, each in (("start", start), ("end", end)) for n, p in enumerate(each)}
        wanted["span"] = best
    elif opened.config.head.labels:
        row = out if kind == "classes" else out[at]
        wanted = {f"share {n}": p for n, p in enumerate(softmax(row))}
        assert opened.config.head.labels[int(row.argmax())] in html
    else:
        wanted = {"length": float(np.linalg.norm(out if kind == "pooled" else out[at]))}
    assert {key: shown.get(key) for key in wanted} == pytest.approx(wanted, abs=1e-6)
    assert "kind of token" in html
    assert "This model shows no encoder" not in html
    assert ('class="name">one more dense layer' in html) == (opened.config.head.activation is not None)
