"""What the stations of the walk say, drawn by the page's scripts in Node."""

from __future__ import annotations

import json
import re
from html import unescape

from shipped_models import DECODER, TIRED, TRANSLATOR
from walk import plain, stations


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
