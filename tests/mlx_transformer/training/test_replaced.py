"""A run that takes another's place: that one stays whole until all that the new one reads is read and checked."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import recipe, write_pairs

from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.system.errors import UserError
from mlx_transformer.training import run_folder
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """FOLDER/run: of two steps, with its best checkpoint; beside it the text."""
    folder = tmp_path_factory.mktemp("trained")
    Trainer(recipe(folder, steps=2, best="loss", valid_every=1), folder / "run").run()
    return folder


@pytest.fixture
def place(trained, tmp_path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def continued(place: Path, start_from: Path, data: dict | None = None, **training: Any) -> Recipe:
    values = recipe(place, steps=1).to_dict()
    tables = {name: {k: v for k, v in values[name].items() if v is not None} for name in ("data", "training")}
    del tables["data"]["vocab_size"]
    tables["data"] |= data or {}
    tables["training"] |= {"start_from": str(start_from), **training}
    return Recipe.from_dict(tables)


def test_the_weights_that_are_read_are_never_cleared(place):
    run, before = place / "run", contents(place)
    (place / "link").symlink_to(run)
    starts = [run, run / "model", run / "best", run / "checkpoints" / "step-00000002", place / "link"]
    starts += [run / ".." / "run", place / "link" / "best"]
    for start in starts:
        for out in (run, place / "link"):
            for adapter in (None, "lora"):
                with pytest.raises(UserError, match=r"which is read and would be lost; choose another --out"):
                    Trainer(continued(place, start, adapter=adapter), out, force=True)
    (place / "link").unlink()
    assert contents(place) == before


def test_a_model_that_stands_behind_a_link_of_the_run(place):
    shutil.move(place / "run" / "model", place / "kept")
    (place / "run" / "model").symlink_to(place / "kept")
    before = contents(place)
    for start in (place / "kept", place / "run"):
        with pytest.raises(UserError, match="would be lost"):
            Trainer(continued(place, start), place / "run", force=True)
    assert contents(place) == before


def test_what_a_kill_between_two_renames_left_is_read_too(place):
    """Where two names can't be swapped in one step."""
    (place / "run" / "model").rename(place / "run" / ".model.previous")
    with pytest.raises(UserError, match="would be lost"):
        Trainer(continued(place, place / "run"), place / "run", force=True)
    assert open_checkpoint(place / "run").folder.name == ".model.previous"


def test_the_text_that_is_read_is_never_cleared(place):
    source, target = write_pairs(place / "run" / "model", seed=3)
    (place / "plain").symlink_to(place / "run" / "model")
    for name, path in (("source", source), ("target", target), ("source", place / "plain" / source.name)):
        given = continued(place, place / "elsewhere", {name: str(path)}).to_dict()
        tables = {t: {k: v for k, v in given[t].items() if v is not None} for t in ("data", "training")}
        del tables["training"]["start_from"]
        with pytest.raises(UserError, match=f"{path.name}, which is read and would be lost"):
            Trainer(Recipe.from_dict(tables), place / "run", force=True)
    text = {"text": str(place / "run" / "*" / "*.source"), "batch_tokens": 128}
    training = {"objective": "language-model", "steps": 1}
    with pytest.raises(UserError, match=f"{source.name}, which is read and would be lost"):
        Trainer(Recipe.from_dict({"data": text, "training": training}), place / "run", force=True)
    assert source.exists()
    assert target.exists()


def test_another_folder_in_the_place_may_start_one(place):
    shutil.copytree(place / "run" / "model", place / "run" / "base")
    kept = contents(place / "run" / "base")
    assert Trainer(continued(place, place / "run" / "base"), place / "run", force=True).run().state.step == 1
    assert contents(place / "run" / "base") == kept


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no parameter left": ({"freeze": "*"}, "freeze"),
    "no such parameter": ({"freeze": "nothing.*"}, "nothing"),
    "no such map": ({"adapter": "lora", "adapter_targets": "nothing"}, "nothing"),
    "damaged weights": ({}, "not finite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_who_refuses_leaves_everything(place, fault):
    options, said = FAULTS[fault]
    base = place / "base"
    shutil.copytree(place / "run" / "model", base)
    if fault == "damaged weights":
        data = bytearray((base / "model.safetensors").read_bytes())
        data[-4:] = b"\xff" * 4
        (base / "model.safetensors").write_bytes(data)
        (base / "manifest.json").unlink()
    before = contents(place)
    for out, force in ((place / "run", True), (place / "new" / "run", False)):
        with pytest.raises(UserError, match=said):
            Trainer(continued(place, base, **options), out, force=force)
        assert contents(place) == before


def test_a_board_that_refuses_leaves_everything(place, monkeypatch):
    """Weights & Biases is asked for its run before this one's predecessor is gone."""
    before = contents(place)

    def init(**options):
        (Path(options["dir"]) / "wandb").mkdir()
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=SimpleNamespace()))
    with pytest.raises(UserError, match="no network"):
        Trainer(recipe(place, steps=1, wandb="here"), place / "run", force=True)
    assert contents(place) == before


@pytest.mark.parametrize("failing", range(3))
def test_a_full_disk_leaves_everything(place, monkeypatch, failing):
    before, written = contents(place), []

    def write(path: Path, text: str) -> None:
        written.append(path.name)
        if len(written) > failing:
            raise UserError(f"{path}: could not be written")
        path.write_text(text, encoding="utf-8")

    monkeypatch.setattr(run_folder, "write_text", write)
    if failing == 2:
        Trainer(recipe(place, steps=1), place / "run", force=True).files.close()
        assert written == ["tokenizer.json", "run.json"], "the record comes last"
        return
    with pytest.raises(UserError, match="could not be written"):
        Trainer(recipe(place, steps=1), place / "run", force=True)
    assert contents(place) == before


def test_a_resumed_run_that_is_refused_keeps_its_record(place):
    """Its optimizer's state doesn't fit, which is known late."""
    run = place / "run"
    before = (run / "run.json").read_bytes()
    state = run / "checkpoints" / "step-00000002" / "training.json"
    state.write_text(state.read_text(encoding="utf-8").replace('"step"', '"stop"'), encoding="utf-8")
    (state.parent / "manifest.json").write_text("{}")
    with pytest.raises(UserError):
        Trainer(recipe(place, steps=9, best="loss", valid_every=1), run, resume=True)
    assert (run / "run.json").read_bytes() == before


def test_a_run_that_another_process_has_made_meanwhile(place, monkeypatch):
    """Between the first look and the lock."""
    fresh, lock = place / "fresh", fcntl.flock

    def late(handle: int, how: int) -> None:
        lock(handle, how)
        shutil.copytree(place / "run", fresh, dirs_exist_ok=True)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UserError, match="already holds a run"):
        Trainer(recipe(place, steps=1), fresh)
    assert contents(fresh) == contents(place / "run")
    monkeypatch.undo()
    shutil.rmtree(fresh)
    first = Trainer(recipe(place, steps=1), fresh)
    with pytest.raises(UserError, match="already holds a run"):
        Trainer(recipe(place, steps=1), fresh)
    with pytest.raises(UserError, match="another process is training in this folder"):
        Trainer(recipe(place, steps=1), fresh, force=True)
    first.files.close()
    assert os.listdir(fresh)
