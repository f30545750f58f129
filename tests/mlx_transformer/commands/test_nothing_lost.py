"""Commands write where nothing is lost by it: into new and empty folders, and over another model only by --force."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import LINES, both_models, caller, refused
from marian_models import STUDENT, write_model
from tiny_run import write_pairs

from export import OnnxTransformer, export_search
from export.package.quality import LIMITS, Limits
from mlx_transformer.convert import import_marian, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.system import durable
from mlx_transformer.system.durable import Output, replace_files, write_text

made = pytest.fixture(scope="module")(both_models)
call = pytest.fixture(caller)


@pytest.fixture(scope="module")
def others(made, tmp_path_factory) -> Path:
    """Of a second checkpoint: FOLDER/model, onnx, marian and model.onnx, all made of it."""
    from export import export_onnx

    folder = tmp_path_factory.mktemp("others")
    opened = open_checkpoint(made / "model")
    weights = {name: 2 * array for name, array in opened.tensors()}
    tokenizer = (made / "model" / "tokenizer.json").read_text(encoding="utf-8")
    save_checkpoint(folder / "model", opened.config, weights, tokenizer)
    export_onnx(folder / "model", folder / "onnx")
    export_search(folder / "model", folder / "model.onnx")
    to_huggingface(folder / "model", folder / "marian")
    write_model(folder / "student", STUDENT, seed=1)
    return folder


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


WRITERS = {
    "import": (["import", "MARIAN", "OUT"], "model", "checkpoint"),
    "quantize": (["quantize", "MODEL", "OUT", "--bits", "8", "--group-size", "32"], "model", "checkpoint"),
    "to-huggingface": (["to-huggingface", "MODEL", "OUT"], "marian", "Hugging Face folder"),
    "to-marian": (["to-marian", "STUDENT", "OUT"], "student", "Marian folder"),
    "export": (["export", "MODEL", "OUT"], "onnx", "ONNX folder"),
    "export --search": (["export", "MODEL", "OUT", "--search"], "model.onnx", "model"),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint with matrices wide enough to be quantised, and the Marian made of it."""
    from marian_folders import PAPER
    from random_models import random_weights

    folder = tmp_path_factory.mktemp("wide")
    save_checkpoint(folder / "model", PAPER, random_weights(PAPER, 1))
    to_huggingface(folder / "model", folder / "marian")
    import_marian(write_model(folder / "of-marian", STUDENT), folder / "student")
    return folder


@pytest.mark.parametrize("name", WRITERS)
def test_another_model_is_replaced_by_force_alone(call, wide, others, tmp_path, name):
    arguments, kind, what = WRITERS[name]
    out = tmp_path / ("keep.onnx" if kind.endswith(".onnx") else "keep")
    subprocess.run(["cp", "-r", others / kind, out], check=True)
    before = contents(out)
    places = {"MODEL": wide / "model", "MARIAN": wide / "marian", "STUDENT": wide / "student", "OUT": out}
    command = [places.get(argument, argument) for argument in arguments]
    hint = f"choose another {'name' if out.suffix else 'folder'}, or --force to replace it"
    refused(call(*command), f"{out}: holds another {what}; {hint}")
    assert contents(out) == before
    assert os.listdir(tmp_path) == [out.name]
    status, _, said = call(*command, "--force")
    assert (status, said) == (0, "")
    assert contents(out) != before
    assert os.listdir(tmp_path) == [out.name]


@pytest.mark.parametrize("name", ["import", "quantize", "to-huggingface", "to-marian", "export"])
def test_other_files_are_never_replaced(call, wide, others, tmp_path, name):
    arguments, kind, _ = WRITERS[name]
    for there in ("notes.txt", *(other for other in ("model", "marian", "onnx") if other != kind)):
        out = tmp_path / f"keep-{there}"
        if there == "notes.txt":
            out.mkdir()
            (out / there).write_text("years of work")
        else:
            subprocess.run(["cp", "-r", others / there, out], check=True)
        before = contents(out)
        places = {"MODEL": wide / "model", "MARIAN": wide / "marian", "STUDENT": wide / "student", "OUT": out}
        for force in ([], ["--force"]):
            refused(call(*(places.get(a, a) for a in arguments), *force), f"{out}: holds files that are no ")
            assert contents(out) == before


def test_an_export_of_the_same_weights_is_made_again_by_force_alone(call, others, tmp_path):
    out = tmp_path / "out"
    for extra in ([], ["--precision", "int8", "--force"], ["--force"]):
        assert call("export", others / "model", out, *extra)[0] == 0
    refused(call("export", others / "model", out), f"{out}: holds another ONNX folder", "--force")
    assert OnnxTransformer(out).translate(LINES) == OnnxTransformer(others / "onnx").translate(LINES)
    for extra in ([], ["--precision", "float16", "--force"]):
        assert call("export", others / "model", tmp_path / "one.onnx", "--search", *extra)[0] == 0


def test_a_folder_that_is_named_like_a_file(call, others, tmp_path):
    refused(
        call("export", others / "model", tmp_path / "foo.onnx"), "foo.onnx: what is written is a folder", "--search"
    )
    assert not list(tmp_path.iterdir())


