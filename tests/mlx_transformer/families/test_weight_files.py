"""The files that a published model's weights may be in: each gives the same checkpoint, or says what is wrong."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch_archives
from combined import thinned
from marian_folders import PAPER, written
from safetensors.numpy import load_file, save_file
from small_models import random_weights
from waiting import PATIENCE

from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.families.weights import FORMS
from mlx_transformer.system.errors import UserError

WHOLE = {"model.safetensors": save_file, "pytorch_model.bin": lambda arrays, path: torch_archives.save(path, arrays)}


def split(folder: Path, name: str) -> list[Path]:
    """The folder's weights in two files of this kind, with their index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, _, kind = name.partition(".")
    shards = [folder / f"{stem}-0000{i}-of-00002.{kind}" for i in (1, 2)]
    places = {key: shards[i % 2].name for i, key in enumerate(tensors)}
    for shard in shards:
        WHOLE[name]({key: array for key, array in tensors.items() if places[key] == shard.name}, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / f"{name}.index.json").write_text(json.dumps(index))
    return shards


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("sharded", [False, True])
def test_every_kind_gives_the_same_checkpoint(name: str, sharded: bool, tmp_path: Path) -> None:
    folder = written(tmp_path)
    import_huggingface(folder, tmp_path / "expected")
    if sharded:
        split(folder, name)
    else:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        extra = {"model.encoder.embed_tokens.weight": tensors["model.shared.weight"]}
        WHOLE[name]({**tensors, **extra}, folder / name)
    import_huggingface(folder, tmp_path / "back")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes()


def test_the_form_before_pytorch_1_6_gives_the_same_checkpoint(tmp_path: Path) -> None:
    folder = written(tmp_path)
    import_huggingface(folder, tmp_path / "expected")
    weights = folder / "model.safetensors"
    torch_archives.save(folder / "pytorch_model.bin", load_file(weights), legacy=True)
    weights.unlink()
    import_huggingface(folder, tmp_path / "back")
    expected = (tmp_path / "expected" / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == expected


def edit_index(change: Callable[[dict[str, Any], list[Path]], Any]):
    def edit(folder: Path, name: str, shards: list[Path]) -> None:
        path = folder / f"{name}.index.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps(change(values["weight_map"], shards) or values))

    return edit


def twice(folder: Path, name: str, shards: list[Path]) -> None:
    """What the first file has stands in the second too."""
    reader = next(form.reader for form in FORMS if form.name == name)
    both = {key: np.asarray(array) for shard in shards for key, array in reader(shard).items()}
    WHOLE[name](both, shards[1])


WRONG = {
    "-00002-of-00002.": lambda folder, name, shards: shards[1].unlink(),
    "is missing; restore what is missing": edit_index(lambda places, s: places.update({"x": "other.bin"})),
    "x is not in ": edit_index(lambda places, shards: places.update({"x": shards[0].name})),
    "for which the index says nothing": edit_index(lambda places, shards: places.pop("model.shared.weight") and None),
    "for which the index says": twice,
    "'../model.bin' is no file's name; '' is no file's name": edit_index(
        lambda places, shards: places.update({"x": "../model.bin", "y": ""})
    ),
    "'/etc/passwd' is no file's name": edit_index(lambda places, shards: places.update({"x": "/etc/passwd"})),
    "weight_map is not a file's name for each tensor": edit_index(lambda places, shards: {"weight_map": {"x": 1}}),
    "not a file's name for each": edit_index(lambda places, shards: [1]),
    "a file's name for each": edit_index(lambda places, shards: {"weight_map": {}}),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("reason", WRONG)
def test_an_index_that_lies(reason: str, name: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    shards = split(folder, name)
    WRONG[reason](folder, name, shards)
    with pytest.raises(UserError) as error:
        import_huggingface(folder, tmp_path / "back")
    assert reason in str(error.value)
    assert f"{folder / name}.index.json: " in str(error.value)
    assert not (tmp_path / "back").exists()


def test_damage_that_is_found_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    folder = written(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.decoder.layers.1.fc2.bias"][3] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.decoder\.layers\.1\.fc2\.bias is not finite"):
        import_huggingface(folder, tmp_path / "back")
    assert not list(tmp_path.glob("*back*"))


def peak(folder: Path, out: Path, verb: str = "import_huggingface") -> int:
    """Most bytes that the process of an import, or of its inverse, has."""
    code = (
        f"import sys; from mlx_transformer.convert import {verb}; {verb}(*sys.argv[1:]);"
        "from mlx_transformer.report.worker import peak_memory; print(peak_memory())"
    )
    command = [sys.executable, "-c", code, str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(WHOLE, 2))
def test_weights_pass_through_memory_one_by_one(name: str, tmp_path: Path) -> None:
    """Import of 50 MB takes less than half of that beyond what an import of next to nothing takes."""
    large = dataclasses.replace(PAPER, d_model=384, d_ff=2048, d_k=96, d_v=96, encoder_layers=3, decoder_layers=3)
    peaks = []
    for config in (PAPER, large):
        folder = written(tmp_path / str(config.d_model), config)
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        WHOLE[name](tensors, folder / name)
        peaks.append(peak(folder, tmp_path / str(config.d_model) / "back"))
    weights = (tmp_path / "384" / "back" / "model.safetensors").stat().st_size
    assert weights > 5e7
    assert peaks[1] - peaks[0] < weights / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", thinned(["as published", "trained here"], 2))
def test_they_do_so_on_the_way_back(kind: str, tmp_path: Path) -> None:
    """With their channels in another order, and as they are."""
    large = dataclasses.replace(PAPER, d_model=384, d_ff=2048, d_k=96, d_v=96, encoder_layers=3, decoder_layers=3)
    peaks = []
    for config in (PAPER, large):
        ours = tmp_path / f"{config.d_model} ours"
        if kind == "trained here":
            save_checkpoint(ours, config, random_weights(config))
        else:
            import_huggingface(written(tmp_path / str(config.d_model), config), ours)
        peaks.append(peak(ours, tmp_path / f"{config.d_model} back", "to_huggingface"))
    weights = (tmp_path / "384 back" / "model.safetensors").stat().st_size
    assert weights > 5e7
    assert peaks[1] - peaks[0] < weights / 2
