"""A run's folder: exact resume, damaged checkpoints, other recipes."""

from __future__ import annotations

import json

import pytest
import yaml
from choices import both_choices
from combined import thinned
from tiny_run import metrics, recipe, write_pairs

from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.device import deciding_as
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.trainer import Trainer

pytestmark = [*both_choices, pytest.mark.usefixtures("all_cores")]


def train(folder, out="run", resume=False, **options):
    return Trainer(recipe(folder, **options), folder / out, resume).run()


def saved_files(run, step):
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def weights(folder):
    return dict(open_checkpoint(folder).tensors())


def losses(run):
    return [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in metrics(run, "train")]


def test_a_run_leaves_everything_behind(tmp_path):
    result = train(tmp_path, steps=7, valid_every=3, valid_sentences=2, keep=2, checkpoint_seconds=0)
    run = tmp_path / "run"
    assert (result.state.step, result.interrupted) == (7, None)
    assert result.parameters == sum(array.size for _, array in open_checkpoint(result.model).tensors())
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000006", "step-00000007"]
    assert sorted(path.name for path in run.iterdir() if path.name != "tensorboard") == [
        "checkpoints", "metrics.jsonl", "model", "run.json", "tokenizer.json"
    ]  # fmt: skip
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert record["recipe"]["training"]["steps"] == 7
    assert record["config"]["d_model"] == 16
    assert len(record["data"]["train"]["source"]) == 64
    assert {"mlx", "numpy", "python"} <= record["versions"].keys()
    assert [entry["step"] for entry in metrics(run, "train")] == [1, 2, 3, 4, 5, 6, 7]
    assert [entry["step"] for entry in metrics(run, "valid")] == [3, 6, 7]
    assert {"loss", "bleu", "chrf", "exact_match", "epoch"} <= metrics(run, "valid")[0].keys()
    opened = open_checkpoint(run)
    last = open_checkpoint(run / "checkpoints" / "step-00000007")
    assert (opened.folder / "model.safetensors").read_bytes() == (last.folder / "model.safetensors").read_bytes()
    assert opened.tokenizer_path is not None
    assert not (opened.folder / "optimizer.safetensors").exists()
    keys = yaml.safe_load((opened.folder / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    (result,) = keys["model-index"][0]["results"]
    assert "language" not in keys
    assert result["dataset"]["name"] == "set aside of the training text, validation"
    bleu, chrf, perplexity = result["metrics"]
    assert (bleu["value"], chrf["value"]) == tuple(metrics(run, "valid")[-1][name] for name in ("bleu", "chrf"))
    assert bleu["args"]["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.")
    assert perplexity["value"] == round(metrics(run, "valid")[-1]["perplexity"], 3)


@pytest.mark.usefixtures("on_cpu")
def test_resumed_is_bit_identical_to_uninterrupted(tmp_path):
    """Weights, Adam's moments and the loss curve, over the end of an epoch, with dropout."""
    train(tmp_path, "straight", steps=9)
    train(tmp_path, "parts", steps=2)
    train(tmp_path, "parts", resume=True, steps=6)
    result = train(tmp_path, "parts", resume=True, steps=9)
    assert result.state.step == 9
    assert saved_files(tmp_path / "parts", 9) == saved_files(tmp_path / "straight", 9)
    assert losses(tmp_path / "parts") == losses(tmp_path / "straight")
    other = train(tmp_path, "seed", steps=9, seed=2)
    assert saved_files(tmp_path / "seed", 9) != saved_files(tmp_path / "straight", 9)
    assert other.state.target_tokens > 0


def test_the_rate_of_every_step(tmp_path):
    """Warm-up over 4 steps, the paper's formula, then the falling end: the last step still counts."""
    train(tmp_path, steps=8, warmup_steps=4, cooldown=0.5, learning_rate_scale=2.0)
    rates = [rate for _, _, rate in losses(tmp_path / "run")]
    paper = [2.0 * 16**-0.5 * min(step**-0.5, step * 4**-1.5) for step in range(1, 9)]
    factors = [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert rates == pytest.approx([rate * factor for rate, factor in zip(paper, factors, strict=True)])


def test_the_run_ends_at_the_first_of_its_limits(tmp_path):
    assert train(tmp_path, "steps", steps=3, epochs=50.0, minutes=50.0).state.step == 3
    run = train(tmp_path, "epochs", steps=300, epochs=1.5)
    assert run.state.epoch == pytest.approx(1.5, abs=0.2)
    run = train(tmp_path, "minutes", steps=10**6, minutes=0.003)
    assert run.state.seconds >= 0.18
    assert run.state.step < 10**6


def test_a_resumed_run_that_is_finished_computes_nothing(tmp_path):
    train(tmp_path, steps=3)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert train(tmp_path, resume=True, steps=3).state.step == 3
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run" / "checkpoints").iterdir()} == before
    assert len(metrics(tmp_path / "run", "valid")) == 1


@pytest.mark.fast("own-state")
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("damage", thinned(["flip", "manifest", "state"], 2))
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, capsys, damage):
    train(tmp_path, "straight", steps=9)
    train(tmp_path, steps=6, checkpoint_seconds=0)
    run = tmp_path / "run"
    newest = run / "checkpoints" / "step-00000006"
    if damage == "flip":
        data = bytearray((newest / "optimizer.safetensors").read_bytes())
        data[-1] ^= 1
        (newest / "optimizer.safetensors").write_bytes(data)
    else:
        (newest / {"manifest": "manifest.json", "state": "training.json"}[damage]).unlink()
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st')  # a kill in the middle of a line
    train(tmp_path, resume=True, steps=9, keep=1)
    error = capsys.readouterr().err
    assert "step-00000006 is damaged, trying the one before it" in error
    assert "resumed from step-00000005" in error
    assert saved_files(run, 9) == saved_files(tmp_path / "straight", 9)
    assert losses(run) == losses(tmp_path / "straight"), "steps that were computed again stand there once"
    # The damaged one no longer counts among those that are kept.
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["damaged-step-00000006", "step-00000009"]


def test_all_checkpoints_damaged_is_an_error_and_none_is_touched(tmp_path):
    train(tmp_path, steps=3)
    folder = tmp_path / "run" / "checkpoints" / "step-00000003"
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="every checkpoint is damaged; restore one from a copy"):
        train(tmp_path, resume=True, steps=5)
    assert folder.is_dir()


@pytest.mark.usefixtures("on_cpu")
def test_killed_before_the_first_checkpoint(tmp_path, capsys):
    train(tmp_path, "straight", steps=4)
    Trainer(recipe(tmp_path, steps=4), tmp_path / "run").files.close()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 5}\n')
    train(tmp_path, resume=True, steps=4)
    assert "no checkpoint yet, starting from the first step" in capsys.readouterr().err
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert saved_files(tmp_path / "run", 4) == saved_files(tmp_path / "straight", 4)


