"""Faults of the machine and slips of its user: kills, a full disk, cut files, flipped bits, outputs that are inputs,
two writers of one place, long texts, many threads. A table, and exit 1 if anything is lost, left half, taken for whole,
or told with a traceback.

    make faults ARGS="--count 50"      ARGS="--only kills --seed 7"      ARGS="--repeat 'places: train: kill at 61'"

--count: at most so many of each class, spread over all that there are: kills, places, outputs, rounds, cuts, flips,
thousands of lines, requests. Without it all of them: 200 kills of `train` and as many of `distil`, every place, every
output, 30 rounds of each command, every byte, 1,000 flips, a million lines, 10,000 requests in threads, 20,000 in a row
to a server.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

# Before the libraries are imported: a fork has the threads of its parent no more.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ |= {"NO_COLOR": "1", "MLX_TRANSFORMER_DEVICE": "cpu"}

import bases  # noqa: E402
import damaged  # noqa: E402
import forks  # noqa: E402
import in_a_row  # noqa: E402
import kills  # noqa: E402
import long_text  # noqa: E402
import own_inputs  # noqa: E402
import places  # noqa: E402
import side_by_side  # noqa: E402
import two_writers  # noqa: E402
from commands import WRITERS, Case, Verdict  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from mlx_transformer.page import generator  # noqa: E402
from mlx_transformer.system.machine import usable_cores  # noqa: E402

T = TypeVar("T")
LONGEST = 8 * 3600  # seconds of one case; the commands in it are watched by it

Cases = Callable[[Path, Path, int | None, int], list[Case]]
"""(what `bases.make` made, a folder, how many at most, the seed) -> what is tried."""


def of_places(base: Path, folder: Path, count: int | None, seed: int) -> list[Case]:
    """Of a few commands only, where it is not worth to look at all of them."""
    writers = spread(list(WRITERS), count, seed)
    found = [
        case
        for place in places.all_places(base, folder, writers)
        for how in ("kill", "power", "full", "refuse")
        for case in place.cases(how)
    ]
    return spread(found, count, seed)


CLASSES: dict[str, Cases] = {
    "kills": kills.cases,
    "distil": kills.distilling,
    "places": of_places,
    "inputs": own_inputs.cases,
    "writers": two_writers.cases,
    "cuts": damaged.cuts,
    "flips": damaged.flips,
    "text": long_text.cases,
    "threads": side_by_side.cases,
    "requests": in_a_row.cases,
}


def spread(cases: list[T], count: int | None, seed: int) -> list[T]:
    """So many of them, from all parts: one of each stretch of equal length, drawn."""
    if count is None or count >= len(cases):
        return cases
    random, size = Random(seed), len(cases) / count
    return [cases[int(i * size + random.random() * size)] for i in range(count)]


@dataclass
class Row:
    """What became of the cases of one kind."""

    cases: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, case: Case, verdict: Verdict, seconds: float) -> None:
        self.cases += verdict.count
        self.ended[verdict.ended] += verdict.count
        self.seconds += seconds
        if verdict.fault:
            self.faults.append(f"{case.name}: {verdict.fault}")


class Process:
    """A case in a fork: what it does to itself, its limits and its memory, is gone with it."""

    def __init__(self, case: Case, place: Path):
        self.case, self.place = case, place
        (place / "case").mkdir(parents=True)
        (place / "work").mkdir()
        self.child = forks.Child(place / "case", self._prepare)

    def _prepare(self) -> Callable[[], int]:
        forks.SECONDS = 120  # of a command, on a busy machine
        os.chdir(self.place / "work")

        def run() -> int:
            verdict = self.case.run(self.place / "work")
            (self.place / "verdict.json").write_text(json.dumps(asdict(verdict)), encoding="utf-8")
            return 0

        return run

    def ended(self) -> tuple[Verdict, float] | None:
        if (ended := self.child.ended()) is None:
            return None
        if ended.status == 0:
            verdict = Verdict(**json.loads((self.place / "verdict.json").read_text(encoding="utf-8")))
        elif ended.status == forks.GUILTY:
            raise SystemExit(f"{self.case.of}: {self.case.name}: the harness itself failed\n{ended.error}")
        else:
            verdict = Verdict("crash", ended.killed or f"ended with {ended.status}: {ended.error[-300:]}")
        shutil.rmtree(self.place, ignore_errors=True)
        return verdict, ended.seconds


def run_all(chosen: list[Case], folder: Path, workers: int, until: float) -> Iterator[tuple[Case, Verdict, float]]:
    """(case, how it ended, seconds), in the order of their ends."""
    running: list[Process] = []
    waiting = iter(enumerate(chosen))
    try:
        while True:
            while len(running) < workers and time.monotonic() < until and (following := next(waiting, None)):
                running.append(Process(following[1], folder / f"case-{following[0]}"))
            if not running:
                return
            time.sleep(0.002)
            for process in list(running):
                if (found := process.ended()) is not None:
                    running.remove(process)
                    yield process.case, *found
    finally:
        for process in running:
            process.child.end()


def table(rows: dict[tuple[str, str], Row]) -> Table:
    shown = Table("class", "of", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("tried", "faults", "seconds"):
        shown.add_column(name, justify="right")
    shown.add_column("ended")
    for (kind, of), row in rows.items():
        ended = ", ".join(f"{name} {number:,}" if number > 1 else name for name, number in row.ended.most_common())
        faults = Text(str(len(row.faults)), style="red" if row.faults else "")
        shown.add_row(kind, of, f"{row.cases:,}", faults, f"{row.seconds:.0f}", Text(ended))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="of each class at most (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn (default: 1)")
    parser.add_argument("--only", help=f"of the classes with this in their names: {', '.join(CLASSES)}")
    parser.add_argument("--repeat", metavar="TEXT", help="only cases with this in 'CLASS: OF: NAME'; each is told")
    parser.add_argument("--minutes", type=float, default=240, help="begin nothing after so long (default: 240)")
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes at a time (default: cores)")
    given = parser.parse_args()
    if sys.platform != "linux":
        print("make faults: needs Linux: elsewhere a process with these libraries can't be copied", file=sys.stderr)
        return 3
    chosen = [name for name in CLASSES if given.only is None or given.only in name]
    if not chosen:
        raise SystemExit(f"--only {given.only}: no such class; there are {', '.join(CLASSES)}")
    place, here, begin = Path(tempfile.mkdtemp(prefix="faults-")), os.getpid(), time.monotonic()
    rows: dict[tuple[str, str], Row] = defaultdict(Row)
    console, interrupted = Console(highlight=False, width=120), False
    try:
        base = made(place)
        forks.import_all()
        for name in chosen:
            folder = place / name
            folder.mkdir()
            cases = CLASSES[name](base, folder, given.count, given.seed)
            if given.repeat:
                cases = [case for case in cases if given.repeat in f"{name}: {case.of}: {case.name}"]
            for case in cases:
                rows[name, case.of]  # in this order
            forks.SECONDS = LONGEST
            for case, verdict, seconds in run_all(cases, folder, given.workers, begin + 60 * given.minutes):
                rows[name, case.of].add(case, verdict, seconds)
                if verdict.fault or given.repeat:
                    line = f"{name}: {case.of}: {case.name}: {verdict.ended}: {verdict.fault or 'no fault'}"
                    print(line.replace(str(place), "..."), flush=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if os.getpid() == here:
            os.chdir("/")
            shutil.rmtree(place, ignore_errors=True)
    console.print(table(rows))
    faults, tried = sum(len(row.faults) for row in rows.values()), sum(row.cases for row in rows.values())
    print(f"seed {given.seed}: {tried:,} tried, {faults} faults, {time.monotonic() - begin:.0f} s")
    return 1 if faults else 130 if interrupted else 0


def made(place: Path) -> Path:
    """The models, made elsewhere: a process that has computed can't be copied."""
    base = place / "base"
    base.mkdir()
    done = subprocess.run([sys.executable, str(bases.__file__), str(base)], capture_output=True)
    if done.returncode:
        raise SystemExit(f"bases.py: {done.stderr.decode(errors='replace')}")
    texts = {"clock.txt": "0 0.0\n1 0.25\n2 1.625\n10 12.5\n", "scores.txt": "-1.0000\told\n"}
    # Earlier reports, which `commands.contents` doesn't take for new ones.
    texts["report.json"] = f" {json.dumps(dict.fromkeys(('verdict', 'checkpoint', 'onnx', 'runtimes'), 'old'))}"
    texts["report.json.html"] = generator("validate")
    for name, text in texts.items():
        (base / name).write_text(text, encoding="utf-8")
    return base


if __name__ == "__main__":
    raise SystemExit(main())
