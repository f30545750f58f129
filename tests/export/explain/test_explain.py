"""What a page of `explain` shows is what the model computed, for every architecture, in every runtime."""

from __future__ import annotations

import re

import numpy as np
import pytest
from combined import combined
from copying_model import write_copying_model
from explained_models import data_of, unpacked, write_explained

from export.explain.command import explain
from export.explain.sentence import KINDS, norms, probabilities, read_sentence, trace
from export.validate.opening import open_model
from mlx_transformer.core.parameters import output_weight_name
from mlx_transformer.decoding.options import Options
from mlx_transformer.generation.alignment import alignment_layer, pharaoh, word_links, words_of
from mlx_transformer.system.errors import UserError

TEXT = "one two three. four"
ARCHITECTURES = ("encoder-decoder", "decoder", "encoder")
ROUNDED = 0.5e-3
"""Relative error of a number of four digits."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: write_explained(tmp_path_factory.mktemp(name), name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def copying(tmp_path_factory):
    return write_copying_model(tmp_path_factory.mktemp("copying"))


def weights_of(data, kind, model=0):
    shown = data["maps"]["kinds"][kind]
    return unpacked(shown["values"][model], data["maps"]["bits"], tuple(shown["shape"]))


def test_a_decoder_without_self_attention_says_so(models, tmp_path):
    folder = write_explained(tmp_path / "recurrent", "encoder-decoder", decoder_self_attention="ssru")
    for kind in ("model", "onnx"):
        explain(folder / kind, [TEXT], out=tmp_path / f"{kind}.html")
        assert data_of(tmp_path / f"{kind}.html")["maps"]["kinds"].keys() == {"encoder", "cross"}
        assert "This decoder has no self-attention" in (tmp_path / f"{kind}.html").read_text(encoding="utf-8")
    explain(models["encoder-decoder"] / "model", [TEXT], out=tmp_path / "attention.html")
    assert "This decoder has no self-attention" not in (tmp_path / "attention.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"decoder_self_attention='ssru', .* has 'attention'; maps of these can't be"):
        explain(models["encoder-decoder"] / "model", [TEXT], out=tmp_path / "both.html", beside=str(folder / "model"))


@pytest.mark.slow
def test_nor_has_it_a_figure_of_that(tmp_path):
    folder = write_explained(tmp_path / "recurrent", "encoder-decoder", decoder_self_attention="ssru")
    explain(folder / "model", [TEXT], out=tmp_path / "page.html", figures=tmp_path / "figures")
    assert (tmp_path / "figures" / "heads-cross.svg").is_file()
    assert not (tmp_path / "figures" / "heads-decoder.svg").exists()


@pytest.mark.parametrize(("architecture", "folder"), combined(ARCHITECTURES, ["model", "onnx"]))
def test_the_page_shows_the_models_numbers(models, architecture, folder, tmp_path):
    text = "one two <mask> four" if architecture == "encoder" else TEXT
    said = explain(models[architecture] / folder, [text], out=tmp_path / "page.html", top_k=4)
    assert re.fullmatch(r".*page\.html: 0\.\d\d MB", said)
    data = data_of(tmp_path / "page.html")
    model = open_model(models[architecture] / folder)
    sentence = read_sentence(model, [text], None, Options(max_new_tokens=20 if architecture == "decoder" else None))
    assert data["sides"].keys() == {s for s in ("source", "target") if getattr(sentence, s)}
    for side in data["sides"]:
        assert data["sides"][side]["ids"] == list(getattr(sentence, side))
    found = trace(model, sentence)
    assert data["maps"]["bits"] == 16
    named = {kind: shown["named"] for kind, shown in data["maps"]["kinds"].items()}
    by = {"encoder": ["source", "source"], "decoder": ["target", "read"], "cross": ["target", "source"]}
    assert named == {kind: by[kind] for kind in named}
    stacks = {"encoder-decoder": {*KINDS}}.get(architecture, {architecture})
    assert data["maps"]["kinds"].keys() == found.weights.keys() == stacks
    for kind, weights in found.weights.items():
        shown = weights_of(data, kind)
        half_step = 0.5 / 65535
        assert np.abs(shown - weights).max() <= half_step * (1 + 1e-9)
        assert np.abs(shown.sum(axis=-1) - 1).max() <= shown.shape[-1] * (half_step + 2**-24)
    p = probabilities(found.logits)
    for i, step in enumerate(data["steps"]["of"][0]):
        assert step["ids"] == np.argsort(-p[i], kind="stable")[:4].tolist()
        np.testing.assert_allclose(step["p"], p[i, step["ids"]], rtol=ROUNDED)
        np.testing.assert_allclose(step["written"], p[i, sentence.written[i]], rtol=ROUNDED)
        assert step["rank"] == 1 + (p[i] > p[i, sentence.written[i]]).sum()
        assert step["given"] is (i < sentence.prompted)
    for name, values in norms(found.points).items():
        np.testing.assert_allclose(data["norms"][0][name], values, rtol=ROUNDED)
    assert len(data["lens"]["of"][0]) == 1 + (model.config.decoder_layers or model.config.encoder_layers)
    assert {*data["texts"]} >= {str(id) for id in data["written"]}


def test_a_decoder_continues_and_an_encoder_fills(models, tmp_path):
    explain(models["decoder"] / "onnx", ["one two"], out=tmp_path / "decoder.html", max_new_tokens=5)
    data = data_of(tmp_path / "decoder.html")
    ids = data["sides"]["target"]["ids"]
    assert data["text"] == "one two"
    assert ids[0] == 1
    assert ids[1:] == data["written"][:-1]
    assert [step["given"] for step in data["steps"]["of"][0]].count(False) == 5
    assert all(step["rank"] == 1 for step in data["steps"]["of"][0] if not step["given"])  # greedy
    explain(models["encoder"] / "onnx", ["one <mask> three"], out=tmp_path / "encoder.html")
    data = data_of(tmp_path / "encoder.html")
    assert "▢" in data["pieces"]["source"]
    assert data["pieces"]["source"][-1] == "end"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_runtimes_beside_each_other(models, architecture, tmp_path):
    place = models[architecture]
    explain(place / "model", [TEXT], out=tmp_path / "page.html", beside=str(place / "onnx"))
    data = data_of(tmp_path / "page.html")
    assert data["runtimes"] == ["model: MLX, CPU", "onnx: ONNX Runtime, CPU"]
    opened = [open_model(place / name) for name in ("model", "onnx")]
    sentence = read_sentence(opened[0], [TEXT], None, Options(max_new_tokens=20 if architecture == "decoder" else None))
    first, second = (trace(each, sentence) for each in opened)
    for kind, shown in data["maps"]["kinds"].items():
        apart = second.weights[kind].astype(np.float64) - first.weights[kind]
        largest = np.abs(apart).max(axis=(2, 3))
        np.testing.assert_allclose(shown["difference"]["largest"], largest, rtol=ROUNDED)
        assert 0 < largest.max() < 1e-5
    for first_steps, second_steps in zip(*data["steps"]["of"], strict=True):
        assert first_steps["ids"][0] == second_steps["ids"][0]


def test_another_runtime_of_the_same_folder(models, tmp_path):
    place = models["encoder-decoder"]
    explain(place / "model", [TEXT], out=tmp_path / "a.html", beside="reference")
    assert data_of(tmp_path / "a.html")["runtimes"] == ["MLX, CPU", "NumPy reference"]
    explain(place / "onnx", [TEXT], out=tmp_path / "b.html", beside="onnx:cpu:none")
    assert data_of(tmp_path / "b.html")["runtimes"] == ["ONNX Runtime, CPU"] * 2


@pytest.mark.parametrize("runtime", ["mlx", "reference", "onnxruntime"])
def test_a_copying_models_alignment_is_the_diagonal(copying, runtime, tmp_path):
    folder = copying / ("onnx" if runtime == "onnxruntime" else "model")
    text = "seven eight nine ten"
    explain(folder, [text], out=tmp_path / "page.html", runtime=runtime)
    data = data_of(tmp_path / "page.html")
    assert data["output"] == text
    assert data["layer"] == alignment_layer(open_model(folder).config) == 1
    cross = weights_of(data, "cross")
    length = len(data["written"])
    for layer in cross.mean(axis=1):
        np.testing.assert_array_equal(layer.argmax(axis=-1), np.arange(length))
    words = data["sides"]["source"]["words"]
    assert words == [0, 0, 0, 1, 2, 3, None]
    tokenizer = open_model(folder).tokenizer
    links = word_links(cross[1].mean(axis=0), words, words_of(tokenizer, data["written"]))
    assert pharaoh(links) == "0-0 1-1 2-2 3-3"


def test_the_lens_ends_in_the_logits(models):
    """The last layer of a post-norm stack is what the classifier reads."""
    model = open_model(models["encoder-decoder"] / "model")
    sentence = read_sentence(model, [TEXT], "four five", Options())
    found = trace(model, sentence)
    *_, last = found.lens.values()
    x = found.points["decoder.layers.2"]
    matrix = dict(part[1:] for part in model.engine.parameters())[output_weight_name(model.config)]
    bound = 2 * x.shape[-1] * 2**-24 * (np.abs(x).astype(np.float64) @ np.abs(matrix).T)
    assert (np.abs(last.astype(np.float64) - found.logits) <= bound).all()
    assert list(found.lens) == ["decoder.embedding", *(f"decoder.layers.{i}" for i in range(3))]


@pytest.mark.parametrize("name", ["model", "onnx"])
def test_the_tree_of_a_beam_search(models, name, tmp_path):
    folder = models["encoder-decoder"] / name
    explain(folder, [TEXT], out=tmp_path / "page.html", beam=3, max_new_tokens=9)
    data = data_of(tmp_path / "page.html")
    tree, model = data["beam"], open_model(folder)
    [(ids, score)] = model.engine.search([model.tokenizer.encode(TEXT)], Options(beam=3, max_new_tokens=9))
    assert data["score"] == float(f"{score:.4g}")
    ended = [i for i, fate in enumerate(tree["fate"]) if fate == "f"]
    node, path = max(ended, key=lambda i: tree["score"][i]), []
    while node >= 0:
        path.append(tree["token"][node])
        assert tree["parent"][node] < node
        node = tree["parent"][node]
    path.reverse()
    assert [id for id in path if id != model.config.eos_id] == ids == [i for i in data["written"] if i != 2]
    for step in range(9):
        fates = [fate for fate, t in zip(tree["fate"], tree["step"], strict=True) if t == step]
        assert fates.count("k") <= 3
        assert len(fates) <= 6
    steps = np.log([step["written"] for step in data["steps"]["of"][0]])
    logs = [tree["log_p"][i] for i in ended if tree["score"][i] == data["score"]]
    assert min(abs(steps.sum() - log_p) for log_p in logs) <= (len(steps) + abs(steps.sum())) * ROUNDED


def test_a_given_target_is_followed(models, tmp_path):
    explain(models["encoder-decoder"] / "onnx", [TEXT], translation="four five", out=tmp_path / "page.html")
    data = data_of(tmp_path / "page.html")
    tokenizer = open_model(models["encoder-decoder"] / "onnx").tokenizer
    assert data["written"] == tokenizer.encode("four five")
    assert data["sides"]["target"]["ids"] == [1, *data["written"][:-1]]
    assert data["given"] == len(data["written"])
    assert data["beam"] is None
    explain(models["decoder"] / "onnx", ["one"], translation=" two three", out=tmp_path / "decoder.html")
    assert data_of(tmp_path / "decoder.html")["given"] > len(tokenizer.encode(" two three"))
