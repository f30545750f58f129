"""Scales of Marian's int8: from a run's validation text or another one, and files that compute with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tiny_student import train_student

from export import OnnxTransformer, export_onnx, marian_scales
from export.package import fixed_scales
from export.validate.origin.marian import MarianNetwork, State
from mlx_transformer import Tokenizer, cli
from mlx_transformer.convert import import_marian
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.int8_scales import INT8_SCALES, SYMMETRIC, Int8Scales, multiplied_names, read_int8_scales
from mlx_transformer.data import built_in
from mlx_transformer.families.marian_files.items import read_bin
from mlx_transformer.families.marian_files.options import parse_options
from mlx_transformer.system.errors import UserError

BIN = "model.intgemm.alphas.bin"


@contextmanager
def of_few_lines() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_scales, "CALIBRATED", 60)
        patch.setattr(fixed_scales, "JUDGED", 40)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_student(tmp_path_factory.mktemp("student") / "run", steps=25)


@pytest.fixture(scope="module")
def theirs(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `to-marian` writes of the run, by itself."""
    out = tmp_path_factory.mktemp("marian") / "en-de"
    with of_few_lines():
        cli.main(["to-marian", str(run), str(out)])
    return out


@pytest.fixture(scope="module")
def ours(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same read again."""
    out = tmp_path_factory.mktemp("ours") / "en-de"
    assert import_marian(theirs / BIN, out) == []
    return out


@pytest.fixture(scope="module")
def taken(run: Path) -> tuple[Int8Scales, list[str]]:
    """The scales of the run, and what was said of them."""
    told: list[str] = []
    with of_few_lines():
        scales = marian_scales(run, log=told.append)
    assert scales is not None
    return scales, told


def test_every_product_has_a_scale_of_marians_kind(run: Path, taken: tuple[Int8Scales, list[str]]) -> None:
    (scales, told), opened = taken, open_checkpoint(run)
    assert {entry.steps for entry in scales.products.values()} == {SYMMETRIC}
    assert all(scales.of(name).activation for name in multiplied_names(opened.config))
    name = "encoder.layers.0.feed_forward.up_proj.weight"
    assert scales.of(name).weight == np.float32(127) / np.abs(opened.tensor(name)).max()
    assert scales.origin["text"] == "cldr:en-de, validation"
    assert len(told) == 1
    assert told[0].startswith("int8: scales from 60 lines of cldr:en-de, validation; on others: int8: 9")


def test_a_text_that_is_given_takes_the_place_of_the_runs(
    run: Path, taken: tuple[Int8Scales, list[str]], tmp_path: Path
) -> None:
    file = tmp_path / "text"
    file.write_text("one\ntwo\nthree\n", encoding="utf-8")
    scales = marian_scales(run, file)
    assert scales is not None
    assert (scales.origin["text"], scales.origin["sentences"]) == ("text", 2)
    assert scales.products != taken[0].products


def test_a_model_without_text_is_written_without_integers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "alone"
    (run / "model").rename(alone)
    try:
        assert marian_scales(alone) is None
        cli.main(["to-marian", str(alone), str(tmp_path / "out")])
    finally:
        alone.rename(run / "model")
    assert "no .bin of integers (the checkpoint has no int8_scales.json: give text with --calibrate)" in (
        capsys.readouterr().out
    )
    with pytest.raises(UserError, match="holds no lines"):
        marian_scales(run, _empty(tmp_path))


def _empty(folder: Path) -> Path:
    (folder / "empty").write_text("\n", encoding="utf-8")
    return folder / "empty"


def test_scales_that_are_there_are_kept(ours: Path) -> None:
    assert marian_scales(ours) == read_int8_scales(ours, open_checkpoint(ours).config)


@pytest.mark.slow
def test_our_int8_writes_the_tokens_of_marians_arithmetic(ours: Path, theirs: Path, tmp_path: Path) -> None:
    """Teacher-forced, exact integers on both sides. Where an activation lies at a half, one may round it otherwise."""
    export_onnx(ours, tmp_path / "onnx", precision="int8")
    assert (tmp_path / "onnx" / INT8_SCALES).is_file()
    runner, tokenizer = OnnxTransformer(tmp_path / "onnx"), Tokenizer.load(ours)
    *items, options = read_bin(theirs / BIN)
    network = MarianNetwork({item.name: item for item in items}, parse_options(options.text(), "here"), "exact")
    lines = built_in.build("cldr:en-de", train_pairs=3000, seed=1).valid.source[:40]
    rows = tokenizer.encode_batch(lines)
    written = runner.generate(rows, max_new_tokens=30)
    agreed = total = 0
    for row, ids in zip(rows, written, strict=True):
        state = State(network.encode(row))
        best = [int(np.argmax(network.step(state, token))) for token in [None, *ids][: len(ids)]]
        agreed, total = agreed + sum(a == b for a, b in zip(best, ids, strict=True)), total + len(ids)
    assert total > 100
    assert agreed >= 0.99 * total


def test_the_start_is_never_written(ours: Path, theirs: Path) -> None:
    config = open_checkpoint(ours).config
    assert open_checkpoint(ours).tensor("output_proj.bias")[config.pad_id] == -1e4
    items = {item.name: item for item in read_bin(theirs / BIN)}
    assert items["Wemb"].shape == (config.vocab_size - 1, config.d_model)
