"""A short slice of `make faults`, the same each time, and that it sees what it looks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import commands
import faults
import pytest
from commands import Writer, complaint
from forks import Ended
from waiting import PATIENCE

HERE = Path(__file__).parent
PATHS = [str(path) for path in (HERE, HERE.parents[1], HERE.parent / "helpers", HERE.parent / "fuzz")]
linux = pytest.mark.skipif(sys.platform != "linux", reason="forks a process with all libraries")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=given, timeout=5 * PATIENCE)


@linux
@pytest.mark.slow  # half of it makes the models that are damaged
def test_nothing_is_lost_in_a_short_slice():
    done = run_python(str(HERE / "faults.py"), "--count", "3", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 faults, " in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["class", "of", "tried", "faults", "seconds", "ended"]
    assert {row[0] for row in rows[1:] if row} >= {*faults.CLASSES}
    kills = [row[2:4] + row[5:] for row in rows[1:] if row and row[0] == "kills"]
    assert kills == [["1", "0", "none", "lost"]] * 3


def ended(status: int, error: str, killed: str = "") -> Ended:
    return Ended(status, b"", error, 1.0, 1, killed)


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (ended(2, "warning: x\nmlx-transformer: /a/out: no room\n"), ""),
        (ended(2, "validate: /a/out: no room\n"), ""),
        (ended(2, "mlx-transformer: no room\n"), "is not named"),
        (ended(2, "mlx-transformer: out\nmlx-transformer: out\n"), "not one line"),
        (ended(2, "mlx-transformer: out\nand more\n"), "not one line"),
        (ended(2, ""), "not one line"),
        (ended(70, "Traceback (most recent call last):\n  x"), "status 70"),
        (ended(2, "Traceback (most recent call last):\nmlx-transformer: out\n"), "not one line"),
        (ended(0, "mlx-transformer: out\n"), "status 0"),
        (ended(-11, ""), "signal 11"),
        (ended(-9, "", "hang"), "hang"),
    ],
)
def test_how_a_command_may_refuse(found, wrong):
    assert wrong in complaint(found, "out")
    assert bool(complaint(found, "out")) == bool(wrong)


# Writes a new folder beside the old one, flushes one of its two files, and puts it in its place.
SCRIPT = """
import os, sys
from pathlib import Path
from injection import Injection
root, at, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
injection = Injection(root, at, how)
injection.install()
try:
    (root / "new").mkdir()
    with open(root / "new" / "a", "wb", buffering=0) as file:
        file.write(b"12345678")
        os.fsync(file.fileno())
    (root / "new" / "b").write_text("1234", encoding="utf-8")
    (root / "old").unlink()
    os.rename(root / "new", root / "done")
    Path(sys.argv[4]).write_text("elsewhere")
except OSError as error:
    print(error.errno)
print(*(what for what, _ in injection.seen))
"""
ALL = "mkdir make write fsync make write remove rename"


@linux
@pytest.mark.parametrize(
    ("how", "at", "status", "said", "left"),
    [
        ("kill", 0, 0, [ALL], {"done/a": 8, "done/b": 4}),
        ("kill", 3, -9, [], {"old": 3, "new/a": 4}),
        ("kill", 8, -9, [], {"new/a": 8, "new/b": 4}),
        ("power", 8, -9, [], {"new/a": 8, "new/b": 0}),
        ("full", 6, 0, ["28", "mkdir make write fsync make write"], {"old": 3, "new/a": 8, "new/b": 2}),
        ("refuse", 8, 0, ["5", ALL], {"new/a": 8, "new/b": 4}),
    ],
)
def test_a_fault_is_where_it_is_asked_for(tmp_path, how, at, status, said, left):
    root = tmp_path / "root"
    root.mkdir()
    (root / "old").write_text("old")
    done = run_python("-c", SCRIPT, str(root), str(at), how, str(tmp_path / "elsewhere"))
    # Closing a file that could not be written tries once more, as often as that Python likes.
    lines = [re.sub(r"( write)+$", " write", line) for line in done.stdout.splitlines()]
    assert (done.returncode, lines) == (status, said), done.stderr
    found = {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}
    assert found == left


def test_what_depends_on_the_time_is_left_out(tmp_path):
    for name, seconds in (("a", "1.5"), ("b", "2e-05")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(f'{{"step": 1, "seconds": {seconds}}}\n')
        (tmp_path / name / "other").write_text(name)
    first, second = (commands.contents(tmp_path / name) for name in "ab")
    assert first["metrics.jsonl"] == second["metrics.jsonl"]
    assert first["other"] != second["other"]
    assert commands.part({"out/a": "1", "out.txt": "2"}, ("out",)) == {"out/a": "1"}
    assert all(isinstance(writer, Writer) and "{o}" in writer.command for writer in commands.WRITERS)