def test_a_run_is_never_overwritten_or_made_up(tmp_path):
    train(tmp_path, steps=2)
    with pytest.raises(UserError, match=r"run: already holds a run; continue it with --resume"):
        train(tmp_path, steps=2)
    with pytest.raises(UserError, match=r"nothing to resume \(no run\.json\)"):
        train(tmp_path, "nowhere", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; --out needs a folder"):
        train(tmp_path, "file")
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json: damaged"):
        train(tmp_path, resume=True)


def test_another_recipe_is_refused_listing_the_differences(tmp_path):
    train(tmp_path, steps=2)
    with pytest.raises(UserError) as error:
        train(tmp_path, resume=True, steps=4, seed=2, beta1=0.8, model={"dropout": 0.3})
    for text in (
        "recipe.training.seed was 1, now 2",
        "recipe.training.beta1 was 0.9, now 0.8",
        "recipe.model.dropout was None, now 0.3",
        "config.dropout was 0.1, now 0.3",
    ):
        assert text in str(error.value)
    assert "steps" not in str(error.value)
    assert "versions" not in str(error.value)
    train(tmp_path, resume=True, steps=3, keep=5, log_every=7, checkpoint_seconds=1, valid_every=2)
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["recipe"]["training"]["keep"] == 5


def test_other_text_is_refused_and_moved_text_is_not(tmp_path):
    train(tmp_path, steps=2)
    source, target = tmp_path / "0.source", tmp_path / "0.target"
    again = recipe(tmp_path, steps=3)
    for path in (source, target):
        path.rename(path.with_suffix(path.suffix + ".moved"))
    moved = {"source": f"{source}.moved", "target": f"{target}.moved"}
    values = again.to_dict()
    values["data"] = {name: v for name, v in {**values["data"], **moved}.items() if v is not None}
    values["training"] = {name: v for name, v in values["training"].items() if v is not None}
    values["model"] = {"preset": values.pop("preset"), **values["model"]}
    assert Trainer(type(again).from_dict(values), tmp_path / "run", resume=True).run().state.step == 3
    write_pairs(tmp_path)
    source.write_text(source.read_text(encoding="utf-8").replace("1", "2"))
    with pytest.raises(UserError, match=r"data\.train\.source was '\w+\.\.\., now"):
        train(tmp_path, resume=True, steps=4)


def test_another_machine_is_said_not_refused(tmp_path, capsys):
    train(tmp_path, steps=2)
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**record, "blas": "another"}), encoding="utf-8")
    train(tmp_path, resume=True, steps=3)
    assert "blas was 'another', now " in capsys.readouterr().err
    now = json.loads(path.read_text(encoding="utf-8"))
    assert now == {**record, "recipe": now["recipe"], "model": {"final": "last", "steps": [3]}}


@pytest.mark.usefixtures("on_cpu")
def test_another_kind_of_device_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("MLX_TRANSFORMER_DEVICE_CHOICES", raising=False)
    with deciding_as("cpu"):
        train(tmp_path, steps=2)
    path = tmp_path / "run" / "run.json"
    record = path.read_text(encoding="utf-8")
    for device, remedy in {"metal": "on a machine with metal", "cuda": "on a machine with cuda"}.items():
        path.write_text(record.replace('"device": "cpu"', f'"device": "{device}"'), encoding="utf-8")
        with (
            deciding_as("cpu"),
            pytest.raises(UserError, match=f"cannot resume on cpu what was trained on {device}") as e,
        ):
            train(tmp_path, resume=True, steps=3)
        assert f"continue it {remedy}, or start a new run with another --out" in str(e.value)
    path.write_text(record, encoding="utf-8")
    with deciding_as("gpu"), pytest.raises(UserError, match="with MLX_TRANSFORMER_DEVICE=cpu"):
        train(tmp_path, resume=True, steps=3)


def test_two_processes_never_train_in_one_folder(tmp_path):
    first = Trainer(recipe(tmp_path), tmp_path / "run")
    with pytest.raises(UserError, match="another process is training in this folder"):
        Trainer(recipe(tmp_path), tmp_path / "run", resume=True)
    first.files.close()
    train(tmp_path, resume=True)


def test_dropped_pairs_are_counted(tmp_path, capsys):
    source, target = write_pairs(tmp_path)
    for path in (source, target):
        path.write_text(path.read_text(encoding="utf-8") + "1" * 400 + "\n\n\n", encoding="utf-8")
    train(tmp_path, steps=1)
    assert "left out: 1 pairs longer than 256 tokens, 2 with an empty side" in capsys.readouterr().err
