"""No command writes over what it reads, into a model or a run, or over anything else without --force.

The commands, their outputs and their inputs are taken from the command line itself (`outputs.py`), so that a new
command is tried without anybody thinking of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import both_models, caller, refused
from outputs import OUTPUTS, REASONS, command_line, parameters

from export import export_onnx, export_search
from mlx_transformer import OnnxTransformer, export, load
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core import outputs
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.data.corpus import ParallelText
from mlx_transformer.generation.files import translate_stream
from mlx_transformer.system import durable
from mlx_transformer.system.errors import UserError

made = pytest.fixture(scope="module")(both_models)
call = pytest.fixture(caller)


@pytest.fixture(scope="module")
def tree(made, tmp_path_factory) -> Path:
    """A run with its model, graphs, one file, a published model and text."""
    place = tmp_path_factory.mktemp("tree")
    shutil.copytree(made / "model", place / "run" / "model")
    (place / "run" / "run.json").write_text("{}")
    (place / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2}\n')
    shutil.copytree(made / "onnx", place / "onnx")
    export_search(made / "model", place / "one.onnx")
    to_huggingface(made / "model", place / "published")
    (place / "text").write_text("one two\nthree. four\n")
    (place / "notes").mkdir()
    (place / "notes" / "notes.txt").write_text("years of work")
    (place / "link").symlink_to(place / "run" / "model" / "model.safetensors")
    os.link(place / "run" / "model" / "tokenizer.json", place / "hard")
    return place


def state(place: Path) -> dict[str, tuple[int, int, int]]:
    status = {str(path.relative_to(place)): path.lstat() for path in place.rglob("*")}
    return {name: (each.st_ino, each.st_size, each.st_mtime_ns) for name, each in status.items()}


TARGETS = [
    *("run/notes.txt", "run/metrics.jsonl", "run/model/model.safetensors", "run", "run/model", "run/model/deeper/new"),
    *("onnx", "onnx/onnx/encoder_model.onnx", "onnx/onnx/new", "onnx/tokenizer.json", "one.onnx"),
    *("published/model.safetensors", "published/new", "link", "hard", "notes", "text", "notes/notes.txt/new"),
]
OF_ITS_KIND = {"export": "onnx", "train": "run"}
"""What a command may replace by --force, for it made it and doesn't read it."""
BESIDE_OTHERS = ("train", "distil")
"""They write into a folder with a person's files in it, and leave those as they are."""
OF_CHECKPOINTS = set("average quantize merge distil export to-huggingface to-peft to-gguf to-marian shortlist".split())
OF_CHECKPOINTS.add("validate")


@pytest.mark.parametrize(("command", "output"), OUTPUTS)
def test_nothing_is_lost(call, tree, command, output):
    """Refused in one line that names the output, before any work: the models aren't even of the command's kind."""
    before = state(tree)
    targets = TARGETS if output != "out_option" else TARGETS[:3]  # the same as OUT
    for name in targets:
        if name == "notes" and command in BESIDE_OTHERS:
            continue
        target, kind = tree / name, name.split("/")[0]
        read = kind if kind in ("onnx", "one.onnx", "published") and command not in OF_CHECKPOINTS else "run"
        places = {"text": tree / "text", "run": tree / "run", "model": tree / read}
        arguments = command_line(command, {output: [target]}, places)
        is_read = arguments.count(target) > 1 or name != "text"
        forced = "force" in parameters(command) and is_read and OF_ITS_KIND.get(command) != name
        for force in ([], ["--force"]) if forced else ([],):
            if not force and not is_read and not forced and "force" not in parameters(command):
                continue
            status, out, error = call(*arguments, *force)
            error = error.replace("validate: ", "mlx-transformer: ", 1)
            refused((status, out, error), str(target))
            assert any(reason in error for reason in REASONS), error
            assert state(tree) == before, (name, force)


def python_writers(made: Path, tree: Path) -> dict[str, Callable[..., Any]]:
    """Functions that write, each with everything but its output and `force`."""
    (model, tokenizer), opened = load(made / "model"), open_checkpoint(made / "model")
    assert tokenizer is not None
    pairs, vectors = ParallelText(["one"], ["two"]), dict(opened.tensors())
    return {
        "export": lambda out, **force: export(made / "model", out, **force),
        "export_onnx": lambda out, **force: export_onnx(made / "model", out, **force),
        "export_search.onnx": lambda out, **force: export_search(made / "model", out, **force),
        "save": lambda out, **force: model.save(out, **force),
        "onnx_save": lambda out, **force: OnnxTransformer(made / "onnx").save(out, **force),
        "save_checkpoint": lambda out, **force: save_checkpoint(out, opened.config, vectors, **force),
        "to_huggingface": lambda out, **force: to_huggingface(made / "model", out, **force),
        "import_huggingface": lambda out, **force: import_huggingface(tree / "published", out, **force),
        "translate_stream": lambda out, **force: translate_stream(model, None, out, text=["one"], **force),
        "tokenizer.json": lambda out, **force: tokenizer.save(out, **force),
        "text": lambda out, **force: pairs.write(out, out.with_name("target"), **force),
    }


