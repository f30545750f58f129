"""A run's folder where the machine fails: kills, power, full disks."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from choices import both_choices
from tiny_run import metrics, recipe

from mlx_transformer.core import checkpoint
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.system import durable
from mlx_transformer.system.errors import UserError
from mlx_transformer.training import run_folder
from mlx_transformer.training.run_folder import Run
from mlx_transformer.training.trainer import Trainer

pytestmark = both_choices


def train(folder, out="run", resume=False, **options):
    return Trainer(recipe(folder, **options), folder / out, resume).run()


def test_what_a_kill_after_the_last_checkpoint_leaves_undone_is_done(tmp_path):
    """The last scores, the pruning, the model: as if nobody had killed it."""
    run = tmp_path / "run"
    train(tmp_path, steps=3, checkpoint_seconds=0, keep=3)
    whole = metrics(run, "valid")
    log = run / "metrics.jsonl"
    log.write_text("".join(line for line in log.read_text(encoding="utf-8").splitlines(True) if '"valid"' not in line))
    shutil.rmtree(run / "model")
    train(tmp_path, resume=True, steps=3, keep=2)
    assert metrics(run, "valid") == whole
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    assert open_checkpoint(run).folder == run / "model"


def test_the_disk_has_the_curve_before_the_checkpoint(tmp_path, monkeypatch):
    """Else a machine that goes out would leave a checkpoint whose curve is lost."""
    flushed, original = [], durable.flush

    def flush(path):
        flushed.append(path.name)
        original(path)

    monkeypatch.setattr(run_folder, "flush", flush)
    monkeypatch.setattr(durable, "flush", flush)
    train(tmp_path, steps=2, checkpoint_seconds=0)
    logs = [i for i, name in enumerate(flushed) if name == "metrics.jsonl"]
    weights = [i for i, name in enumerate(flushed) if name == "optimizer.safetensors"]
    assert len(logs) == len(weights) == 2
    assert logs[0] < weights[0] < logs[1] < weights[1]

    def refuse(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder, "flush", refuse)
    with pytest.raises(UserError, match=r"metrics\.jsonl: could not be written .*continue with --resume"):
        train(tmp_path, resume=True, steps=3, checkpoint_seconds=0)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    original, calls = checkpoint.write_tensors, []

    def filling(path, arrays):
        calls.append(path)
        if len(calls) > 4:  # two files a checkpoint: the third one fails
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path, arrays)

    monkeypatch.setattr(checkpoint, "write_tensors", filling)
    with pytest.raises(UserError, match=r"step-00000003: the checkpoint could not be written .*No space left"):
        train(tmp_path, steps=9, checkpoint_seconds=0)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]
    monkeypatch.undo()
    assert train(tmp_path, resume=True, steps=4).state.step == 4


def test_metrics_on_a_full_disk(tmp_path):
    run = Run(tmp_path, {}, resume=False, warn=print)
    run.begin()
    run.metric("train", 1, loss=1.0)
    run._metrics.close()  # type: ignore[union-attr]
    full = open("/dev/full", "wb", buffering=0) if os.path.exists("/dev/full") else None  # noqa: SIM115
    if full is None:
        pytest.skip("no /dev/full here")
    run._metrics = full
    with pytest.raises(UserError, match=r"metrics\.jsonl: could not be written .*continue with --resume"):
        run.metric("train", 2, loss=1.0)
    run.close()
