"""Runs that fit the memory they may take."""

import gc
import re
from dataclasses import replace

import pytest
from choices import both_choices, gpu_in_slow
from combined import slow
from runtimes import mlx_gpu
from tiny_run import metrics, recipe, write_pairs

from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.system.errors import UserError
from mlx_transformer.training import cost as memory
from mlx_transformer.training.loss import MAX_LOGITS, logits_within
from mlx_transformer.training.recipe import Recipe, load_recipe
from mlx_transformer.training.trainer import Trainer

pytestmark = [*both_choices, pytest.mark.usefixtures("all_cores")]
TOKENS = 1200
WIDTH, LITTLE = (64, 0.035) if mlx_gpu() else (32, 0.027)
"""d_model, and GB that are too few for a whole step. With a GPU's MLX small arrays take more than their bytes, on its
CPU too: a model half as wide takes as much and isn't cut."""
MODEL = {"d_model": WIDTH, "d_ff": 8 * WIDTH, "encoder_layers": 3, "decoder_layers": 3, "dropout": 0.0}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """So small that a toy may be cut. What other tests left would count as memory of the first run alone."""
    gc.collect()
    monkeypatch.setattr(memory, "SMALLEST_PART", 300)
    monkeypatch.setattr(memory, "MEASURED", 64)


def trainer(folder, name, resume=False, steps=2, **training):
    if not (folder / "0.source").exists():
        write_pairs(folder, 1200)
    values = recipe(folder, MODEL, steps=steps, **training).to_dict()
    data = {**{key: value for key, value in values["data"].items() if value is not None}, "batch_tokens": TOKENS}
    options = {key: value for key, value in values["training"].items() if value is not None}
    tables = {"data": data, "model": {"preset": values["preset"], **values["model"]}, "training": options}
    return Trainer(Recipe.from_dict(tables), folder / name, resume)


def peak(folder):
    return max(entry["peak_memory_mb"] for entry in metrics(folder, "train"))


@gpu_in_slow
def test_a_step_is_cut_until_it_fits(tmp_path, capsys):
    """Its tokens stay what they are; the less memory, the more parts, then checkpointed layers; none takes more."""
    whole = peak(trainer(tmp_path, "free").run().model.parent)
    gc.collect()
    found = []
    for i, share in enumerate((2, 0.75, 0.5)):
        limit = share * whole / 1000
        made = trainer(tmp_path, f"run-{i}", memory=limit)
        options = made.options
        found.append((options.gradient_checkpointing, options.accumulate))
        assert TOKENS <= options.accumulate * made.batches.batch_tokens < TOKENS + options.accumulate * 32
        made.run()
        # Two streams that work side by side hold now more, now less: of a toy's few arrays up to a tenth.
        assert peak(tmp_path / f"run-{i}") <= 1200 * limit + 1
        said = r"^memory: \d+ x [\d,]+ target tokens a step.*; about [\d.e-]+ of "
        assert re.search(said, capsys.readouterr().err, re.MULTILINE)
        del made  # of whose arrays the next one would be told
        gc.collect()
    assert found[0] == (False, 1)
    assert max(found[1]) > 1 or found[1][0]
    assert found[2][0] or found[2] > found[1]


@slow
@gpu_in_slow
@pytest.mark.usefixtures("on_cpu")
def test_what_was_chosen_stays_when_a_run_goes_on(tmp_path):
    trainer(tmp_path, "parts", memory=LITTLE).run()
    chosen = load_recipe(None, {"training": {"steps": 4}}, run=tmp_path / "parts")
    assert chosen.training.accumulate > 1 or chosen.training.gradient_checkpointing
    parts = Trainer(chosen, tmp_path / "parts", resume=True).run()
    whole = Trainer(replace(chosen, training=replace(chosen.training, memory=None)), tmp_path / "whole").run()
    one, other = (dict(open_checkpoint(folder.model).tensors()) for folder in (whole, parts))
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


@gpu_in_slow
def test_what_never_fits(tmp_path):
    with pytest.raises(UserError, match=r"memory = 0\.0001 GB: the smallest part of a step needs .* GB; raise it, or"):
        trainer(tmp_path, "run", memory=0.0001)
    assert not (tmp_path / "run").exists()


def test_chunks_of_the_loss_follow():
    assert logits_within(None) == MAX_LOGITS
    assert logits_within(1000.0) == MAX_LOGITS
    assert 16 * logits_within(1.0) == pytest.approx(1e9 / 8, rel=1e-6)


def test_a_step_that_would_take_the_text_over_and_over(tmp_path):
    said = r"accumulate = 65536: .* text [\d,]+ times, which has \d+ batches: lower it"
    with pytest.raises(UserError, match=said):
        trainer(tmp_path, "run", accumulate=2**16)
    assert not (tmp_path / "run").exists()