NAMES = "export export_onnx export_search.onnx save onnx_save save_checkpoint to_huggingface import_huggingface".split()
NAMES += "translate_stream tokenizer.json text".split()


@pytest.mark.parametrize("name", NAMES)
def test_python_replaces_nothing_without_force(made, tree, tmp_path, name):
    write, out = python_writers(made, tree)[name], tmp_path / name
    write(out)
    before = state(tmp_path)
    with pytest.raises(UserError, match="--force"):
        write(out)
    assert state(tmp_path) == before
    inside = state(tree)
    with pytest.raises(UserError, match="lie inside"):
        write(tree / "run" / "model" / name)
    with pytest.raises(UserError, match=r"holds files|lie inside"):
        write(tree / "notes" if out.is_dir() else tree / "run" / "model" / f"model{out.suffix}", force=True)
    assert state(tree) == inside
    write(out, force=True)
    assert state(tmp_path) != before


LINES = {
    "translate": ["translate", "MODEL", "--input", "TEXT"],
    "evaluate": ["evaluate", "MODEL", "--source", "TEXT", "--reference", "TEXT"],
    "score": ["score", "MODEL", "--source", "TEXT", "--reference", "TEXT"],
    "compare": ["compare", "MODEL", "MODEL", "--source", "TEXT"],
    "explain": ["explain", "MODEL", "one"],
}


def filled(arguments: list[str], tree: Path, out: Path) -> list[Any]:
    places = {"MODEL": tree / "onnx", "TEXT": tree / "text"}
    return [*(places.get(each, each) for each in arguments), "--out", out]


@pytest.mark.fast("evaluate", "translate")
@pytest.mark.parametrize("name", [name for name in LINES if name != "compare"])
def test_a_file_is_replaced_by_force_alone_and_only_one_of_its_kind(call, tree, tmp_path, name):
    out = tmp_path / "out"
    arguments = filled(LINES[name], tree, out)
    out.touch()  # as mktemp leaves it: nothing is lost
    assert call(*arguments)[0] == 0
    first = out.read_bytes()
    refused(call(*arguments), f"{out}: holds another ", "--force")
    assert call(*arguments, "--force")[0] == 0
    assert out.read_bytes()[:64] == first[:64]
    for other in (b"\x00\x01\x02", b'{"key": 1}', b"<html>mine</html>", b"#!/bin/sh\n", b"PK\x03\x04"):
        out.write_bytes(other)
        for force in ([], ["--force"]):
            refused(call(*arguments, *force), f"{out}: holds no ")
            assert out.read_bytes() == other
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


FOLDERS = {
    "export": ["export", "CHECKPOINT"],
    "export --search": ["export", "CHECKPOINT", "--search"],
    "export --triton": ["export", "CHECKPOINT", "--triton"],
    "to-huggingface": ["to-huggingface", "CHECKPOINT"],
    "import": ["import", "PUBLISHED"],
    "average": ["average", "CHECKPOINT", "CHECKPOINT"],
    "shortlist": ["shortlist", "CHECKPOINT", "--source", "TEXT", "--reference", "TEXT", "--first", "4"],
    "validate": ["validate", "CHECKPOINT", "ONNX", "--runtimes", "onnxruntime", "--json", "OUT"],
}


CHECKPOINTS = ("import", "average")


def written_by_another_process(out: Path, folder: bool) -> None:
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    if folder:
        out.mkdir()
    (out / "theirs" if folder else out).write_text("theirs")


RACES = [(name, False) for name in (*LINES, *FOLDERS)]
RACES += [(name, True) for name in ("translate", "shortlist", "average", "export --search")]
"""By --force one of each kind of rename."""


@pytest.mark.parametrize(("name", "forced"), RACES)
def test_of_two_writers_the_second_is_refused(call, tree, made, tmp_path, monkeypatch, name, forced):
    """Another process writes OUT after the command has found that it may: at the last rename it is refused."""
    out = tmp_path / ("out.onnx" if "search" in name else "out")
    if name in LINES:
        arguments = filled(LINES[name], tree, out)
    else:
        places = {"CHECKPOINT": made / "model", "PUBLISHED": tree / "published", "ONNX": made / "onnx", "OUT": out}
        arguments = [places.get(each, tree / "text" if each == "TEXT" else each) for each in FOLDERS[name]]
        arguments += [] if "OUT" in FOLDERS[name] else ["--out", out]
    if forced:
        assert call(*arguments)[0] == 0
        arguments.append("--force")

    class Decided(durable.Output):
        def __init__(self, *values: Any, **more: Any):
            super().__init__(*values, **more)
            if self.path == out:
                written_by_another_process(out, name in ("export", "export --triton", "to-huggingface", *CHECKPOINTS))

    monkeypatch.setattr(outputs, "Output", Decided)
    status, _, error = call(*arguments)
    assert (status, error.count("\n")) == (2, 1), error
    assert "another process has written it meanwhile" in error
    assert (out / "theirs" if out.is_dir() else out).read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
