"""`train` on the command line, what it shows, and `info` on the folder it leaves."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from terminal import on_a_terminal
from tiny_run import MODEL, metrics, write_pairs, write_recipe

from mlx_transformer import cli
from mlx_transformer.system.progress import Reporter, TimeLeft
from mlx_transformer.training import progress as console
from mlx_transformer.training import progress as run_progress
from mlx_transformer.training import trainer
from mlx_transformer.training.options import TrainingOptions
from mlx_transformer.training.progress import State, closing_lines


def main(*arguments: object) -> int:
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def test_pairs_by_flags(tmp_path, monkeypatch, capsys):
    """Beside a recipe; text that has moved since is found again by the same flag."""
    rows = [json.dumps({"translation": {"en": f"{i} {i * i}", "de": f"{i}"}}) for i in range(60)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "valid.jsonl").write_text("\n".join(rows[:5]), encoding="utf-8")
    (tmp_path / "own.toml").write_text(
        '[data]\nsource = "none"\ntarget = "none"\n[model]\n'
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in MODEL.items()),
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    flags = "train own.toml --pairs train.jsonl --valid-pairs valid.jsonl --languages en-de --out run --steps 2"
    assert main(*flags.split(), "--vocab-size", 260) == 0
    assert "training on 60 pairs, 5 for validation" in capsys.readouterr().err
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    resume = ["train", "--resume", "run", "--steps", 3]
    assert main(*resume) == 2
    assert "say where it is now by --pairs" in capsys.readouterr().err
    assert main(*resume, "--pairs", "moved.jsonl") == 0


def test_flags_make_a_run_without_a_recipe(tmp_path, capsys):
    source, target = write_pairs(tmp_path, 60)
    valid = write_pairs(tmp_path, 10, seed=1)
    run = tmp_path / "run"
    files = ["--source", source, "--target", target, "--valid-source", valid[0], "--valid-target", valid[1]]
    sizes = ["--preset", "tiny", "--vocab-size", 262, "--batch-tokens", 300, "--seed", 3]
    assert main("train", *files, *sizes, "--steps", 2, "--epochs", 50, "--minutes", 9, "--out", run) == 0
    out, said = capsys.readouterr()
    assert re.fullmatch(rf"{re.escape(str(run / 'model'))}: [\d,]+ parameters, 2 steps, \d+ s\n", out)
    first, second = said.splitlines()[:2]
    assert first == "training on 60 pairs, 10 for validation; vocabulary 260, 956,416 parameters"
    plan = r"2 steps \((1.0|0.5) epochs\) or 9 minutes, (2|4) steps an epoch"  # a GPU's batches have few shapes
    assert re.match(rf"{plan}, 300 target tokens a step; learning rate up", second)
    assert re.search(r"^training 100 %  step 2/2  loss \d+\.\d{3}  [\d,]+ tokens/s  peak \d+ MB$", said, re.MULTILINE)
    assert re.search(r"^valid  step 2 .* loss \d+\.\d\d  perplexity \d+\.\d\d  bleu ", said, re.MULTILINE)
    assert len(metrics(run, "valid")) == 1

    assert main("info", run) == 0
    shown = capsys.readouterr().out
    for text in ("train 60 pairs, valid 10 pairs", "d_model", "128", "verified"):
        assert text in shown

    assert main("train", *files, *sizes, "--steps", 3, "--out", run) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main("train", *files, *sizes, "--steps", 3, "--out", run, "--resume", "--preset", "small") == 2
    assert "recipe.preset was 'tiny', now 'small'" in capsys.readouterr().err
    assert main("train", *files, *sizes, "--steps", 3, "--epochs", 50, "--out", run, "--resume") == 0
    assert "3 steps" in capsys.readouterr().out
    (run / "run.json").write_text('{"data": 3, "device": 4}', encoding="utf-8")
    assert main("info", run) == 2
    assert "run.json: damaged" in capsys.readouterr().err


def test_resume_alone_is_enough(tmp_path, capsys):
    """All else is in run.json; what is given beside it changes the length, or is compared."""
    source, target = write_pairs(tmp_path, 60)
    files = ["--source", source, "--target", target, "--preset", "tiny", "--d-model", 32, "--vocab-size", 262]
    options = ["--warmup", 1, "--learning-rate", 2e-3, "--dropout", 0.2, "--batch-tokens", 250, "--save-every", 0]
    run = tmp_path / "a run"
    assert main("train", *files, *options, "--epochs", 1, "--out", run) == 0
    first = capsys.readouterr().err
    assert "learning rate up to 0.002 over 1 steps, down to 0 over the last 50%" in first
    begun = metrics(run, "valid")[-1]["step"]
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))["recipe"]
    assert (record["training"]["warmup_steps"], record["training"]["learning_rate"]) == (1, 2e-3)
    assert (record["training"]["checkpoint_seconds"], record["model"]["dropout"]) == (0, 0.2)
    assert record["data"]["batch_tokens"] == 250
    for step, form in enumerate((["--resume", run], [run, "--resume"], ["--out", run, "--resume"]), begun + 1):
        assert main("train", *form, "--steps", step) == 0
        out, said = capsys.readouterr()
        assert f", {step} steps, " in out
        assert f"resumed from step-{step - 1:08d}" in said
    assert main("train", "--resume", run) == 0
    assert f", {begun + 3} steps, " in capsys.readouterr().out
    assert main("train", "--resume", run, "--dropout", 0.3) == 2
    said = capsys.readouterr().err
    assert "recipe.model.dropout was 0.2, now 0.3" in said
    assert "(--resume alone takes the run's own)" in said
    assert main("train", "--resume", tmp_path / "nowhere") == 2
    assert "nowhere: nothing to resume (no run.json)" in capsys.readouterr().err
    assert main("train", "--resume", source) == 2
    assert "is a file; --out needs a folder" in capsys.readouterr().err
    assert main("train", *files, "--steps", 1) == 2
    assert "Missing option '--out', the run's folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_relative_paths_goes_on_from_another_folder(tmp_path, capsys, monkeypatch):
    write_pairs(tmp_path, 60)
    write_pairs(tmp_path, 10, seed=1)
    monkeypatch.chdir(tmp_path)
    recipe = Path("recipe.toml")
    recipe.write_text('[data]\nvalid_source = "1.source"\nvalid_target = "1.target"\n')
    files = ["--source", "0.source", "--target", "./0.target", "--preset", "tiny", "--vocab-size", 262]
    assert main("train", recipe, *files, "--steps", 1, "--out", "run") == 0
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert main("train", "--resume", "../run", "--steps", 2) == 0
    assert "../run/model: " in capsys.readouterr().out
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["recipe"]["data"]
    assert (record["target"], record["valid_source"]) == (str(tmp_path / "0.target"), str(tmp_path / "1.source"))

    (tmp_path / "0.source").rename("moved.source")
    assert main("train", "--resume", "../run", "--steps", 3) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / '0.source'}: not found, from where ../run/run.json has its text" in said
    assert "by --source" in said
    assert main("train", "--resume", "../run", "--steps", 3, "--source", "moved.source") == 0


@pytest.mark.slow
def test_the_batch_is_recorded_as_it_was_chosen(tmp_path, capsys):
    source, target = write_pairs(tmp_path, 60)
    run = tmp_path / "run"
    flags = ["--source", source, "--target", target, "--preset", "tiny", "--vocab-size", 262, "--out", run]
    assert main("train", *flags, "--steps", 1) == 0
    path = run / "run.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["recipe"]["data"]["batch_tokens"] == 500
    record["recipe"]["data"]["batch_tokens"] = 400  # by the rule of another version
    path.write_text(json.dumps(record), encoding="utf-8")
    assert main("train", "--resume", run, "--steps", 2) == 0
    assert "400 target tokens a step" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_too_short_for_its_warm_up_says_so_first_and_last(tmp_path, capsys, monkeypatch):
    """And takes a shorter one, up to the same rate."""
    monkeypatch.setattr(console, "FORECAST_AFTER", 3)
    recipe = write_recipe(tmp_path, steps=12, warmup_steps=4000, learning_rate=0.02, cooldown=0.5)
    assert main("train", recipe, "--out", tmp_path / "steps") == 0
    said = capsys.readouterr().err.splitlines()
    assert "learning rate up to 0.02 over 6 steps" in said[1]
    assert said[2].startswith("warning: the run ends at step 12, inside its warm-up of 4,000 steps, which is shortened")
    assert said[-1].startswith("warning: the run ended at step 12, inside its warm-up of 4,000 steps, which was")
    for line in (said[2], said[-1]):
        assert "shortened to 6:" in line
        assert "warmup_steps" in line
    rates = [entry["learning_rate"] for entry in metrics(tmp_path / "steps", "train")]
    assert max(rates) == pytest.approx(0.02, rel=0.1)
    assert rates.index(max(rates)) in (5, 6)
    assert any(re.fullmatch(r"at this speed: 12 steps in all, \d:\d\d:\d\d from now", line) for line in said)
    looks = itertools.count()
    monkeypatch.setattr(run_progress, "time", SimpleNamespace(monotonic=lambda: next(looks) / 100))
    assert main("train", recipe, "--minutes", 0.02, "--steps", 10**6, "--out", tmp_path / "minutes") == 0
    said = capsys.readouterr().err
    assert re.search(r"^at this speed: [\d,]+ steps in all, 0:00:0\d from now$", said, re.MULTILINE)
    assert re.search(r"^warning: the run ends at step [\d,]+, inside its warm-up", said, re.MULTILINE)
    assert said.splitlines()[-1].startswith("warning: the run ended at step ")
    rates = [entry["learning_rate"] for entry in metrics(tmp_path / "minutes", "train")]
    assert max(rates) == pytest.approx(0.02, rel=0.1)
    assert abs(rates.index(max(rates)) - len(rates) / 2) < 0.1 * len(rates)
    assert main("train", recipe, "--steps", 2, "--warmup", 1, "--out", tmp_path / "two") == 0
    assert "warning" not in capsys.readouterr().err
    options = [
        "--cooldown",
        0,
        "--steps",
        2,
        "--warmup",
        2,
    ]  # which may be made longer: the rate stays that of a long one
    assert main("train", recipe, *options, "--out", tmp_path / "endless") == 0
    said = capsys.readouterr().err.splitlines()
    assert (
        said[-1]
        == "warning: the run ended at step 2, inside its warm-up of 2 steps: train longer, or lower warmup_steps"
    )
    assert [entry["learning_rate"] for entry in metrics(tmp_path / "endless", "train")] == pytest.approx([0.01, 0.02])


def test_how_a_run_ended_early_is_said():
    options = TrainingOptions(epochs=10, best="loss", patience=2, warmup_steps=40)
    early, warning = closing_lines(options, State(step=30, epoch=3.0, validations_since_best=2))
    assert early == "ended early, at step 30 of about 100: no better loss in 2 validations"
    assert "inside its warm-up" in warning
    assert len(list(closing_lines(options, State(step=60, epoch=6.0, validations_since_best=2)))) == 1
    assert list(closing_lines(options, State(step=100, epoch=10.0))) == []


def test_a_log_gets_few_lines(capsys, at_pace):
    at_pace(4)
    with Reporter("training") as reporter:
        for step in range(51):
            reporter.update(0.5 + step / 100, f"step {step}")  # a resumed run begins at 50 %
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training  50 %  step 0"
    assert lines[1] == "training  53 %  step 3  left 0:03:08"  # 47 more updates of 4 seconds
    assert lines[-1] == "training 100 %  step 50"
    assert len(lines) == 18


def test_the_time_that_is_left_follows_the_machine():
    """Fast for 300 seconds, then at a fifth of the speed: a third of the time later only that counts."""
    left, done = TimeLeft(), 0.0
    assert left.seconds(0.0) is None
    for second in range(600):
        left.note(second, done / 1000)
        if second == 299:
            assert left.seconds(second) == pytest.approx(701, abs=5)
        done += 1 if second < 300 else 0.2
    expected = (1000 - done) / 0.2
    assert left.seconds(599) == pytest.approx(expected, rel=0.01)
    assert len(left._noted) < 250


@pytest.mark.parametrize("columns", [80])
def test_a_terminal_gets_a_bar_with_everything_on_one_line(columns):
    code = (
        "import time\n"
        "from mlx_transformer.system.progress import Reporter\n"
        "with Reporter('training') as reporter:\n"
        "    for step in range(1, 9):\n"
        "        reporter.update(step / 10, f'step {step + 12000:,}/20,000  loss 2.345  10,500 tokens/s')\n"
        "        time.sleep(0.03)\n"
        "    reporter.line('valid [0.5] a line')\n"
    )
    shown = on_a_terminal([sys.executable, "-c", code], columns, PYTHONUTF8="1")  # other terminals get a plain bar
    lines = [line for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert "valid [0.5] a line" in lines
    last = lines[-1]
    assert len(last) <= columns
    assert last.startswith("training ")
    for text in ("━", "80%", "step 12,008/20,000  loss 2.345  10,500 tokens/s", " left "):
        assert text in last
    assert re.search(r"left (\d:)?\d\d:\d\d", last)


def test_a_terminal_that_can_do_nothing_gets_lines():
    code = "from mlx_transformer.system.progress import Reporter\nwith Reporter('work') as r: r.update(0.5, 'half')"
    assert on_a_terminal([sys.executable, "-c", code], 80, TERM="dumb").strip() == "work  50 %  half"


def test_a_dry_run_forecasts_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trainer, "FORECAST_AFTER", 3)
    monkeypatch.setattr(console, "FORECAST_AFTER", 3)
    monkeypatch.setenv("MLX_TRANSFORMER_DEVICE", "cpu")  # what --device sets, and here takes back again
    given = write_recipe(tmp_path, steps=1000)
    before = sorted(tmp_path.rglob("*"))
    assert main("train", given, "--dry-run", "--device", "cpu", "--out", tmp_path / "x") == 0
    out, said = capsys.readouterr()
    assert re.fullmatch(
        r"3 steps took [\d.]+ s, [\d,]+ target tokens/s; arrays took up to \d+ MB; nothing was .*\n", out
    )
    assert re.search(r"^at this speed: 1,000 steps in all, [\d:]+ from now$", said, re.MULTILINE)
    assert sorted(tmp_path.rglob("*")) == before
    assert main("train", "--resume", tmp_path / "x", "--dry-run") == 2
    assert "--dry-run forecasts a run from its start: leave out --resume" in capsys.readouterr().err