def test_training_touches_nothing_else(call, others, tmp_path):
    source, target = write_pairs(tmp_path)
    train = ["train", "--source", source, "--target", target, "--valid-source", source, "--valid-target", target]
    train += ["--preset", "tiny", "--d-model", 32, "--vocab-size", 262, "--batch-tokens", 300, "--steps", 1, "--out"]
    for kind in ("model", "onnx"):
        out = tmp_path / kind
        subprocess.run(["cp", "-r", others / kind, out], check=True)
        before = contents(out)
        for force in ([], ["--force"]):
            refused(call(*train, out, *force), f"{out}: holds config.json of something else than a run")
        assert contents(out) == before
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    assert call(*train, run)[0] == 0
    first = contents(run)
    refused(call(*train, run), "already holds a run; continue it with --resume, choose another --out, or --force")
    refused(call(*train, run, "--resume", "--force"), "choose one")
    assert contents(run) == first
    status, out, _ = call(*train, run, "--force", "--seed", 5)
    assert (status, ", 1 steps, " in out) == (0, True)
    again = contents(run)
    assert again["notes.txt"] == b"mine"
    assert again["model/model.safetensors"] != first["model/model.safetensors"]
    assert again["metrics.jsonl"].count(b'"kind": "train"') == first["metrics.jsonl"].count(b'"kind": "train"')
    assert sorted(again) == sorted(first) or any("tensorboard" in name for name in again)


def test_who_replaces_a_model_has_accepted_nothing(call, made, others, tmp_path, monkeypatch):
    monkeypatch.setitem(LIMITS, "int8", Limits(1.1, 100.0, 100.0, 100.0))
    text, out = tmp_path / "text", tmp_path / "onnx"
    text.write_text("\n".join(LINES), encoding="utf-8")
    shutil.copytree(made / "onnx", out)
    command = ["export", others / "model", out, "--precision", "int8", "--gate-source", text]
    refused(call(*command, "--accept-loss"), f"{out}: holds another ONNX folder")
    hint = "--accept-loss writes it all the same; --force only replaces a model"
    refused(call(*command, "--force"), f"{out}: not written: int8: ", hint)
    status, shown, error = call(*command, "--force", "--accept-loss")
    assert status == 0, error
    assert "of the best tokens" in shown


def test_a_gate_that_has_nothing_to_judge_is_said(call, others, tmp_path):
    text = tmp_path / "text"
    text.write_text("one two\nthree four\n")
    for extra in ([], ["--search"]):
        out = tmp_path / f"out{len(extra)}.onnx"
        status, said, _ = call(
            "export", others / "model", out if extra else tmp_path / "out", "--gate-source", text, *extra
        )
        assert status == 0
        assert said.startswith(f"{text}: nothing to judge on it; judged are float16, ")
        again = ["--search", "--precision", "float16", "--force"]
        status, said, _ = call("export", others / "model", tmp_path / "o.onnx", *again)
        assert said.startswith("float16: not judged; --gate-source FILE would")


@pytest.mark.slow
def test_reports_appear_whole_or_not_at_all(call, made, tmp_path, monkeypatch):
    validate = ["validate", made / "model", made / "onnx", "--runtimes", "onnxruntime"]
    same = tmp_path / "x"
    status, _, said = call(*validate, "--json", same, "--html", tmp_path / "." / "x")
    assert (status, "x: can't be both" in said, said.count("\n")) == (2, True, 1)
    assert call(*validate, "--html", same)[0] == 0
    before = contents(same)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    status, _, said = call(*validate, "--html", same, "--force")
    assert (status, f"{same}: could not be written" in said) == (2, True)
    assert contents(same) == before
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.skipif(sys.platform == "win32", reason="special files")
def test_a_pipe_stays_a_pipe(tmp_path):
    """Root could replace /dev/stdout by a file."""
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        write_text(tmp_path / "pipe", "a report")
        assert reader.communicate()[0] == "a report"
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")
def test_a_full_disk_is_named(call, made, tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    for extra in ([], ["--stream"]):
        arguments = ["translate", made / "onnx", "--output", tmp_path / "full", *extra]
        refused(
            call(*arguments, stdin="one\n" * 9), f"{tmp_path / 'full'}: could not be written (No space left on device)"
        )


def test_a_file_never_stands_beside_the_data_of_another(tmp_path, monkeypatch):
    """Killed between the two renames, there is no file rather than one with data that it wasn't made with."""
    file, data = tmp_path / "m.onnx", tmp_path / "m.onnx_data"
    file.write_text("old")
    data.write_text("old data")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def write() -> None:
        outputs = Output.any(file, "model"), Output.any(data, "data")
        with replace_files(*outputs) as temporary:
            (temporary / "m.onnx").write_text("new")
            (temporary / "m.onnx_data").write_text("new data")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "put_file", killed)  # the last of the renames
        with pytest.raises(KeyboardInterrupt):
            write()
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx_data"}
    write()
    assert (file.read_text(encoding="utf-8"), data.read_text(encoding="utf-8")) == ("new", "new data")
    assert len(list(tmp_path.iterdir())) == 2
