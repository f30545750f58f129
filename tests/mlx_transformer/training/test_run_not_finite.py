"""Steps whose loss or gradients are not finite: skipped, counted, and the end of a run where they don't cease."""

from __future__ import annotations

import mlx.core as mx
import pytest
from choices import both_choices
from tiny_run import metrics, recipe

from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.step import TrainStep
from mlx_transformer.training.trainer import Trainer

pytestmark = both_choices


def train(folder, **options):
    return Trainer(recipe(folder, **options), folder / "run").run()


def spoiled(monkeypatch, steps):
    """Make the loss of these steps infinite or NaN."""
    call, loss, count = TrainStep.__call__, TrainStep.loss, 0

    def counting(self, batch, rate, *others):
        nonlocal count
        count += 1
        bad = float("nan") if count % 2 else float("inf")
        self.model._factor = mx.array(bad if count in steps else 1.0)  # one of the model's arrays: read at every step
        return call(self, batch, rate, *others)

    monkeypatch.setattr(TrainStep, "__call__", counting)

    def times_factor(self, *inputs, **named):
        return loss(self, *inputs, **named) * self.model._factor

    monkeypatch.setattr(TrainStep, "loss", times_factor)


def test_steps_that_are_not_finite_are_skipped_and_counted(tmp_path, monkeypatch):
    spoiled(monkeypatch, {2, 3, 5})
    result = train(tmp_path, steps=6, stop_after_bad_steps=3)
    assert result.state.skipped_steps == 3
    assert [entry["step"] for entry in metrics(tmp_path / "run", "skipped")] == [2, 3, 5]
    assert all(mx.isfinite(mx.array(array)).all().item() for _, array in open_checkpoint(result.model).tensors())


def test_too_many_of_them_in_a_row_end_the_run(tmp_path, monkeypatch):
    spoiled(monkeypatch, set(range(3, 99)))
    with pytest.raises(UserError, match=r"4 steps in a row .* the last good checkpoint is .*step-0000000"):
        train(tmp_path, steps=50, stop_after_bad_steps=4, checkpoint_seconds=0)
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    assert all(mx.isfinite(mx.array(array)).all().item() for _, array in open_checkpoint(newest).tensors())
