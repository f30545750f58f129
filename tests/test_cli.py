"""The command line: help, text through it, folders described, and one line for every mistake."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import typer.main
from tiny_run import COMMAND, start

from export import OnnxTransformer, export_onnx
from export.inspect import graph_facts
from mlx_transformer import cli
from mlx_transformer.generation.with_mlx import MlxTranslator
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.loading import load
from mlx_transformer.spec.checkpoint import save_checkpoint
from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.tokenizer import Tokenizer

COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
LINES = ["one two", "", "three. four", "  ", "seven"]
TEXT = "".join(f"{line}\n" for line in LINES)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """FOLDER/model: random weights and a tokenizer; FOLDER/onnx: its export."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = Tokenizer.train(["one two three. four five six! seven " * 3], vocab_size=280)
    mx.random.seed(4)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "heads": 1, "d_ff": 16, "max_positions": 40}
    model = Transformer(TransformerConfig(vocab_size=tokenizer.vocab_size, output_bias=True, **sizes))
    bias = np.zeros(tokenizer.vocab_size, np.float32)
    bias[2] = 1.0
    model.output_proj.bias = mx.array(bias)
    save_checkpoint(folder / "model", model.config, model.weights(), tokenizer.to_json())
    export_onnx(folder / "model", folder / "onnx")
    return folder


@pytest.fixture
def call(capfd, monkeypatch):
    """call(*arguments, stdin="") -> (status, standard output, standard error)."""

    def run(*arguments: object, stdin: str | bytes = ""):
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        status = 0
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as done:
            status = done.code
        return status, *capfd.readouterr()

    return run


def refused(result, *parts: str) -> None:
    """One line on standard error that holds `parts`, exit 2, nothing on standard output."""
    status, out, said = result
    assert status == 2, said
    assert out == ""
    assert said.count("\n") == 1, said
    assert said.startswith("mlx-transformer: ")
    for part in parts:
        assert part in said


def test_help_shows_the_commands(call):
    for arguments in ([], ["--help"], ["-h"]):
        status, out, said = call(*arguments)
        assert (status, said) == (0, "")
        assert all(name in out for name in COMMANDS)
    assert {"quickstart", "train", "translate", "evaluate", "export", "validate", "info"} <= COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_is_complete(call, name):
    status, out, said = call(name, "--help")
    assert (status, said) == (0, "")
    options = [option for parameter in COMMANDS[name].params for option in parameter.opts if option.startswith("--")]
    words = out.split()
    assert not [option for option in options if option not in words]
    assert not [parameter.name for parameter in COMMANDS[name].params if not parameter.help]
    assert " ".join(COMMANDS[name].help.split()) in " ".join(out.replace("│", " ").split())


