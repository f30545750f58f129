"""Decoders and encoders alone on the command line: trained, exported, proven, put to work in both runtimes."""

import json
import math
import shutil
import sys

import numpy as np
import pytest
from command_line import caller, refused
from tiny_text import train, write_text

from mlx_transformer import load
from mlx_transformer.cli import main

call = pytest.fixture(caller)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from export import export_onnx

    folder = tmp_path_factory.mktemp("language")
    write_text(folder)
    for objective, name in (("language-model", "decoder"), ("masked-language-model", "encoder")):
        train(folder, objective, name, steps=20)
        export_onnx(folder / name, folder / f"{name}-onnx")
    return folder


def test_generate_in_both_runtimes(models, call):
    for options in (["--sample", "--seed", "3"], ["--beam", "2"], ["--stop", "5"], []):
        given = ["3 4 5", "1 2", "--max-new-tokens", "5", *options]
        found = [call("generate", models / name, *given, "--json") for name in ("decoder", "decoder-onnx")]
        assert found[0] == found[1]
        texts = [json.loads(line) for line in found[0][1].splitlines()]
        assert [entry["prompt"] for entry in texts] == ["3 4 5", "1 2"]
        assert call("generate", models / "decoder", *given)[1] == "".join(f"{entry['text']}\n" for entry in texts)
        if "--beam" not in options:  # one alone is streamed
            alone = call("generate", models / "decoder", *given[:1], *given[2:])
            assert alone[1] == texts[0]["text"] + "\n"


@pytest.mark.parametrize("name", ["decoder", "decoder-onnx"])
def test_guesses_change_no_text(name, models, call):
    asked = "generate", models / name, "3 4 5 3 4", "--max-new-tokens", "12"
    plain = call(*asked)
    assert plain[0] == 0
    for draft in ([], ["--draft", models / "decoder"], ["--draft", models / "decoder-onnx"]):
        assert call(*asked, "--speculate", "3", *draft) == plain


def test_fill_in_both_runtimes(models, call):
    found = [call("fill", models / name, "3 4 <mask> 6", "--top-k", "3") for name in ("encoder", "encoder-onnx")]
    assert found[0] == found[1]
    rows = [line.split("\t") for line in found[0][1].splitlines()]
    assert len(rows) == 3
    assert [float(row[0]) for row in rows] == sorted((float(row[0]) for row in rows), reverse=True)
    as_json = json.loads(call("fill", models / "encoder", "3 4 <mask> 6", "--top-k", "3", "--json")[1])
    assert [guess["text"] for guess in as_json["masks"][0]] == [row[2] for row in rows]


def test_fill_reads_and_writes_files(models, call, tmp_path):
    (tmp_path / "in").write_text("3 4 <mask> 6\n<mask> 4 <mask>\n", encoding="utf-8")
    assert call("fill", models / "encoder", "-i", tmp_path / "in", "-o", tmp_path / "out.jsonl") == (0, "", "")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [len(row["masks"]) for row in rows] == [1, 2]
    alone = call("fill", models / "encoder", "3 4 <mask> 6", "<mask> 4 <mask>", "--json")[1]
    assert rows == [json.loads(line) for line in alone.splitlines()]
    assert call("fill", models / "encoder", "-i", tmp_path / "in")[1].count("\n") == 15
    (tmp_path / "in").write_text("3 4 <mask> 6\nno\n", encoding="utf-8")
    refused(call("fill", models / "encoder", "-i", tmp_path / "in", "-o", tmp_path / "x"), "line 2: holds no <mask>")
    assert not (tmp_path / "x").exists()


