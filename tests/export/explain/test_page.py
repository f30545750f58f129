"""The page as a file: its size, that it needs nothing else, what is refused, and that nothing else is lost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from explained_models import data_of, unpacked, write_explained
from random_models import random_weights
from waiting import PATIENCE
from without_mlx import WITHOUT_MLX

from export import export_search
from export.explain.command import explain
from export.explain.content import bits_for, content, packed, packed_difference
from export.explain.page import ROOM, page, walked
from export.explain.sentence import KINDS, ExplainedSentence, Trace
from export.validate.opening import Opened
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

TEXT = "one two three. four"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_explained(tmp_path_factory.mktemp("both"), "encoder-decoder")


class Engine:
    """What a page asks of an engine."""

    device, precision = "cpu", "float32"

    def __init__(self, config, length):
        self.config, self.length = config, length

    def details(self):
        return {}

    def parameters(self):
        for name, shape in parameter_shapes(self.config).items():
            if "norm" in name:
                yield "", name, np.ones(shape, "f4")

    def points(self, case, names):
        c, n = self.config, self.length
        heads = {"queries": (c.heads, n, c.d_k), "keys": (c.heads, n, c.d_k), "values": (c.heads, n, c.d_v)}
        heads |= {"scores": (c.heads, n, n), "weights": (c.heads, n, n), "logits": (n, c.vocab_size)}
        rng, wide = np.random.default_rng(1), {"up_proj": (n, c.d_ff), "inner": (n, c.d_ff)}
        shapes = {name: (heads | wide).get(name.rpartition(".")[2], (n, c.d_model)) for name in names}
        return {name: rng.normal(size=(1, *shape)).astype("f4") for name, shape in shapes.items()}


def base_page(models: int) -> str:
    """The page of a model as the paper's base, a source of 20 words of 30 tokens and as many written ones."""
    tokenizer = Tokenizer.train([TEXT * 3], vocab_size=270)
    vocabulary, length = tokenizer.vocab_size, 30
    config = TransformerConfig(
        vocab_size=vocabulary, d_model=512, heads=8, encoder_layers=6, decoder_layers=6, d_ff=2048
    )
    rng = np.random.default_rng(0)
    parts = (".self_attention", ".cross_attention", ".feed_forward", "")
    names = [f"{stack}.layers.{i}{part}" for stack in ("encoder", "decoder") for i in range(6) for part in parts]
    points = {name: rng.normal(size=(length, 512)).astype("f4") for name in names}
    logits = rng.normal(size=(length, vocabulary)).astype("f4")

    def one() -> Trace:
        weights = {kind: rng.dirichlet(np.ones(length), (6, 8, length)).astype("f4") for kind in KINDS}
        return Trace(points, weights, logits, {f"decoder.layers.{i}": logits for i in range(6)})

    opened = [Opened(Path(f"base-{i}"), "mlx", Engine(config, length), config, tokenizer) for i in range(models)]
    ids = tuple(int(i) for i in rng.integers(4, vocabulary, length))
    sentence = ExplainedSentence(TEXT, ids, ids, ids, 0, TEXT)
    data = content(opened, sentence, [one() for _ in opened], 5)
    return page([walked(opened[0], sentence, ROOM - len(json.dumps(data)))], data)


def test_two_base_models_and_twenty_words_stay_under_three_megabytes():
    assert 100_000 < len(base_page(2).encode()) < 3_000_000


