"""The command line: help, and one line for every mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import both_models, caller, refused
from tiny_run import COMMAND
from waiting import PATIENCE

import mlx_transformer
from mlx_transformer.commands.app import ALL

made = pytest.fixture(scope="module")(both_models)
call = pytest.fixture(caller)


def test_help_shows_the_commands(call):
    for arguments in ([], ["--help"], ["-h"]):
        status, out, said = call(*arguments)
        assert (status, said) == (0, "")
        assert all(name in out for name in ALL)
    assert {"quickstart", "train", "translate", "evaluate", "export", "validate", "info"} <= ALL.keys()


def test_the_version(call):
    for option in ("--version", "-V"):
        assert call(option) == (0, f"mlx-transformer {mlx_transformer.__version__}\n", "")


def test_a_shell_completes_commands_and_choices(call, monkeypatch):
    def asked(*words: str) -> dict[str, str]:
        line = " ".join(("mlx-transformer", *words))
        return {"_MLX_TRANSFORMER_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}

    def completed(*words: str) -> list[str]:
        for name, value in asked(*words).items():
            monkeypatch.setenv(name, value)
        status, out, error = call()
        assert (status, error) == (0, "")
        return [line.partition(",")[2] for line in out.split()]

    environment = {**os.environ, **asked("tra")}
    done = subprocess.run(COMMAND, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["plain,train", "plain,translate"])
    assert completed("tra") == ["train", "translate"]
    assert completed("export", "model", "out", "--target", "c") == ["cpu", "cuda"]
    assert completed("train", "--optimizer", "ada") == ["adam", "adamw", "adafactor"]
    assert completed("translate", "model", "--precision", "int") == ["int8", "int8-weights", "int4"]
    assert "--length-penalty" in completed("translate", "model", "--len")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["bogus"], ["No such command 'bogus'", "--help"]),
        (["train"], ["Missing option '--out'", "mlx-transformer train --help"]),
        (["train", "--out", "x", "--steps", "ten"], ["--steps", "integer"]),
        (["train", "--out", "x", "--minutes", "soon"], ["--minutes"]),
        (["train", "--out", "x", "--steps", "3"], ["give either a corpus"]),
        (["train", "--out", "x", "--corpus", "cldr:en-de"], ["say how long to train"]),
        (["train", "--out", "x", "--corpus", "cldr:en-de", "--source", ".", "--steps", "3"], ["either a corpus"]),
        (["train", "--out", "x", "--source", ".", "--steps", "3"], ["source and target files go together"]),
        (
            ["train", "--out", "x", "--source", "a", "--target", "b", "--steps", "3"],
            ["a: cannot be read (no such file)"],
        ),
        (["train", "--out", "x", "--corpus", "cldr:en-de", "--minutes", "nan"], ["minutes = nan"]),
        (["train", "--out", "x", "--corpus", "cldr:en-de", "--steps", "3", "--preset", "hug"], ["--preset", "'tiny'"]),
        (["train", "nothing", "--out", "x"], ["no such recipe file", "multi30k"]),
        (["train", "--out", "x", "--corpus", "cldr:xx-yy", "--steps", "3"], ["xx"]),
        (["train", "--out", "x", "--corpus", "cldr:en-de", "--steps", "3", "--resume"], ["nothing to resume"]),
        (["translate", "nowhere"], ["nowhere: no such folder"]),
        (["translate", "nowhere", "--beam", "2", "--n-best", "3"], ["--n-best 3 is more than --beam 2"]),
        (["translate", "nowhere", "--top-k", "3"], ["--top-k 3 has an effect in sampling only: add --sample"]),
        (["translate", "nowhere", "--overlong", "cut"], ["--overlong", "truncate"]),
        (["translate", "nowhere", "--runtime", "torch"], ["--runtime", "onnx"]),
        (["export", "nowhere", "x", "--target", "gpu"], ["--target", "'portable'", "'cuda'"]),
        (["evaluate", ".", "--source", "a"], ["Missing option '--reference'"]),
        (["evaluate", ".", "--source", "a", "--reference", "b"], ["a: cannot be read (no such file)"]),
        (["export", "nowhere", "x"], ["nowhere: no such folder"]),
        (["info", "nowhere"], ["nowhere: no such folder"]),
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
    refused(
        call("translate", made / "model", "--backend", "onnx"),
        "here an ONNX folder is needed",
        "mlx-transformer export",
    )
    refused(call("translate", made / "onnx", "--backend", "mlx"), "MLX needs the checkpoint")
    refused(call("export", made / "onnx", tmp_path / "out"), "is an ONNX model")
    refused(call("export", made / "model", tmp_path / "file"), "is a file")
    refused(call("export", made / "model", made / "model"), "is the folder that is read")
    refused(call("export", made / "model", made), "holds the folder that is read")


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(call, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0)
    refused(call("evaluate", tmp_path, "--source", secret, "--reference", secret), f"{secret}", "read")


def test_the_installed_command():
    command = Path(sys.executable).with_name("mlx-transformer")
    if not command.exists():
        pytest.skip("not installed")
    done = subprocess.run([command, "info", "nowhere"], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (2, "mlx-transformer: nowhere: no such folder\n")
    again = subprocess.run([*COMMAND, "info", "nowhere"], capture_output=True, text=True, timeout=PATIENCE)
    assert (again.returncode, again.stderr) == (2, done.stderr)
