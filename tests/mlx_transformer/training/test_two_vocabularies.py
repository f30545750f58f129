"""A vocabulary for each language, from the text to every command that reads or writes text."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from claims.trained import open_trained
from explained_models import data_of
from serving import client
from two_vocabularies import LINES, MODEL, recipe, trained, write_text

import mlx_transformer
from export import OnnxTransformer, SearchModel, export_onnx, export_search
from export.explain.command import explain
from export.validate import compare
from mlx_transformer.cli import main
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.core.tokenizer_files import SIDES
from mlx_transformer.data.corpus import PairFiles
from mlx_transformer.data.training_text import load_training
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer
from mlx_transformer.training.data import load_data
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer
from mlx_transformer.training.weights import average_checkpoints

FILES = set(SIDES.values())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def onnx(run, tmp_path_factory):
    return export_onnx(run, tmp_path_factory.mktemp("exported") / "onnx")


@pytest.fixture(scope="module")
def few(run, tmp_path_factory):
    """The first lines of both files."""
    folder = tmp_path_factory.mktemp("few")
    for side in SIDES:
        lines = (run.parent / side).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / side).write_text("".join(lines[:24]), encoding="utf-8")
    return folder


def said(capsys) -> str:
    captured = capsys.readouterr()
    return captured.out + captured.err


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 2
    error = said(capsys)
    assert error.count("\n") == 1
    return error


def test_each_language_has_its_own(run):
    """Learned from its lines alone; the model has a table of embeddings for each."""
    for place in (run, run / "model", run / "checkpoints" / "step-00000040"):
        assert {path.name for path in place.iterdir() if "tokenizer" in path.name} == FILES
    text = load_data(recipe(run.parent)).train.text
    for side, name in SIDES.items():
        learned = Tokenizer.train(getattr(text, side), 300)
        assert (run / "model" / name).read_text(encoding="utf-8") == learned.to_json()
    tokenizer, opened = Tokenizer.load(run), open_checkpoint(run)
    sizes = opened.config.source_vocab_size, opened.config.vocab_size
    assert sizes == (tokenizer.source.vocab_size, tokenizer.vocab_size)
    assert sizes[0] != sizes[1]
    assert opened.config.tie_embeddings == "target-output"
    assert opened.tensor("source_embedding.weight").shape == (sizes[0], 32)


@pytest.mark.parametrize("where", ["memory", "cache", "dropped"])
def test_batches_have_the_ids_of_their_side(where, tmp_path):
    paths = write_text(tmp_path)
    options = {"cache": {"cache": tmp_path / "cache"}, "dropped": {"bpe_dropout": 1e-12}}.get(where, {})
    text, _, _ = load_training([PairFiles(**paths)], None, seed=1, set_aside=False, **options)
    tokenizer = text.tokenizer(300, None, separate=True)
    assert tokenizer.fingerprint == text.tokenizer(300, None, separate=True).fingerprint
    examples = text.examples(tokenizer, 256)
    source, target = examples.rows(np.arange(5), 0)
    for rows, side, own in ((source, "source", tokenizer.source), (target, "target", tokenizer)):
        lines = (tmp_path / side).read_text(encoding="utf-8").splitlines()[:5]
        assert [row.tolist() for row in rows] == own.encode_batch(lines)
    few = text.tokenizer(300, 20, separate=True)
    assert few.source.fingerprint != tokenizer.source.fingerprint


@pytest.mark.slow
def test_a_run_goes_on_with_them(tmp_path):
    whole = Trainer(recipe(tmp_path, steps=6), tmp_path / "whole").run()
    Trainer(recipe(tmp_path, steps=3), tmp_path / "parts").run()
    parts = Trainer(recipe(tmp_path, steps=6), tmp_path / "parts", resume=True).run()
    for name in (*FILES, "model.safetensors"):
        assert (parts.model / name).read_bytes() == (whole.model / name).read_bytes()
    given = {"separate_vocabularies": None, "vocab_size": None, "tokenizer": str(tmp_path / "whole")}
    again = Trainer(recipe(tmp_path, given, steps=1), tmp_path / "given").run()
    data = {key: value for key, value in recipe(tmp_path).to_dict()["data"].items() if key in ("source", "target")}
    training = {"steps": 1, "valid_sentences": 0, "start_from": str(whole.model)}
    further = Trainer(Recipe.from_dict({"data": data, "training": training}), tmp_path / "further").run()
    for result in (again, further):
        assert all((result.model / name).read_bytes() == (whole.model / name).read_bytes() for name in FILES)
    Trainer(recipe(tmp_path, {"separate_vocabularies": None}, steps=1), tmp_path / "parts", force=True).run()
    assert (tmp_path / "parts" / "tokenizer.json").exists()
    assert not any((tmp_path / "parts" / name).exists() for name in FILES)


@pytest.mark.parametrize(
    ("data", "model", "training", "error"),
    [
        ({}, {"tie_embeddings": "all"}, {}, "model.tie_embeddings = 'all' is one table for both languages"),
        ({"tokenizer": "x", "vocab_size": None}, {}, {}, "its folder says whether of each language"),
        ({"source": None, "target": None, "text": "x"}, {}, {"objective": "denoising"}, "separate_vocabularies is for"),
    ],
)
def test_what_makes_no_sense_is_refused(data, model, training, error, tmp_path):
    with pytest.raises(UserError, match=error):
        recipe(tmp_path, data, model, **training)


def test_other_objectives_have_one_vocabulary(run, tmp_path):
    (tmp_path / "text").write_text("alpha beta\ngamma\n" * 60, encoding="utf-8")
    data = {"text": str(tmp_path / "text"), "tokenizer": str(run)}
    values = {"data": data, "model": MODEL, "training": {"objective": "denoising", "steps": 1}}
    with pytest.raises(UserError, match="denoising: needs one vocabulary; this one has two"):
        Trainer(Recipe.from_dict(values), tmp_path / "run")


def test_both_runtimes_read_one_and_write_the_other(run, onnx, few, capsys):
    """Translations, alignments and log-probabilities of MLX and ONNX Runtime; the proof, real text in it."""
    network, tokenizer = mlx_transformer.load(run)
    expected = tokenizer.decode_batch(network.generate(tokenizer.source.encode_batch(LINES)))
    assert any(expected)
    assert expected == OnnxTransformer(onnx, threads=1).translate(LINES)
    aligned, scores = [], []
    for model in (run / "model", onnx):
        main(["translate", str(model), LINES[2], "--alignment"])
        aligned.append(said(capsys))
        main(["score", str(model), "--source", str(few / "source"), "--reference", str(few / "target")])
        scores.append(np.array(said(capsys).split(), float))
    assert aligned[0] == aligned[1]
    targets = tokenizer.encode_batch((few / "target").read_text(encoding="utf-8").splitlines())
    assert len(scores[0]) == sum(len(ids) + 1 for ids in targets)
    assert np.abs(scores[0] - scores[1]).max() < 2e-4  # printed with four digits
    report = compare(run, onnx, seed=1, longest=10, threads=1)
    assert report.equal, report.failures()
    assert any(name.startswith("real text") for name in report.inputs)


def test_commands_that_show_it(run, onnx, few, tmp_path, capsys):
    main(["evaluate", str(run), "--source", str(few / "source"), "--reference", str(few / "target")])
    assert json.loads(capsys.readouterr().out)["lines"] == 24
    tokenizer = Tokenizer.load(run)
    for folder in (run, onnx):
        main(["info", str(folder)])
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert f"source {tokenizer.source.vocab_size} tokens, target {tokenizer.vocab_size}" in shown
        explain(folder, [LINES[0]], out=tmp_path / f"{folder.name}.html", top_k=3)
        data = data_of(tmp_path / f"{folder.name}.html")
        texts = {side: [data["texts"][str(id)] for id in data["sides"][side]["ids"]] for side in ("source", "target")}
        assert "".join(texts["source"][:-1]) == LINES[0]
        assert texts["target"][0] == "start"
        assert data["output"] == OnnxTransformer(onnx, threads=1).translate([LINES[0]])[0]
        written = "".join(data["texts"][str(id)] for id in data["written"]).removesuffix("</s>")
        assert written == data["output"]


def test_it_is_served(onnx):
    model = OnnxTransformer(onnx, threads=1)
    expected = model.translate(LINES)
    with client(model) as (http, _):
        assert http.post("/translate", json={"text": LINES}).json() == {"translations": expected}
    assert "".join(model.stream(LINES[0])) == expected[0]


@pytest.mark.slow
def test_it_is_judged_and_compared(run, few, tmp_path, capsys):
    """The quality gate and `compare` feed each model the source's ids: float32 is equal to itself, and int8 near."""
    text = ["--gate-source", str(few / "source"), "--gate-reference", str(few / "target")]
    options = ["--precision", "int8", "--precision", "float32", "--accept-loss"]
    main(["export", str(run), str(tmp_path / "int8"), *options, *text])
    agreement = re.search(r"int8: ([\d.]+)% of the best tokens", said(capsys))
    assert agreement is not None
    assert float(agreement[1]) > 90
    source, page = str(few / "source"), str(tmp_path / "page.html")
    main(["compare", str(run), str(tmp_path / "int8"), "--source", source, "--out", page])
    assert "All 24 outputs are the same." in said(capsys)