def test_perplexity_in_both_runtimes(models, call):
    """That of the documents, each by itself; one longer than the model takes is predicted in pieces."""
    (models / "few.txt").write_text("3 4 5 6\n" + "1 2 3 4 5 6 7 8 9 " * 300 + "\n7 8\n", encoding="utf-8")
    folders = [models / "decoder", models / "decoder-onnx"]
    found = [json.loads(call("evaluate", folder, "--text", models / "few.txt")[1]) for folder in folders]
    assert [entry.pop("model") for entry in found] == list(map(str, folders))
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    model, tokenizer = load(models / "decoder")
    total = count = 0
    for text in ("3 4 5 6", "1 2 3 4 5 6 7 8 9 " * 300, "7 8"):
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        limit = model.config.max_positions
        for start in range(0, len(ids) - 1, limit):
            piece = ids[start : start + limit + 1]
            logits = np.array(model([piece[:-1]]))[0].astype(np.float64)
            total -= (logits[np.arange(len(piece) - 1), piece[1:]] - np.log(np.exp(logits).sum(axis=1))).sum()
            count += len(piece) - 1
    size = len("3 4 5 6" + "1 2 3 4 5 6 7 8 9 " * 300 + "7 8")
    assert (found[0]["documents"], found[0]["tokens"]) == (3, count)
    assert found[0]["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-3)
    assert found[0]["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-3)


@pytest.mark.parametrize(
    ("command", "name", "what"),
    [("generate", "decoder", "give the prompt as an argument"), ("fill", "encoder", "give a file with --input")],
)
def test_a_closed_standard_input_is_named(command, name, what, models, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", None)  # which is what Python makes of it
    with pytest.raises(SystemExit) as done:
        main([command, str(models / name)])
    refused((done.value.code, *capfd.readouterr()), f"mlx-transformer: standard input is closed; {what}")


@pytest.mark.fast("encoder")
@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_they_are_proven(name, models, call, tmp_path):
    status, out, _ = call("validate", models / name, models / f"{name}-onnx")
    assert status == 0
    assert "equal" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "encoder", "x"], "generate needs a decoder; architecture='encoder' is for fill"),
        (["generate", "encoder-onnx", "x"], "generate needs a decoder; architecture='encoder' is for fill"),
        (["fill", "decoder", "<mask>"], "fill needs an encoder; architecture='decoder' is for generate"),
        (["translate", "decoder", "x"], "translating needs an encoder-decoder; architecture='decoder' is for generate"),
        (["translate", "encoder-onnx", "x"], "architecture='encoder' is for fill"),
        (["generate", "decoder", "x", "--threads", "2"], "is a checkpoint; --threads is for ONNX folders"),
        (["generate", "encoder", "x", "--cache-bits", "8"], "caches no keys and values: leave out --cache-bits"),
        (["generate", "decoder-onnx", "x", "--cache-bits", "8"], "--cache-bits is for checkpoints, run by MLX"),
        (
            ["generate", "decoder", "x", "--cache-bits", "4"],
            "heads are 16 wide; --cache-bits needs a multiple of 32",
        ),
        (["generate", "decoder", "x", "--draft", "text.txt"], "guesses tokens ahead: say how many, as --speculate 4"),
        (
            ["generate", "decoder", "x", "--speculate", "2", "--beam", "2"],
            "--speculate 2 can't be used with a beam",
        ),
        (["generate", "text.txt", "x"], "is a file; a checkpoint is a folder with config.json"),
        (["fill", "encoder", "x"], "line 1: holds no <mask>"),
        (["to-huggingface", "decoder", "OUT"], "GPT-2 has no such model: positions='sinusoidal', GPT-2 has 'learned'"),
        (["to-marian", "decoder", "OUT"], "is a decoder alone, and Marian's files hold an encoder with a decoder"),
        (["to-marian", "encoder", "OUT"], "is an encoder alone, and Marian's files hold an encoder with a decoder"),
        (["evaluate", "encoder", "--text", "text.txt"], "a text's perplexity needs a decoder"),
        (
            ["evaluate", "decoder", "--text", "x", "--source", "y"],
            "--text is for decoders and encoders: leave out --source",
        ),
        (["evaluate", "decoder"], "Missing option '--source' (or '--text', '--pairs', '--similarity' or '--labelled')"),
        (["evaluate", "encoder", "--pairs", "x", "--labelled", "y"], "--pairs and --labelled: give one of them"),
        (["evaluate", "encoder", "--pairs", "no.tsv"], "no.tsv: cannot be read (no such file)"),
        (["evaluate", "encoder", "--labelled", "text.txt"], "labelled text is read from .tsv and .jsonl"),
    ],
)
def test_refused_by_name(arguments, message, models, call, tmp_path):
    command, model, *rest = arguments
    places = {"text.txt": models / "text.txt", "OUT": tmp_path / "out"}
    refused(call(command, models / model, *(places.get(each, each) for each in rest)), message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder-onnx"])
def test_nothing_but_a_translator_aligns(name, models, call, tmp_path):
    text = models / "text.txt"
    result = call("shortlist", models / name, tmp_path / "lex.bin", "--source", text, "--reference", text)
    refused(result, "what aligns source and target is an encoder with a decoder")


@pytest.mark.parametrize(("name", "how"), [("decoder", "its probabilities"), ("encoder", "its best tokens")])
def test_what_is_not_judged_is_said_of_such_a_model(name, how, models, call, tmp_path):
    status, out, said = call("export", models / name, tmp_path / "out", "--precision", "int8")
    assert (status, said) == (0, "")
    first = out.splitlines()[0]
    assert first.startswith("int8: not judged")
    assert how in first
    assert "translations" not in first


@pytest.mark.parametrize("unit", ["documents", "texts", "pairs"])
def test_info_of_a_run_counts_what_it_was_trained_on(unit, models, call, tmp_path):
    for name in ("decoder", "encoder"):
        status, out, said = call("info", models / name)
        assert (status, said) == (0, "")
        assert "valid 1 documents" in out
    run = shutil.copytree(models / "decoder", tmp_path / "run")
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    digest = "0" * 64
    record["data"] = {"train": {unit: 1234, "text": digest}, "valid": {unit: 5, "text": digest}}
    (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert f"train 1,234 {unit}, valid 5 {unit}" in call("info", run)[1]
    record["data"]["train"] = 3
    (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    refused(call("info", run), "run.json: damaged: data: train is 3, not an object")