def test_the_page_asks_no_other_host(place, tmp_path):
    explain(place / "onnx", [TEXT], out=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    text = re.sub(r'id="data">.*?</script>', "", text, flags=re.S).replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://|['\"]//|\bsrc=|@import|url\(|fetch\(|XMLHttp", text) == []


def test_text_is_no_markup(place, tmp_path):
    text = "one </script><blink>two</blink>"
    explain(place / "onnx", [text], out=tmp_path / "page.html", translation="<i>")
    assert data_of(tmp_path / "page.html")["text"] == text
    assert "<blink>" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_numbers_survive_their_packing():
    weights = np.random.default_rng(0).dirichlet(np.ones(9), (2, 3, 7)).astype(np.float32)
    for bits in (8, 16):
        back = unpacked(packed(weights, bits), bits, weights.shape)
        assert np.abs(back - weights).max() <= 0.5 / (2**bits - 1) * (1 + 1e-9)
    ahead = np.tril(weights[..., :7])  # no row looks ahead: half of the cells are held
    assert len(packed(ahead, 8)) < 0.6 * len(packed(ahead + 1e-3, 8))
    assert np.abs(unpacked(packed(ahead, 16), 16, ahead.shape) - ahead).max() <= 0.5 / (2**16 - 1) * (1 + 1e-9)
    found = packed_difference(weights, weights[::-1])
    largest = np.abs(weights[::-1].astype(float) - weights).max(axis=(2, 3))
    np.testing.assert_allclose(found["largest"], largest, rtol=0.5e-3)


def test_room_of_a_page():
    assert bits_for(100_000, 1, 30) == 16
    assert bits_for(1_000_000, 1, 80) == 8
    with pytest.raises(UserError, match="shorten the text to about 1"):
        bits_for(2_000_000, 2, 200)


def test_what_cannot_be_explained(place, tmp_path):
    out = {"out": tmp_path / "page.html"}
    exported, model = place / "onnx", place / "model"

    def refused(said: str, folder, texts, **options) -> None:
        with pytest.raises(UserError, match=said):
            explain(folder, texts, **{**out, **options})
        assert not out["out"].exists()

    refused("takes one sentence in quotes; 2 of them", exported, ["one", "two"])
    refused("the sentence is empty", exported, [" "])
    refused("has 49 tokens, .* takes at most 40", exported, ["one two " * 12])
    refused("the target has .* at most 40", exported, [TEXT], translation="one two " * 12)
    refused("exclude each other", exported, [TEXT], translation="one", beam=2)
    refused("top_k=0", exported, [TEXT], top_k=0)
    refused("beam", exported, [TEXT], beam=0)
    refused("no such folder", place / "none", [TEXT])
    refused("runtime 'tpu'", exported, [TEXT], runtime="tpu")
    refused("is an ONNX folder; runtime mlx needs", exported, [TEXT], runtime="mlx")
    refused("is a checkpoint; runtime onnxruntime needs", model, [TEXT], runtime="onnxruntime")
    refused("threads is for ONNX folders", model, [TEXT], threads=2)
    refused("exclude each other", exported, [TEXT], precision="int8", runtime="onnxruntime")
    refused("int8", exported, [TEXT], precision="int8")
    refused("is a checkpoint; runtime onnxruntime", model, [TEXT], precision="int8")
    other = write_explained(tmp_path / "wide", "encoder-decoder", heads=2)
    refused("heads=2, .* has heads=4|heads=2, .* has 4", exported, [TEXT], beside=str(other / "onnx"))
    alone = write_explained(tmp_path / "alone", "encoder")
    refused("another vocabulary", exported, [TEXT], beside=str(alone / "onnx"))
    refused("encoder alone, which writes nothing", alone / "onnx", [TEXT], translation="one")
    shutil.copytree(exported, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    refused("has no tokenizer.json", tmp_path / "bare", [TEXT], verify=False)
    export_search(model, tmp_path / "one.onnx")
    refused("is a file, which shows nothing", tmp_path / "one.onnx", [TEXT])


def test_graphs_that_name_nothing_inside(place, tmp_path):
    folder = shutil.copytree(place / "onnx", tmp_path / "unnamed")
    for path in folder.rglob("decoder_model.onnx"):
        graph = onnx.load(path, load_external_data=False)
        for node in graph.graph.node:
            node.name = ""
        onnx.save(graph, path)
    with pytest.raises(UserError, match="don't name what is inside"):
        explain(folder, [TEXT], out=tmp_path / "page.html", verify=False)


def test_weights_that_are_not_finite(place, tmp_path):
    opened = open_checkpoint(place / "model")
    weights = {name: array * 1e30 for name, array in random_weights(opened.config, 3).items()}
    save_checkpoint(tmp_path / "model", opened.config, weights, opened.tokenizer_json())
    with pytest.raises(UserError, match="not finite"), np.errstate(all="ignore"):
        explain(tmp_path / "model", [TEXT], out=tmp_path / "page.html", runtime="reference")


def test_nothing_of_another_kind_is_replaced(place, tmp_path):
    other, out = tmp_path / "notes.html", tmp_path / "page.html"
    other.write_text("mine")
    for force in (False, True):
        with pytest.raises(UserError, match="holds no page of explain"):
            explain(place / "onnx", [TEXT], out=other, force=force)
    assert other.read_text(encoding="utf-8") == "mine"
    explain(place / "onnx", [TEXT], out=out)
    before = out.read_bytes()
    with pytest.raises(UserError, match="--force to replace"):
        explain(place / "onnx", ["four"], out=out)
    assert out.read_bytes() == before
    explain(place / "onnx", ["four"], out=out, force=True)
    assert data_of(out)["text"] == "four"
    with pytest.raises(UserError, match="is a folder"):
        explain(place / "onnx", [TEXT], out=tmp_path)


def test_damage_is_found_before_anything_is_drawn(place, tmp_path):
    folder = shutil.copytree(place / "onnx", tmp_path / "damaged")
    [data] = folder.rglob("model.onnx_data")
    content = bytearray(data.read_bytes())
    content[1000] ^= 1
    data.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        explain(folder, [TEXT], out=tmp_path / "page.html")


def test_without_mlx_a_checkpoint_is_computed_by_the_reference(place, tmp_path):
    out = tmp_path / "page.html"
    script = f"""{WITHOUT_MLX}
import importlib.util

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "mlx" else find_spec(name, package)
from export.__main__ import main
raise SystemExit(main(["explain", {str(place / "model")!r}, "four five", "--out", {str(out)!r}, "--beam", "2"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, encoding="utf-8", timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    data = data_of(out)
    assert data["runtimes"] == ["NumPy reference"]
    assert data["beam"]["token"]


@pytest.mark.slow  # which draws two dozen files
def test_figures(place, tmp_path):
    assert find_spec("matplotlib") is not None, "make setup-dev installs it"
    figures, exported = tmp_path / "figures", place / "onnx"
    out = {"out": tmp_path / "page.html", "figures": figures}
    said = explain(exported, ["one two"], beam=2, max_new_tokens=4, beside=str(place / "model"), **out)
    assert said.endswith("figures: 12 figures")
    names = "heads-encoder heads-decoder heads-cross alignment predictions beam lens norms-encoder norms-decoder"
    apart = "difference-encoder difference-decoder difference-cross"
    expected = {f"{name}.{kind}" for name in f"{names} {apart}".split() for kind in ("png", "svg")}
    assert {path.name for path in figures.iterdir()} == expected
    assert all((figures / name).read_bytes().startswith((b"\x89PNG", b"<?xml")) for name in expected)
    with pytest.raises(UserError, match="--force"):
        explain(exported, ["one two"], **{**out, "out": tmp_path / "b.html"})
    (figures / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="holds files that are no set of figures"):
        explain(exported, ["one two"], force=True, **out)
    assert (figures / "mine.txt").exists()


def test_figures_without_matplotlib(place, tmp_path, monkeypatch):
    monkeypatch.setattr("export.explain.figures.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs matplotlib.*\[plots\]"):
        explain(place / "onnx", [TEXT], out=tmp_path / "page.html", figures=tmp_path / "figures")
    assert not (tmp_path / "page.html").exists()


def test_the_numbers_are_json_that_any_reader_takes(place, tmp_path):
    explain(place / "onnx", [TEXT], out=tmp_path / "page.html", translation="größer 東京")
    data = data_of(tmp_path / "page.html")
    json.dumps(data, allow_nan=False)
    assert any(re.search(r"[東京] \d/\d", text) for text in data["pieces"]["target"]), (
        "a part of a character, with its share"
    )
    assert not any("æ" in text for text in (*data["texts"].values(), *data["pieces"]["target"])), "bytes"
