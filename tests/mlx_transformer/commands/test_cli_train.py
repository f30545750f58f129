"""`train` on the command line, what it shows, and `info` on the folder it leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import metrics, write_pairs, write_recipe
from waiting import PATIENCE

from mlx_transformer import cli
from mlx_transformer.training import progress
from mlx_transformer.training.progress import Reporter

pty = pytest.importorskip("pty")


def main(*arguments: object) -> int:
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def test_flags_make_a_run_without_a_recipe(tmp_path, capsys):
    source, target = write_pairs(tmp_path, 60)
    valid = write_pairs(tmp_path, 10, seed=1)
    run = tmp_path / "run"
    files = ["--source", source, "--target", target, "--valid-source", valid[0], "--valid-target", valid[1]]
    sizes = ["--preset", "tiny", "--vocab-size", 262, "--batch-tokens", 300, "--seed", 3]
    assert main("train", *files, *sizes, "--steps", 2, "--epochs", 50, "--minutes", 9, "--out", run) == 0
    out, said = capsys.readouterr()
    assert re.fullmatch(rf"{re.escape(str(run / 'model'))}: [\d,]+ parameters, 2 steps, \d+ s\n", out)
    assert re.search(r"^training 100 %  step 2/2  loss \d+\.\d{3}  [\d,]+ tokens/s$", said, re.MULTILINE)
    assert re.search(r"^valid  step 2 .* loss \d+\.\d\d  bleu ", said, re.MULTILINE)
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


def test_the_recipe_decides_and_flags_change_it(tmp_path, capsys):
    recipe = write_recipe(tmp_path, steps=5)
    assert main("train", recipe, "--steps", 2, "--out", tmp_path / "run") == 0
    assert ", 2 steps, " in capsys.readouterr().out


def test_a_log_gets_few_lines(capsys, monkeypatch):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with Reporter("training", log_seconds=10) as reporter:
        for step in range(51):
            reporter.update(0.5 + step / 100, f"step {step}")  # a resumed run begins at 50 %
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training  50 %  step 0"
    assert lines[1] == "training  53 %  step 3  left 0:03:08"  # 47 more updates of 4 seconds
    assert lines[-1] == "training 100 %  step 50"
    assert len(lines) == 18


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_gets_a_bar_with_everything_on_one_line(columns):
    code = (
        "import time\n"
        "from mlx_transformer.training.progress import Reporter\n"
        "with Reporter('training') as reporter:\n"
        "    for step in range(1, 9):\n"
        "        reporter.update(step / 10, f'step {step + 12000:,}/20,000  loss 2.345  10,500 tokens/s')\n"
        "        time.sleep(0.03)\n"
        "    reporter.line('valid [0.5] a line')\n"
    )
    shown = on_a_terminal([sys.executable, "-c", code], columns)
    lines = [line for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert "valid [0.5] a line" in lines
    last = lines[-1]
    assert len(last) <= columns
    assert last.startswith("training ")
    for text in ("━", "80%", "step 12,008/20,000  loss 2.345  10,500 tokens/s", " left "):
        assert text in last
    assert re.search(r"left (\d:)?\d\d:\d\d", last)


def test_a_terminal_that_can_do_nothing_gets_lines():
    code = "from mlx_transformer.training.progress import Reporter\nwith Reporter('work') as r: r.update(0.5, 'half')"
    assert on_a_terminal([sys.executable, "-c", code], 80, TERM="dumb").strip() == "work  50 %  half"


def on_a_terminal(command: list[str], columns: int, **environment: str) -> str:
    """What the command prints on a terminal of its own, without the control sequences."""
    reading, terminal = pty.openpty()
    settings = {**os.environ, "COLUMNS": str(columns), "LINES": "30", "TERM": "xterm", **environment}
    settings.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=settings) as process:
        os.close(terminal)
        shown = b""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                piece = os.read(reading, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            shown += piece
        assert process.wait(timeout=PATIENCE) == 0, shown
    os.close(reading)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


def test_everything_is_on_standard_error(tmp_path: Path, capsys):
    with Reporter("work") as reporter:
        reporter.update(1.0, "done")
        reporter.line("event")
    assert capsys.readouterr() == ("", "work 100 %  done\nevent\n")
