"""A long text of ugly lines through `translate`: as many lines out as in, memory that doesn't grow with the text, and
the same bytes after kills and `--resume`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import forks
from commands import Case, Verdict, begin, finished
from forks import Child, Ended

LINES = 1_000_000
KILLS = 8
HOURS = 4 * 3600
GROWTH, SPARE = 1.1, 15e6
"""What memory may have grown by, for ten times the lines: a share, and bytes."""
FEW = 4000
"""Lines. So many are translated in hardly more than one part, and say nothing of memory."""
WORDS = ["one", "two", "three.", "four", "five,", "six!", "seven"]
UGLY = (
    *(b"", b" ", b"\t\t", b"\r", b"\0", b"\x1b[31mred\x1b[0m", b"\x7f\x08\x0b\x0c", b"a\rb", b"\xff\xfe\x80", b"\xc3"),
    *(b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"%s%n {} \\n", b"<pad> <s> </s>", b"-" * 300, b"\xef\xbb\xbfmark"),
    *(
        text.encode()
        for text in ("e\u0301\u0323" * 9, "\u2028two\u2029", "\u202eright", "👩‍👩‍👧‍👦", "東京 " * 9, "\u0085", "ﷺ")
    ),
)


def cases(base: Path, folder: Path, count: int | None, seed: int) -> list[Case]:
    lines = LINES if count is None else 1000 * count
    run = partial(translated, base=base, lines=lines, seed=seed)
    return [Case(model, f"{lines:,} lines", partial(run, model=model)) for model in ("model", "cpu")]


def ugly(random: Random, lines: int) -> Iterator[bytes]:
    for i in range(lines):
        kind = random.random()
        if kind < 0.3:
            yield random.choice(UGLY)
        elif kind < 0.4:
            yield random.randbytes(random.randrange(30)).replace(b"\n", b"")
        elif i % 50_000 == 777:
            yield b"long " * 40_000
        else:
            yield " ".join(random.choices(WORDS, k=random.randrange(6))).encode()


def write(path: Path, seed: int, lines: int) -> int:
    """The lines that `translate` must see."""
    with path.open("wb") as file:
        for line in ugly(Random(seed), lines):
            file.write(line + b"\n")
    return lines


def translated(folder: Path, base: Path, model: str, lines: int, seed: int) -> Verdict:
    forks.SECONDS = HOURS  # of one whole translation
    runner = _Runner(folder, base / model)
    peaks = []
    parts = (lines // 10, lines) if lines >= 10 * FEW else (lines,)
    for part in parts:
        write(folder / "in.txt", seed, part)
        ended = runner.run("whole.txt")
        if ended.status:
            return Verdict("refused", f"{ended.status}: {ended.error[-300:]}")
        if (found := (folder / "whole.txt").read_bytes().count(b"\n")) != part:
            return Verdict("lines lost", f"{part} lines in, {found} out")
        peaks.append(ended.peak)
    small, large = peaks[0], peaks[-1]
    megabytes = f"{small / 1e6:.0f} and {large / 1e6:.0f} MB"
    if large > GROWTH * small + SPARE:
        return Verdict("grows", f"{megabytes} for a tenth of the lines and all of them")
    kills, fault = runner.killed(Random(seed), ended.seconds, KILLS if len(parts) > 1 else 2)
    same = (folder / "killed.txt").exists() and (folder / "killed.txt").read_bytes() == (
        folder / "whole.txt"
    ).read_bytes()
    fault = fault or ("" if same else "other bytes after kills and --resume")
    left = sorted({path.name for path in folder.iterdir()} - {"in.txt", "whole.txt", "killed.txt", "process"})
    told = f"same bytes after {kills} kills, peak {megabytes}, {lines / ended.seconds:,.0f} lines/s"
    return Verdict(told, fault or (f"left: {left}" if left else ""), lines)


class _Runner:
    def __init__(self, folder: Path, model: Path):
        self.folder, self.model = folder, model

    def run(self, output: str) -> Ended:
        return finished(self.begin(output))

    def begin(self, output: str, *more: str) -> Child:
        paths = ["--input", str(self.folder / "in.txt"), "--output", str(self.folder / output)]
        settings = ["--overlong", "truncate", "--max-new-tokens", "6"]
        arguments = ["translate", str(self.model), *paths, *settings, *more]
        return begin(arguments, self.folder / "process", self._prepare, part_lines=None)

    def _prepare(self) -> None:
        os.environ["COLUMNS"] = "80"

    def killed(self, random: Random, seconds: float, most: int) -> tuple[int, str]:
        """Kills spread over the time that a whole run took, resumed each time, and then to the end."""
        kills = 0
        for _ in range(most):
            child = self.begin("killed.txt", "--resume")
            time.sleep(random.uniform(0.05, 2 / most) * seconds)
            child.end()
            ended = finished(child)
            if ended.status != -9:
                break
            kills += 1
        else:
            ended = finished(self.begin("killed.txt", "--resume"))
        return kills, "" if ended.status == 0 else f"{ended.status}: {ended.error[-300:]}"
