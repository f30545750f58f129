"""Fixed scales from text: what is calibrated on and recorded, when a scale a token stays, and for which models."""

import dataclasses
import json

import numpy as np
import pytest
from combined import thinned
from random_models import random_weights
from small_models import alone, encoder_decoder

from export import OnnxTransformer, export_onnx, export_search
from export.package import fixed_scales
from export.package.fixed_scales import CalibrationText, observe
from export.package.quality import LIMITS, Limits
from export.search.metadata import SCALES
from export.validate import compare
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.int8_scales import INT8_SCALES, SIGNED, UNSIGNED, multiplied_names, read_int8_scales
from mlx_transformer.data.corpus import read_text_lines
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

LINES = ["one small dog", "two dogs and a cat", "a cat", "the house of the cat", "one", "and two", "", "small house"]
NEVER, ALWAYS = Limits(1.01, 100.0, 100.0, 0.0), Limits(0.0, 100.0, 100.0, 100.0)
TOKENIZER = Tokenizer.train(LINES, vocab_size=270)
MODELS = {
    "encoder-decoder": encoder_decoder("paper"),
    "recurrent": encoder_decoder("decoder_self_attention=ssru"),
    "decoder": alone("modern", "decoder"),
    "encoder": alone("untied", "encoder"),
}


@pytest.fixture(params=thinned(MODELS, 3))
def run(request, tmp_path):
    """A run's folder with a model, whose record names a validation text."""
    return made(tmp_path / "run", MODELS[request.param])


@pytest.fixture
def translator(tmp_path):
    return made(tmp_path / "run", MODELS["encoder-decoder"])


def made(folder, config, most=1):
    """most: layers of a stack"""
    sizes = dict.fromkeys(("vocab_size", "source_vocab_size"), TOKENIZER.vocab_size)
    layers = {name: min(most, getattr(config, name)) for name in ("encoder_layers", "decoder_layers")}
    config = dataclasses.replace(config, **sizes, **layers)
    save_checkpoint(folder / "model", config, random_weights(config, 3), TOKENIZER.to_json())
    both = config.architecture == "encoder-decoder"
    names = {"valid_source": "valid.src", "valid_target": "valid.tgt"} if both else {"valid_text": "valid.txt"}
    for name in names.values():
        (folder / name).write_text("\n".join(LINES) + "\n", encoding="utf-8")
    record(folder, {key: str(folder / name) for key, name in names.items()})
    return folder


def record(folder, names):
    if "valid_text" in names:
        from mlx_transformer.data.documents import read_documents

        digests = read_documents(names["valid_text"])[0].digests
    else:
        digests = {"source": read_text_lines(names["valid_source"])[1]}
    values = {"recipe": {"data": {**names, "train_pairs": 1}, "training": {"seed": 0}}, "data": {"valid": digests}}
    (folder / "run.json").write_text(json.dumps(values), encoding="utf-8")
    return digests


def described(folder):
    return json.loads((folder / "mlx_transformer.json").read_text(encoding="utf-8"))["precisions"]["int8"]


def test_the_runs_validation_text_is_the_default(run, tmp_path, monkeypatch):
    monkeypatch.setitem(LIMITS, "int8", ALWAYS)
    told = []
    folder = export_onnx(run, tmp_path / "onnx", precision="int8", log=told.append)
    config = open_checkpoint(run).config
    scales = read_int8_scales(folder, config)
    assert all(scales.of(name).activation for name in multiplied_names(config))
    said = described(folder)
    assert (said["scales"], said["calibration"]) == ("fixed", {**scales.origin})
    values = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert scales.origin["sha256"] in values["data"]["valid"].values()
    assert scales.origin["text"].startswith("valid.")
    assert (scales.origin["sentences"], scales.origin["judged_sentences"]) == (4, 3)  # of seven that aren't empty
    assert any("fixed scales from 4 lines of valid." in line for line in told)
    report = compare(run, folder, ["onnxruntime"], seed=5, longest=6, threads=1, searches=False)
    assert report.equal, report.failures()


def test_what_was_seen_is_what_came(translator, tmp_path):
    """The largest activation in front of a product, against the graph that computes it."""
    opened = open_checkpoint(translator)
    (tmp_path / "graphs").mkdir()
    row = TOKENIZER.encode(LINES[1])
    sites = observe(opened, tmp_path / "graphs", [row], [row[:-1]])
    assert sites.keys() == multiplied_names(opened.config)
    folder = export_onnx(translator, tmp_path / "onnx")
    memory = OnnxTransformer(folder, threads=1).encode([row])
    largest = np.concatenate(sites["decoder.layers.0.cross_attention.key_proj.weight"].largest)
    np.testing.assert_allclose(largest, np.abs(memory[0]).max(axis=1), rtol=1e-5)
    down = sites["encoder.layers.0.feed_forward.down_proj.weight"]
    assert down.positive
    assert down.scales(100.0).steps == UNSIGNED
    up = sites["encoder.layers.0.feed_forward.up_proj.weight"]
    assert up.scales(100.0).steps == SIGNED
    assert up.scales(100.0).activation == np.float32(127 / np.concatenate(up.largest).max())
    assert up.scales(50.0).activation > up.scales(100.0).activation


