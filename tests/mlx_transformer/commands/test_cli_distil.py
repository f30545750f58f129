"""`distil`: a teacher's translations, a student trained on them, and Marian's files, each kept where it is whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from copying_model import LINES, STUDENT, write_copying_model

from mlx_transformer import cli
from mlx_transformer.commands import converting as distilling
from mlx_transformer.commands import models
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.families.marian_files.items import read_bin
from mlx_transformer.system.durable import alone


def main(*arguments: object) -> int:
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as done:
        return int(done.code or 0)
    return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that copies, as MLX and ONNX have it, and the student's text and recipe."""
    folder = write_copying_model(tmp_path_factory.mktemp("distil"))
    for name, lines in {"source": LINES, "valid.source": LINES[:6], "valid.target": LINES[:6]}.items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "student.toml").write_text(STUDENT, encoding="utf-8")
    return folder


def flags(folder: Path, out: Path, **others: object) -> list[object]:
    values = {"source": folder / "source", "recipe": folder / "student.toml", "out": out, "beam": 2}
    values |= {"valid-source": folder / "valid.source", "valid-target": folder / "valid.target", **others}
    return [part for name, value in values.items() for part in (f"--{name}", value)]


def test_a_student_of_a_teacher(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Interrupted between the parts, the same command makes what is missing and nothing else."""
    out = tmp_path / "run"

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(distilling, "_train", stopped)
        assert main("distil", folder / "onnx", *flags(folder, out)) == 130
    translations = out / "translations.txt"
    assert translations.read_text(encoding="utf-8").splitlines() == LINES  # as the teacher copies
    with monkeypatch.context() as patch:
        patch.setattr(models, "open_model", stopped)
        patch.setattr(distilling, "_write", stopped)
        assert main("distil", folder / "onnx", *flags(folder, out)) == 130
    weights = (out / "model" / "model.safetensors").read_bytes()
    config = open_checkpoint(out).config
    assert (config.decoder_self_attention, config.eos_id, config.pad_id) == ("ssru", 0, config.vocab_size - 1)
    capsys.readouterr()
    assert main("distil", folder / "onnx", *flags(folder, out)) == 0
    marian = out / "marian"
    names = {"README.md", "config.yml", "lex.21.50.s2t.bin", "model.intgemm.alphas.bin", "model.npz", "vocab.spm"}
    assert {path.name for path in marian.iterdir()} == names
    assert f"{marian}: written\n" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in (translations, *marian.iterdir())}
    assert main("distil", folder / "onnx", *flags(folder, out)) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (out / "model" / "model.safetensors").read_bytes() == weights
    assert f"{marian}: as it was written\n" in capsys.readouterr().out


@pytest.mark.slow
def test_more_epochs_make_another_student_of_the_same_translations(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    assert main("distil", folder / "model", *flags(folder, out)) == 0
    first = [item.data for item in read_bin(out / "marian" / "model.intgemm.alphas.bin")]
    recipe = folder / "longer.toml"
    recipe.write_text(STUDENT.replace("steps = 4", "steps = 8"), encoding="utf-8")
    assert main("distil", folder / "model", *flags(folder, out, recipe=recipe)) == 0
    assert f"{out / 'marian'}: written\n" in capsys.readouterr().out
    assert [item.data for item in read_bin(out / "marian" / "model.intgemm.alphas.bin")] != first


def test_another_teacher_text_or_search_is_refused(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    other.write_text("one two\n", encoding="utf-8")
    monkeypatch.setattr(distilling, "_translate", lambda *_: None)
    monkeypatch.setattr(distilling, "_train", lambda *_: None)
    monkeypatch.setattr(distilling, "_write", lambda *_: None)
    assert main("distil", folder / "onnx", *flags(folder, out)) == 0
    for teacher, changes, named in [
        (folder / "model", {}, "teacher"),
        (folder / "onnx", {"source": other}, "source"),
        (folder / "onnx", {"beam": 1}, "beam"),
    ]:
        assert main("distil", teacher, *flags(folder, out, **changes)) == 2
        assert f"{out}: was begun with another {named}; choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('vocab_model = "unigram"', ""), "vocab_model='bpe': Marian's engines read only unigram"),
        (("[training]", 'positions = "learned"\n[training]'), "Marian has no such model: positions='learned'"),
    ],
)
def test_a_student_that_marian_lacks_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, capsys, change: tuple[str, str], message: str
) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(STUDENT.replace(*change), encoding="utf-8")
    assert main("distil", folder / "onnx", *flags(folder, tmp_path / "run", recipe=recipe)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_source_that_is_no_text_is_one_line(folder: Path, tmp_path: Path, capfd) -> None:
    """Translating would replace its bytes, with a warning, and training refuse them."""
    source = tmp_path / "source"
    source.write_bytes(b"one\xff two\n")
    assert main("distil", folder / "onnx", *flags(folder, tmp_path / "run", source=source)) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"{source}, line 1, byte 4: not UTF-8" in said
    assert not (tmp_path / "run").exists()


def test_two_processes_distil_into_one_folder(folder: Path, tmp_path: Path, capsys) -> None:
    """The second is refused, and writes nothing."""
    out = tmp_path / "run"
    out.mkdir()
    with alone(out / "distil", out):
        before = list(out.iterdir())
        assert main("distil", folder / "model", *flags(folder, out)) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"{out}: another process is distilling" in said
        assert list(out.iterdir()) == before
    assert list(out.iterdir()) == []


def test_the_recipe_is_one_that_marian_has() -> None:
    from mlx_transformer.training.recipe import load_recipe

    recipe = load_recipe("distil", {"data": {"source": "s", "target": "t"}})
    distilling._check_student(recipe, "distil")
    assert recipe.training.smoothing == 0
    assert json.loads(recipe.config(4000).to_json())["decoder_self_attention"] == "ssru"


def test_a_folder_that_is_something_elses_is_refused_before_the_work(folder: Path, tmp_path: Path, capsys) -> None:
    """The teacher itself, a folder in it, a run, a model; nothing is left in them."""
    shutil.copytree(folder / "onnx", tmp_path / "teacher")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "translations.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for out in ("teacher", "teacher/student", "run", "text", "text/translations.txt"):
        assert main("distil", tmp_path / "teacher", *flags(folder, tmp_path / out)) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert str(tmp_path / out) in said
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
