"""Models pass through memory tensor by tensor: what import and export hold at once, as Python and NumPy allocate it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import marian_models
import pytest
from combined import thinned, thinned_rows
from random_models import random_weights

from export import export_onnx, export_search
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.families.marian_files.conversion import import_marian
from mlx_transformer.system.tensors import number_type

LIMIT = 1.2
# No tensor has more than a fifth of the weights.
LARGE: dict[str, Any] = dict(vocab_size=3000, d_model=256, heads=4, d_ff=4096, encoder_layers=1, decoder_layers=1)
SMALL: dict[str, Any] = dict(vocab_size=60, d_model=16, heads=4, d_ff=16, encoder_layers=1, decoder_layers=1)


def peak(work: Callable[[], Any]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def share(large: Callable[[], Any], small: Callable[[], Any], weights: int) -> float:
    """The peak less that of the same on a tiny model, in multiples of the weights. What is imported late counts not."""
    small()
    return (peak(large) - peak(small)) / weights


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[tuple[Path, TransformerConfig]]:
    """A checkpoint of 23 MB and a tiny one, of a network that Marian of `transformers` has."""
    found = []
    for sizes in (LARGE, SMALL):
        folder = tmp_path_factory.mktemp("model")
        config = TransformerConfig(**sizes, max_positions=32, positions="sinusoidal_halves", attention_bias=True)
        found.append((save_checkpoint(folder / "model", config, random_weights(config, 3)), config))
    return found


EXPORTS = [("cpu", "float32"), ("portable", "float32"), ("cpu", "int8"), ("web", "int4"), ("web", "float16")]


@pytest.mark.parametrize(("target", "precision"), thinned_rows(EXPORTS, 5))
def test_exports(target, precision, models, tmp_path):
    weights = 4 * parameter_count(models[0][1])
    large, small = (
        lambda name=name, folder=folder: export_onnx(
            folder, tmp_path / name, target=target, precision=precision, force=True, accept_loss=True
        )
        for name, (folder, _) in zip(("large", "small"), models, strict=True)
    )
    assert share(large, small, weights) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("precision", thinned(["bfloat16", "float32"], 2))
def test_sixteen_bits_are_widened_tensor_by_tensor(precision, models, tmp_path):
    halves = []
    for name, (folder, config) in zip(("large", "small"), models, strict=True):
        weights = {n: x.astype(number_type("bfloat16")) for n, x in open_checkpoint(folder).unread().items()}
        halves.append(save_checkpoint(tmp_path / f"{name} half", config, weights))
    large, small = (
        lambda name=folder.name, folder=folder: export_onnx(
            folder, tmp_path / f"{name} onnx", precision=precision, force=True, accept_loss=True
        )
        for folder in halves
    )
    size = 4 if precision == "float32" else 2
    assert share(large, small, size * parameter_count(models[0][1])) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("precision", thinned(["int8", "float32"], 2))
def test_one_file(precision, models, tmp_path):
    weights = 4 * parameter_count(models[0][1])
    large, small = (
        lambda name=name, folder=folder: export_search(
            folder, tmp_path / f"{name}.onnx", target="cpu", precision=precision, force=True, accept_loss=True
        )
        for name, (folder, _) in zip(("large", "small"), models, strict=True)
    )
    assert share(large, small, weights) <= LIMIT


@pytest.mark.slow
def test_there_and_back(models, tmp_path):
    weights = 4 * parameter_count(models[0][1])
    to_large, to_small = (
        lambda name=name, folder=folder: to_huggingface(folder, tmp_path / name, force=True)
        for name, (folder, _) in zip(("large", "small"), models, strict=True)
    )
    assert share(to_large, to_small, weights) <= LIMIT
    large, small = (
        lambda name=name: import_huggingface(tmp_path / name, tmp_path / f"{name} again", force=True)
        for name in ("large", "small")
    )
    assert share(large, small, weights) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("integers", thinned([True, False], 2))
def test_marians_files(integers, tmp_path):
    sizes = {"dim-emb": 256, "transformer-dim-ffn": 2048, "enc-depth": 3, "dec-depth": 2, "dim-vocabs": [90, 90]}
    marian_models.write_model(tmp_path / "large", {**marian_models.STUDENT, **sizes}, integers=integers)
    marian_models.write_model(tmp_path / "small", marian_models.STUDENT, integers=integers)
    large, small = (
        lambda name=name: import_marian(tmp_path / name, tmp_path / f"{name} ours", force=True)
        for name in ("large", "small")
    )
    held = share(large, small, 1)
    assert held <= LIMIT * 4 * parameter_count(open_checkpoint(tmp_path / "large ours").config)