def test_checkpoints_made_of_it_have_both(run, tmp_path):
    quantize_checkpoint(run, tmp_path / "integers", Scheme(32, 8))
    average_checkpoints([run / "model", run / "checkpoints" / "step-00000040"], tmp_path / "average")
    for made in ("integers", "average"):
        for name in FILES:
            assert (tmp_path / made / name).read_bytes() == (run / "model" / name).read_bytes()


def test_one_file_with_the_search_inside(run, onnx, tmp_path, capsys):
    file = export_search(run, tmp_path / "mine.onnx")
    assert SearchModel(file).translate(LINES) == OnnxTransformer(onnx, threads=1).translate(LINES)
    assert "text in a graph is of a joint one" in refused(
        capsys, "export", run, tmp_path / "text.onnx", "--embed-tokenizer"
    )


def test_what_consumers_cannot_take_is_said(run, onnx, tmp_path, capsys):
    """No file of a name that they would take for the whole, and a line about it."""
    assert {path.name for path in onnx.iterdir() if "tokenizer" in path.name} == FILES
    main(["export", str(run), str(tmp_path / "web"), "--target", "web"])
    assert "Optimum and transformers.js, which expect one tokenizer.json, can be given ids alone" in said(capsys)
    assert "a folder for transformers holds one tokenizer.json" in refused(
        capsys, "to-huggingface", run, tmp_path / "theirs"
    )
    with pytest.raises(UserError, match="these rows look at a joint one"):
        open_trained(run)
    assert not (tmp_path / "theirs").exists()


def test_the_flag(tmp_path, capsys):
    paths = write_text(tmp_path)
    flags = ["--source", paths["source"], "--target", paths["target"], "--vocab-size", "300", "--preset", "tiny"]
    main(["train", *flags, "--separate-vocabularies", "--steps", "1", "--out", str(tmp_path / "run")])
    sizes = open_checkpoint(tmp_path / "run").config
    assert f"vocabularies {sizes.source_vocab_size} and {sizes.vocab_size}, " in said(capsys)
    assert sizes.source_vocab_size != sizes.vocab_size
