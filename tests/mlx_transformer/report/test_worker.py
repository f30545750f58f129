"""Turns of two processes: their order, what goes wrong in them, and that they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from command_line import PROGRESS, both_models
from compared import broken, unchanged
from tiny_run import COMMAND
from waiting import PATIENCE, until

from mlx_transformer.report.comparing import compare
from mlx_transformer.report.result import rows
from mlx_transformer.report.worker import Worker, peak_memory
from mlx_transformer.system.errors import UserError

made = pytest.fixture(scope="module")(both_models)
HELPERS = Path(__file__).parents[2] / "helpers"


def test_turns_and_order():
    shares = []
    found = compare(
        ("one", unchanged),
        ("two", unchanged),
        ["b", "aaa", "cc"],
        ["b 4", "", ""],
        batch=2,
        overlong="split",
        beam=4,
        watch=lambda share, said: shares.append((share, said)),
    )
    assert found.a.outputs == ["b 4", "aaa 4", "cc 4"]
    assert shares == [(0.5, "2 of 3 lines"), (1.0, "3 of 3 lines")]
    assert (found.a.tokens, found.a.size, found.agreement) == (None, 7, 100)
    assert [row.a for row in rows(found) if row.name == "tokens a second"] == ["–"]
    assert "All 3 outputs are the same." in found._repr_html_()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("killed", UserError, r"one: the system has ended its process \(SIGKILL\)"),
        ("told", UserError, "^x: no such folder$"),
        ("bug", ValueError, "a bug"),
    ],
)
def test_what_goes_wrong_in_a_process_is_raised_here(how, error, message):
    with pytest.raises(error, match=message) as raised:
        compare(("one", partial(broken, how)), ("two", unchanged), ["a"])
    assert ("in broken" in "".join(getattr(raised.value, "__notes__", []))) == (how == "bug")


def test_processes_end_with_the_comparison():
    worker = Worker("one", unchanged)
    assert worker.ask("describe") == ({"model": "unchanged"}, 7)
    worker.close()
    assert not worker.process.is_alive()


def test_peak_memory_is_of_this_program():
    assert 10e6 < peak_memory() < 20e9


def test_ctrl_c_is_one_line(made, tmp_path):
    """Sent to the whole group, as a terminal does, while the models run."""
    many = tmp_path / "many"
    many.write_text("one two three four five six seven\n" * 20000)
    options = ["--source", str(many), "--max-new-tokens", "20", "--out", str(tmp_path / "page.html")]
    command = [*COMMAND, "compare", str(made / "model"), str(made / "onnx"), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("needs Linux's /proc")
    until(lambda: len(children.read_text(encoding="utf-8").split()) >= 2)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, PROGRESS.sub("", said)) == (130, "mlx-transformer: interrupted\n")
    assert not (tmp_path / "page.html").exists()


def test_no_process_hears_ctrl_c_before_it_can_ignore_it():
    """The first one too, with which Python's tracker of resources begins; looked at where nothing has run before."""
    script = """
from pathlib import Path
from compared import unchanged
from mlx_transformer.report.worker import Worker
if __name__ == "__main__":
    worker = Worker("one", unchanged)
    print(Path(f"/proc/{worker.process.pid}/status").read_text())
    worker.close()
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux's /proc")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HELPERS.parents[1], HELPERS)))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    blocked = next(int(line.split()[1], 16) for line in done.stdout.splitlines() if line.startswith("SigBlk"))
    assert blocked >> (signal.SIGINT - 1) & 1
