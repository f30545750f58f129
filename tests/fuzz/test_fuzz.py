"""A short slice of `make fuzz`, the same inputs each time, and that the fuzzer sees what it looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from html import escape
from pathlib import Path

import pytest
from classes import CLASSES
from forks import Ended
from fuzz import drawn, judged
from injected import MARKUP, strange_parts
from waiting import PATIENCE

HERE = Path(__file__).parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="forks a process with all libraries")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    given = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), str(HERE.parent / "helpers")]),
    }
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=given, timeout=5 * PATIENCE)


@linux
@pytest.mark.slow
def test_no_input_of_a_slice_is_a_fault():
    done = run_python(str(HERE / "fuzz.py"), "--count", "200", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 1: 200 inputs, 0 faults" in done.stdout
    assert done.stdout.splitlines()[0].split()[:4] == ["class", "run", "clean", "+"]


def ended(status: int, error: str = "one line", peak: int = 1, killed: str = "") -> Ended:
    return Ended(status, b"text", error, 1.0, peak, killed)


@pytest.mark.parametrize(
    ("found", "column"),
    [
        (ended(2), "clean"),
        (ended(0), "accepted"),
        (ended(2, "Traceback (most recent call last):\n  x"), "traceback"),
        (ended(1), "lying status"),
        (ended(-11), "crash"),
        (ended(-9, killed="hang"), "hang"),
        (ended(0, peak=3 << 30), "> 2 GB"),
    ],
)
def test_each_end_has_its_column(found, column):
    assert judged(found, CLASSES[0], None, False) == column
    assert judged(ended(0), CLASSES[0], "other", False) == "other output"
    assert judged(ended(0), next(kind for kind in CLASSES if kind.told), "other", False) == "told nothing"


@linux
def test_a_process_is_watched():
    """Signals, memory and time are seen for what they are, and files of what was printed are read."""
    script = """
import os, signal, sys, tempfile, time
from pathlib import Path
import forks
forks.BYTES = 300 << 20
def end(run, seconds):
    forks.SECONDS = seconds
    child = forks.Child(Path(tempfile.mkdtemp()), lambda: run)
    while (found := child.ended()) is None:
        time.sleep(0.01)
    print(found.status, found.killed, found.out.decode().strip(), found.peak > 200 << 20)
end(lambda: print("said") or 7, LONG)
end(lambda: os.kill(os.getpid(), signal.SIGSEGV), LONG)
end(lambda: time.sleep(LONG), 0.1)
end(lambda: sum(iter(int, 1)), 0.3)
end(lambda: [bytearray(os.urandom(1) * (20 << 20)) for _ in iter(lambda: time.sleep(0.02), 0)], LONG)
"""
    done = run_python("-c", script.replace("LONG", str(PATIENCE)))
    expected = ["7  said False", "-11   False", "-9 hang  False", "-9 hang  False", "-9 memory  True"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_inputs_are_mixed_by_weight_and_the_same_each_time():
    chosen = drawn(1000, None)
    counts = Counter(kind.name for kind, _ in chosen)
    assert len(chosen) == len({(kind.name, number) for kind, number in chosen}) == 1000
    assert counts.keys() == {kind.name for kind in CLASSES}
    assert counts["numbers"] > 5 * counts["manifest.json"]
    assert chosen == drawn(1000, None)
    assert {kind.name for kind, _ in drawn(30, "digests")} == {kind.name for kind in CLASSES if kind.told}
    with pytest.raises(SystemExit, match="no such class; there are"):
        drawn(5, "nothing")


@pytest.mark.parametrize(
    "html",
    [
        "<p><fuzzed></p>",
        "<img src=x onerror=fuzzed()>",
        "<p title='a' onfocus='fuzzed()' x=''>",
        '<a href=" JavaScript:fuzzed()">a</a>',
        '<script>const a = "</script><fuzzed>";</script>',
        "<script>const a = '<!--<script>fuzzed';</script>",
        "<svg><text></text><fuzzed/></svg>",
    ],
)
def test_markup_of_others_is_seen(html):
    assert strange_parts(f"<!doctype html><title>a</title><body>{html}</body>") != []


@pytest.mark.parametrize("text", MARKUP)
def test_markup_that_is_escaped_is_text(text):
    data = json.dumps(text).replace("<", "\\u003c")
    page = (
        f'<title>{escape(text)}</title><p title="{escape(text)}">{escape(text)}</p><script>const a = {data};</script>'
    )
    assert strange_parts(page) == []
