"""What a path is: `Place` tells every kind by its files, and an error says how to make of it what is needed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlx_transformer.core.checkpoint import CHECKPOINT, HUGGING_FACE
from mlx_transformer.core.folders import A_CHECKPOINT, A_MODEL, AN_ONNX_FOLDER, Place, check_there
from mlx_transformer.core.outputs import check_outside
from mlx_transformer.system.durable import previous
from mlx_transformer.system.errors import UserError

OURS = {"config.json": {"d_model": 8, "vocab_size": 9}, "model.safetensors": ""}
THEIRS = {"config.json": {"model_type": "bart", "d_model": 8}, "model.safetensors": ""}
MANIFEST = {"format": 1, "files": {"model.safetensors": {"sha256": "0", "bytes": 1}}}

SURE: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("a checkpoint", OURS),
    "damaged": ("a checkpoint", {**OURS, "config.json": "{"}),
    "with an adapter": ("a checkpoint", {**OURS, "adapter.json": {}, "adapter.safetensors": ""}),
    "run": ("a run", {"run.json": {}, "metrics.jsonl": "", **{f"model/{name}": x for name, x in OURS.items()}}),
    "run of two": ("a run", {"distil.json": {}}),
    "begun": ("a run", {"run.json": {}, "checkpoints/step-00000008/manifest.json": {}}),
    "adapter": ("an adapter", {"adapter.json": {}, "adapter.safetensors": ""}),
    "PEFT": ("a published adapter", {"adapter_config.json": {}, "adapter_model.safetensors": ""}),
    "exported": ("an ONNX model", {"mlx_transformer.json": {}, "onnx/model.onnx": "", **THEIRS}),
    "Optimum": ("an ONNX model", {"config.json": {"model_type": "bart"}, "onnx/decoder_model.onnx": ""}),
    "theirs": ("a published model", THEIRS),
    "sharded": ("a published model", {"config.json": THEIRS["config.json"], "pytorch_model.bin.index.json": {}}
                | {"pytorch_model-00001-of-00001.bin": ""}),
    "with graphs": ("a published model", {**THEIRS, "onnx/model.onnx": ""}),
    "without a type": ("a published model", {**THEIRS, "config.json": {"architectures": ["X"]}}),
    "within": ("a published model", {"modules.json": [], "1_Pooling/config.json": {}}),
    "Triton": ("a Triton model", {"config.pbtxt": "", "1/model.onnx": ""}),
    "Marian": ("a Marian model", {"model.npz": "", "decoder.yml": ""}),
}  # fmt: skip
LIKELY: dict[str, tuple[str, dict[str, Any]]] = {
    "graphs": ("an ONNX model", {"model.onnx": ""}),
    "no weights": ("a published model", {"config.json": {"model_type": "bart"}, "tf_model.h5": ""}),
    "weights lost": ("a checkpoint", {"manifest.json": MANIFEST, "config.json": {"d_model": 8}}),
    "no record": ("a run", {f"model/{name}": x for name, x in OURS.items()}),
    "saved": ("a run", {"checkpoints/step-00000008/manifest.json": {}}),
    "arrays lost": ("an adapter", {"adapter.json": {}}),
    "student": ("a Marian model", {"model.intgemm8.bin": "", "vocab.spm": ""}),
    "weights alone": ("a folder", {"model.safetensors": ""}),
    "an extension": ("a folder", {"manifest.json": {"manifest_version": 3}, "config.json": {"theme": "dark"}}),
    "optimizer": ("a folder", {"model.npz.optimizer.npz": "", "pytorch_model.bin": ""}),
    "empty": ("a folder", {}),
}
KINDS = SURE | LIKELY


def made(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, values in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_folder(tmp_path, name):
    what, files = KINDS[name]
    folder = made(tmp_path / "x", files)
    assert Place.of(folder).what == what
    assert Place.of(folder).onnx == any(file.endswith(".onnx") for file in files if not file.startswith("1/"))
    if name in SURE:
        with pytest.raises(UserError, match=f"would lie inside {folder}, which is {what}; choose a place outside"):
            check_outside(folder / "new")
    else:
        check_outside(folder / "new")


@pytest.mark.parametrize("name", KINDS)
def test_force_replaces_nothing_but_the_kind_that_is_written(tmp_path, name):
    what, files = KINDS[name]
    folder = made(tmp_path / "x", files)
    assert CHECKPOINT.ours(folder) == (what == "a checkpoint")
    assert HUGGING_FACE.ours(folder) == (what == "a published model" and "model.safetensors" in files)


def test_every_other_path(tmp_path):
    for name, what in {"m.onnx": "an ONNX model", "m.npz": "a Marian model", "m.txt": "a file"}.items():
        assert Place.of(made(tmp_path / what, {name: ""}) / name).what == what
    assert Place.of(os.devnull).what == "a special file"
    assert Place.of("org/name").what == "a name on the Hub"
    for name in ("nowhere/", "model.onnx", "org/model.npz"):
        assert Place.of(name).what == "nothing"
        with pytest.raises(UserError, match=rf"{Path(name)}: no such (file|folder)"):
            check_there(name)
    kept = made(tmp_path / "kept", OURS)
    kept.rename(previous(tmp_path / "gone"))  # as a kill leaves it, between two renames
    assert Place.of(tmp_path / "gone").checkpoint_folder() == previous(tmp_path / "gone")


NEEDS_CHECKPOINT = {
    "exported": "is an ONNX model, and here a checkpoint is needed",
    "begun": "this run has written no model yet; its newest checkpoint is .*/step-00000008",
    "adapter": "is an adapter, and here a checkpoint is needed; merge it .* mlx-transformer merge BASE .*/x OUT",
    "PEFT": "is a published adapter, and here a checkpoint is needed; make one of it",
    "theirs": "is a published model, and here a checkpoint is needed; .* mlx-transformer import .*/x OUT",
    "Marian": "is a Marian model, and here a checkpoint is needed; .* mlx-transformer import .*/x OUT",
    "Triton": "is a Triton model, and here a checkpoint is needed",
    "weights lost": r"not a checkpoint folder \(model.safetensors missing\)",
    "empty": r"not a checkpoint folder \(config.json and model.safetensors missing\)",
}


@pytest.mark.parametrize("name", NEEDS_CHECKPOINT)
def test_what_is_there_and_how_a_checkpoint_is_made_of_it(tmp_path, name):
    folder = made(tmp_path / "x", KINDS[name][1])
    with pytest.raises(UserError, match=f"^{folder}: {NEEDS_CHECKPOINT[name]}"):
        Place.of(folder).checkpoint_folder()


def test_other_needs(tmp_path):
    run = made(tmp_path / "a run", SURE["run"][1])
    assert Place.of(run).checkpoint_folder() == run / "model"
    assert not Place.of(run).runs_onnx
    assert f"mlx-transformer export '{run}' OUT" in str(Place.of(run).error(AN_ONNX_FOLDER))
    assert "neither a checkpoint folder" in str(Place.of(tmp_path).error(A_MODEL))
    other = made(tmp_path / "rwkv", {**THEIRS, "config.json": {"model_type": "rwkv"}})
    assert "'rwkv' can't be imported; these can: bart" in str(Place.of(other).error(A_CHECKPOINT))