def test_beyond_the_limits_each_token_keeps_its_scale(translator, tmp_path, monkeypatch):
    plain = export_onnx(translator, tmp_path / "token", precision="int8", int8_scales="token")
    assert "scales" not in described(plain)
    monkeypatch.setitem(LIMITS, "int8", NEVER)
    told = []
    folder = export_onnx(translator, tmp_path / "onnx", precision="int8", log=told.append)
    assert "scales" not in described(folder)
    assert not (folder / INT8_SCALES).exists()
    assert any(line.startswith("int8: a scale a token: with fixed ones from valid.src") for line in told)
    for path in (plain / "onnx").iterdir():
        if path.suffix == ".onnx":
            assert path.read_bytes() == (folder / "onnx" / path.name).read_bytes()
    with pytest.raises(UserError, match=r"fixed scales from it lose too much: .* of the best tokens"):
        export_onnx(translator, tmp_path / "never", precision="int8", int8_scales="fixed")
    assert not (tmp_path / "never").exists()
    accepted = export_onnx(translator, tmp_path / "all", precision="int8", int8_scales="fixed", accept_loss=True)
    assert described(accepted)["scales"] == "fixed"


@pytest.mark.fast("1.0")
@pytest.mark.parametrize("more_lost", [1.0, -1.0])
def test_an_encoders_attention_has_them_where_it_keeps_as_many_neighbours(more_lost, tmp_path, monkeypatch):
    """More than all, or less than none, of what a scale a token keeps."""
    run = made(tmp_path / "run", MODELS["encoder"])
    monkeypatch.setitem(LIMITS, "int8", NEVER)
    monkeypatch.setattr(fixed_scales, "MORE_LOST", more_lost)
    told = []
    folder = export_onnx(run, tmp_path / "onnx", precision="int8", target="cpu", log=told.append)
    if more_lost < 0:
        assert "scales" not in described(folder)
        assert any(line.startswith("int8: a scale a token: with fixed ones from valid.txt") for line in told)
        return
    config = open_checkpoint(run).config
    scales = read_int8_scales(folder, config)
    fixed = {name for name in multiplied_names(config) if scales.of(name).activation}
    assert fixed == {name for name in multiplied_names(config) if "self_attention" in name}
    assert not any(scales.of(name).weight for name in multiplied_names(config))
    assert any(line.startswith("int8: fixed scales in attention, a scale a token elsewhere") for line in told)
    report = compare(run, folder, ["onnxruntime"], seed=5, longest=6, threads=1, searches=False)
    assert report.equal, report.failures()
    with pytest.raises(UserError, match="fixed scales from it lose too much"):  # all of them were asked for
        export_onnx(run, tmp_path / "all", precision="int8", target="cpu", int8_scales="fixed")


@pytest.mark.slow
def test_a_text_may_be_given(translator, tmp_path, monkeypatch):
    monkeypatch.setitem(LIMITS, "int8", ALWAYS)
    text = tmp_path / "mine.txt"
    text.write_text("a dog\nthe cat\n", encoding="utf-8")
    folder = export_onnx(translator, tmp_path / "onnx", precision="int8", calibrate=text)
    origin = described(folder)["calibration"]
    assert (origin["text"], origin["sentences"], origin["sha256"]) == ("mine.txt", 1, read_text_lines(text)[1])
    file = export_search(translator, tmp_path / "s.onnx", precision="int8", calibrate=text)
    import onnx

    (said,) = (entry.value for entry in onnx.load(file).metadata_props if entry.key == SCALES)
    assert said == (folder / INT8_SCALES).read_text(encoding="utf-8")


def test_a_checkpoint_brings_its_own(translator, tmp_path, monkeypatch):
    monkeypatch.setitem(LIMITS, "int8", ALWAYS)
    first = export_onnx(translator, tmp_path / "first", precision="int8")
    (translator / "model" / INT8_SCALES).write_bytes((first / INT8_SCALES).read_bytes())
    (translator / "run.json").unlink()
    told = []
    second = export_onnx(translator, tmp_path / "second", precision="int8", log=told.append)
    assert (second / INT8_SCALES).read_bytes() == (first / INT8_SCALES).read_bytes()
    assert any(str(translator / "model" / INT8_SCALES) in line for line in told)


def test_without_text_nothing_is_fixed(translator, tmp_path):
    (translator / "valid.src").write_text("another text\n" * len(LINES), encoding="utf-8")
    told = []
    folder = export_onnx(translator, tmp_path / "changed", precision="int8", log=told.append)
    assert "scales" not in described(folder)
    assert any("valid.src: is another text than the run's" in line for line in told)
    (translator / "run.json").unlink()
    assert "scales" not in described(export_onnx(translator, tmp_path / "none", precision="int8"))
    with pytest.raises(UserError, match=r"nothing to take fixed scales from: .* give text with --calibrate FILE"):
        export_onnx(translator, tmp_path / "fixed", precision="int8", int8_scales="fixed")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "int4", "int8_scales": "fixed"}, "precision int4 has no choice; int8 has one"),
        ({"precision": "float32", "calibrate": "x"}, "precision float32 has no choice; int8 has one"),
        ({"precision": "int8", "int8_scales": "token", "calibrate": "x"}, "nothing is calibrated: leave out one"),
        ({"precision": "int8", "calibrate": "no such file"}, "no such file"),
    ],
)
def test_what_makes_no_sense_is_refused(translator, tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        export_onnx(translator, tmp_path / "onnx", **changes)
    assert not (tmp_path / "onnx").exists()


@pytest.mark.slow
def test_the_percentile_of_the_better_tokens_is_taken(tmp_path, monkeypatch):
    translator = made(tmp_path / "run", MODELS["encoder-decoder"], most=2)
    monkeypatch.setitem(LIMITS, "int8", ALWAYS)
    monkeypatch.setattr(fixed_scales, "PERCENTILES", (1.0, 100.0))  # the first cuts nearly everything
    folder = export_onnx(translator, tmp_path / "onnx", precision="int8")
    assert described(folder)["calibration"]["percentile"] == 100.0


def test_one_line_is_calibrated_on_and_judged():
    lines, judged = CalibrationText(["", "a"], ["", "b"], "x", "").parts()
    assert (lines, judged.source, judged.reference) == (["a"], ["a"], ["b"])