def test_help_is_quick_and_needs_no_mlx():
    code = (
        "import sys\n"
        "sys.modules['mlx'] = sys.modules['mlx.core'] = sys.modules['onnx'] = None\n"
        "from mlx_transformer.cli import main\n"
        "main(['translate', '--help'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["bogus"], ["No such command 'bogus'", "--help"]),
        (["train"], ["Missing option '--out'", "mlx-transformer train --help"]),
        (["train", "--out"], ["requires an argument"]),
        (["train", "--out", "x", "--steps", "ten"], ["--steps", "integer"]),
        (["train", "--out", "x", "--minutes", "soon"], ["--minutes"]),
        (["train", "--out", "x", "--steps", "3", "--epcohs", "3"], ["No such option: --epcohs"]),
        (["train", "--out", "x", "--steps", "3"], ["give either a corpus"]),
        (["train", "--out", "x", "--corpus", "cldr:en-de"], ["say how long to train"]),
        (["train", "--out", "x", "--corpus", "cldr:en-de", "--source", "a", "--steps", "3"], ["exclude each other"]),
        (["train", "--out", "x", "--source", "a", "--steps", "3"], ["source and target files go together"]),
        (["train", "--out", "x", "--source", "a", "--target", "b", "--steps", "3"], ["a: no such file"]),
        (["train", "--out", "x", "--corpus", "cldr:en-de", "--steps", "-3"], ["steps = -3 must be positive"]),
        (["train", "--out", "x", "--corpus", "cldr:en-de", "--minutes", "nan"], ["minutes = nan must be finite"]),
        (["train", "--out", "x", "--corpus", "cldr:en-de", "--steps", "3", "--preset", "hug"], ["unknown preset"]),
        (["train", "nothing", "--out", "x"], ["no such recipe file", "multi30k"]),
        (["train", "--out", "x", "--corpus", "cldr:xx-yy", "--steps", "3"], ["xx"]),
        (["train", "--out", "x", "--corpus", "cldr:en-de", "--steps", "3", "--resume"], ["nothing to resume"]),
        (["translate", "nowhere"], ["nowhere: no such folder"]),
        (["translate", "nowhere", "--beam", "0"], ["beam=0"]),
        (["translate", "nowhere", "--beam", "2", "--n-best", "3"], ["n_best=3 is more than beam=2"]),
        (["translate", "nowhere", "--top-k", "3"], ["top_k=3 has an effect in sampling only"]),
        (["translate", "nowhere", "--overlong", "skip"], ["--overlong", "truncate"]),
        (["translate", "nowhere", "--backend", "torch"], ["--backend", "onnx"]),
        (["evaluate", "nowhere", "--source", "a"], ["Missing option '--reference'"]),
        (["evaluate", "nowhere", "--source", "a", "--reference", "b"], ["a: no such file"]),
        (["export", "nowhere", "x"], ["nowhere: no such folder"]),
        (["info", "nowhere"], ["nowhere: no such folder"]),
        (["info"], ["Missing argument"]),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_line(call, tmp_path, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    refused(call(*arguments), *parts)
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_wrong_kinds_of_folder(call, made, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for command in (["translate"], ["info"], ["evaluate", "--source", __file__, "--reference", __file__]):
        refused(call(*command, tmp_path / "file"), "is a file")
        refused(call(*command, tmp_path / "empty"), "neither a checkpoint folder", "nor an ONNX folder")
    refused(call("translate", made / "model", "--backend", "onnx"), "not an ONNX folder", "mlx-transformer export")
    refused(call("translate", made / "onnx", "--backend", "mlx"), "MLX needs the checkpoint folder")
    refused(call("export", made / "onnx", tmp_path / "out"), "is an ONNX model")
    refused(call("export", made / "model", tmp_path / "file"), "is a file")
    refused(call("export", made / "model", made / "model"), "no earlier export")


def test_damage_is_one_line(call, made, tmp_path):
    damaged = tmp_path / "damaged"
    subprocess.run(["cp", "-r", made / "model", damaged], check=True)
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(data)
    for command in ("translate", "info"):
        refused(call(command, damaged), "model.safetensors: damaged (its SHA-256 differs)")


def test_unequal_files_and_bad_text(call, made, tmp_path):
    (tmp_path / "two").write_bytes(b"one\ntwo\n")
    (tmp_path / "three").write_bytes(b"one\ntwo\nthree\n")
    (tmp_path / "bad").write_bytes(b"one\ntw\xff\n")
    (tmp_path / "none").write_bytes(b"")
    evaluate = ["evaluate", made / "model", "--source", tmp_path / "two", "--reference"]
    refused(call(*evaluate, tmp_path / "three"), "two has 2 lines", "three has 3", "line ")
    refused(call(*evaluate, tmp_path / "bad"), "bad, line 2, byte 3: not UTF-8")
    train = ["train", "--steps", 2, "--out", tmp_path / "run", "--source", tmp_path / "two", "--target"]
    refused(call(*train, tmp_path / "three"), "two has 2 lines")
    refused(call(*train, tmp_path / "bad"), "bad, line 2, byte 3: not UTF-8 (0xff)")
    refused(call(*train, tmp_path), "cannot be read")
    refused(call(*train[:-2], tmp_path / "none", "--target", tmp_path / "none"), "none hold no lines")
    assert not (tmp_path / "run").exists()


def test_recipes_that_are_wrong(call, tmp_path):
    path = tmp_path / "my.toml"
    for text, part in {
        "[training]\nstep = 3\n": "unknown key training.step (did you mean steps?)",
        "[training]\nsteps = true\n": "training.steps = True must be of type int",
        "[training": "not a TOML recipe",
        "[model]\nd_modell = 3\n[data]\ncorpus='cldr:en-de'\n[training]\nsteps=1\n": "did you mean 'd_model'",
    }.items():
        path.write_text(text, encoding="utf-8")
        refused(call("train", path, "--out", tmp_path / "run"), part)


def test_translate_line_by_line_from_standard_input(call, made):
    translator = MlxTranslator(*load(made / "model"))
    expected = translator.translate(LINES)
    assert any(expected)
    status, out, said = call("translate", made / "model", stdin=TEXT)
    assert (status, said) == (0, "")
    assert out.split("\n")[:-1] == [line.replace("\n", " ") for line in expected]
    assert [bool(line) for line in out.split("\n")[:-1]][1::2] == [False, False]  # empty lines stay


def test_both_backends_print_the_same(call, made):
    options = ["--beam", 3, "--n-best", 2, "--length-penalty", 0.2, "--early-stopping", "--max-new-tokens", 8]
    mlx, onnx = (call("translate", made / name, *options, stdin=TEXT) for name in ("model", "onnx"))
    assert mlx == onnx
    assert [line.count("\t") for line in mlx[1].split("\n")[:-1]] == [1, 0, 1, 0, 1]
    sampled = ["--sample", "--temperature", 0.7, "--top-k", 9, "--top-p", 0.9]
    first, again, other = (
        call("translate", made / "model", *sampled[:2], seed, *sampled[3:], stdin=TEXT) for seed in "334"
    )
    assert first == again
    assert first != other


def test_translate_files(call, made, tmp_path):
    (tmp_path / "in").write_bytes(TEXT.encode())
    status, out, said = call("translate", made / "model", "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert (status, out, said) == (0, "", "")
    assert (tmp_path / "out").read_text(encoding="utf-8") == call("translate", made / "model", stdin=TEXT)[1]
    refused(call("translate", made / "model", "--input", tmp_path / "no"), "no: cannot be read")
    refused(call("translate", made / "model", "--input", tmp_path), "cannot be read (Is a directory)")
    refused(call("translate", made / "model", "--output", tmp_path / "no" / "x"), "cannot be written")


def test_lines_that_are_too_long(call, made):
    long = "one " * 100
    refused(call("translate", made / "model", stdin=f"x\n{long}\n"), "line 2: ", "at most 40")
    for policy in ("truncate", "split"):
        status, out, said = call("translate", made / "model", "--overlong", policy, stdin=f"{long}\nx\n")
        assert (status, out.count("\n"), said) == (0, 2, "")


def test_bytes_that_are_no_text_are_replaced_with_a_warning(call, made):
    status, out, said = call("translate", made / "model", stdin=b"one \xff\ntwo\n")
    assert (status, out.count("\n")) == (0, 2)
    assert said.strip() == "standard input, line 1: not UTF-8, bad bytes are replaced"


def test_evaluate_prints_json_alone(call, made, tmp_path):
    (tmp_path / "source").write_text(TEXT, encoding="utf-8")
    perfect = call("translate", made / "model", stdin=TEXT)[1]
    (tmp_path / "reference").write_text(perfect, encoding="utf-8")
    files = ["--source", tmp_path / "source", "--reference", tmp_path / "reference"]
    results = {}
    for name in ("model", "onnx"):
        status, out, said = call("evaluate", made / name, *files)
        assert (status, said) == (0, "")
        results[name] = json.loads(out)
        assert results[name].pop("model") == str(made / name)
    assert results["model"] == results["onnx"]
    assert results["model"]["exact_match"] == 100
    assert results["model"]["lines"] == 5
    assert "tok:13a" in results["model"]["bleu_signature"]
    assert results["model"]["chrf"] > 99
    assert json.loads(call("evaluate", made / "model", *files, "--beam", 4, "--max-new-tokens", 1)[1])["beam"] == 4


def test_export_writes_what_it_says(call, made, tmp_path):
    status, out, said = call("export", made / "model", tmp_path / "out")
    assert (status, said) == (0, "")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert out.startswith(f"{tmp_path / 'out'}: {len(files)} files, ")
    assert OnnxTransformer(tmp_path / "out").translate(["one"]) == MlxTranslator(*load(made / "model")).translate(
        ["one"]
    )


def test_info_of_every_kind_of_folder(call, made):
    status, out, said = call("info", made / "model")
    assert (status, said) == (0, "")
    for text in ("checkpoint", "verified", "d_model", "16", "model.safetensors", "parameters"):
        assert text in out
    status, out, said = call("info", made / "onnx")
    assert (status, said) == (0, "")
    for text in (
        "ONNX models",
        "verified",
        "encoder_model.onnx",
        "opset",
        "input_ids",
        "int64",
        "batch_size",
        "d_model",
    ):
        assert text in out


def test_graph_facts(made, tmp_path):
    facts = graph_facts(made / "onnx")
    assert list(facts) == sorted(f"onnx/{path.name}" for path in (made / "onnx" / "onnx").glob("*.onnx"))
    encoder = facts["onnx/encoder_model.onnx"]
    assert encoder["nodes"] > 20
    assert 18 <= encoder["opset"] <= 20
    assert [value[:2] for value in encoder["inputs"]] == [("input_ids", "int64"), ("attention_mask", "int64")]
    assert encoder["outputs"][0][0] == "last_hidden_state"
    assert encoder["outputs"][0][2].endswith(" x 16")
    merged, part = facts["onnx/decoder_model_merged.onnx"], facts["onnx/decoder_with_past_model.onnx"]
    assert merged["nodes"] > part["nodes"]  # both branches are counted
    for path in (made / "onnx" / "onnx").glob("*.onnx"):  # without the weights
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert list(graph_facts(tmp_path).values()) == list(facts.values())
    (tmp_path / "broken.onnx").write_bytes(b"\xff\xff")
    with pytest.raises(UserError, match=r"broken\.onnx: cannot be read as an ONNX model"):
        graph_facts(tmp_path)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (PermissionError(13, "Permission denied", "some/file"), 2, "some/file: Permission denied"),
        (OSError(28, "No space left on device"), 2, "[Errno 28] No space left on device"),
        (UserError("two\nlines"), 2, "two lines"),
        (MemoryError("of 9 TB"), 1, "out of memory (of 9 TB); try smaller batches or a smaller model"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ModuleNotFoundError("No module named 'mlx'", name="mlx.core"), 2, "MLX is not installed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_libraries(call, monkeypatch, error, status, said):
    monkeypatch.setattr("mlx_transformer.info.describe", lambda *_: (_ for _ in ()).throw(error))
    found, out, err = call("info", ".")
    assert (found, out) == (status, "")
    assert err.startswith(f"mlx-transformer: {said}")
    assert err.count("\n") == 1


def test_bugs_keep_their_traceback(call, monkeypatch):
    monkeypatch.setattr("mlx_transformer.info.describe", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call("info", ".")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(call, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0)
    refused(call("evaluate", tmp_path, "--source", secret, "--reference", secret), "Permission denied")


def test_a_reader_that_goes_away_is_no_error(made, tmp_path):
    (tmp_path / "in").write_text("one two three\n" * 2500, encoding="utf-8")
    with start("translate", made / "model", "--input", tmp_path / "in", "--max-new-tokens", 2) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == ""
    with start("info", made / "model", stdout=(closed := closed_pipe())) as process:
        os.close(closed)
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == ""


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_the_installed_command():
    command = Path(sys.executable).with_name("mlx-transformer")
    if not command.exists():
        pytest.skip("not installed")
    done = subprocess.run([command, "info", "nowhere"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "mlx-transformer: nowhere: no such folder\n")
    again = subprocess.run([*COMMAND, "info", "nowhere"], capture_output=True, text=True, timeout=60)
    assert (again.returncode, again.stderr) == (2, done.stderr)
