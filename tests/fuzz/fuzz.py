"""Damaged files, unheard-of numbers and calls: each in a process of its own, counted by how it ended. A table, and exit
1 if any ended with a traceback, by a signal, not at all, with more than 2 GB, or with a status that lies.

    make fuzz ARGS="--count 10000 --seed 7"      ARGS="--only recipe"      ARGS="--repeat recipe:7:123": one, in full

An input is drawn from (class, seed, number) alone, so each can be repeated.
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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

# Before the libraries are imported: a fork has the threads of its parent no more.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["NO_COLOR"] = "1"

from classes import CLASSES, Class  # noqa: E402
from forks import GUILTY, Child, Ended, import_all  # noqa: E402

from mlx_transformer.system.machine import usable_cores  # noqa: E402

COLUMNS = ("clean", "+ lines", "accepted", "other output", "mismatch")
FAULTS = ("traceback", "crash", "hang", "> 2 GB", "lying status", "told nothing")
MOST_BYTES = 2 << 30


def judged(ended: Ended, kind: Class, expected: str | None, mismatch: bool) -> str:
    """The column of a process. mismatch: it is of a command that ends with 1 for one."""
    if ended.killed:
        return "hang" if ended.killed == "hang" else "> 2 GB"
    if ended.status < 0:
        return "crash"
    if "Traceback (most recent call last)" in ended.error or ended.status == 70:
        return "traceback"
    if ended.peak > MOST_BYTES:
        return "> 2 GB"
    if ended.status == 0:
        same = expected is None or ended.out.decode(errors="replace") == expected
        return "accepted" if same else "told nothing" if kind.told else "other output"
    if ended.status == 1:
        return "mismatch" if mismatch else "lying status"
    if ended.status not in (2, 3):
        return "lying status"
    return "clean" if len(ended.error.strip().splitlines()) == 1 else "+ lines"


class Fuzz:
    """The inputs of one call, and what became of them."""

    def __init__(self, place: Path, seed: int):
        self.place, self.seed = place, seed
        self.base = place / "base"
        self.base.mkdir()
        made = subprocess.run([sys.executable, Path(__file__).with_name("bases.py"), self.base], capture_output=True)
        if made.returncode:
            raise SystemExit(f"bases.py: {made.stderr.decode(errors='replace')}")
        self.expected = json.loads((self.base / "expected.json").read_text(encoding="utf-8"))

    def one(self, kind: Class, number: int) -> tuple[Child, str]:
        """Begin one, and say what it is."""
        folder = self.place / f"{kind.name.replace(' ', '_').replace('/', '_')}-{number}"
        folder.mkdir()
        random = Random(f"{kind.name}:{self.seed}:{number}")
        for name in kind.bases:
            source = self.base / name
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True)
            elif source.exists():
                shutil.copyfile(source, folder / name)
        recipe = folder / "recipe.toml"
        if recipe.exists():
            recipe.write_text(recipe.read_text(encoding="utf-8").replace(str(self.base), str(folder)), encoding="utf-8")
        beside = self.place / f"{folder.name}.process"
        beside.mkdir()
        attempt, shown = kind.attempt(random, folder)
        python, arguments = (attempt, []) if callable(attempt) else (None, attempt)

        def prepare():
            kind.damage(random, folder)
            from mlx_transformer import cli
            from mlx_transformer.system.process import run

            if python is not None:
                return lambda: run("python", lambda: [python(), 0][1], whole=False)

            def command() -> int:
                try:
                    cli.main(arguments)
                except SystemExit as done:
                    return done.code if isinstance(done.code, int) else 70
                return 0

            return command

        os.chdir(folder)  # a name without a folder is written there
        return Child(beside, prepare), shown

    def all(
        self, chosen: list[tuple[Class, int]], workers: int, until: float
    ) -> Iterator[tuple[Class, int, str, str, Ended]]:
        """(class, number, command, column, how it ended) of each, in the order of their ends."""
        running: list[tuple[Class, int, Child, str]] = []
        try:
            yield from self._all(running, iter(chosen), workers, until)
        finally:
            for *_, child, _ in running:
                child.end()

    def _all(
        self,
        running: list[tuple[Class, int, Child, str]],
        waiting: Iterator[tuple[Class, int]],
        workers: int,
        until: float,
    ) -> Iterator[tuple[Class, int, str, str, Ended]]:
        while True:
            while len(running) < workers and time.monotonic() < until and (following := next(waiting, None)):
                running.append((*following, *self.one(*following)))
            if not running:
                return
            time.sleep(0.003)
            for entry in list(running):
                kind, number, child, shown = entry
                if (ended := child.ended()) is not None:
                    running.remove(entry)
                    if ended.status == GUILTY:
                        raise SystemExit(f"{kind.name}:{self.seed}:{number}: the fuzzer itself failed\n{ended.error}")
                    name, _, model = shown.split(" --")[0].partition(" {f}/")
                    plain = shown.endswith("--input {f}/in.txt") and name == "translate"
                    column = judged(ended, kind, self.expected.get(model) if plain else None, name == "validate")
                    yield kind, number, shown, column, ended
                    for folder in (child.folder, child.folder.with_suffix("")):
                        shutil.rmtree(folder, ignore_errors=True)


def table(counts: dict[str, Counter[str]]) -> str:
    """Rows of classes, columns of ends."""
    columns = ("run", *COLUMNS, *FAULTS)
    rows: list[tuple[str, ...]] = [("class", *columns)]
    total: Counter[str] = Counter()
    for name, found in counts.items():
        found = Counter({**found, "run": sum(found.values())})
        total += found
        rows.append((name, *(str(found[column] or "") for column in columns)))
    rows.append(("sum", *(str(total[column] or "") for column in columns)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:{'<' if i == 0 else '>'}{widths[i]}}" for i, cell in enumerate(row)) for row in rows
    )


def drawn(count: int, only: str | None) -> list[tuple[Class, int]]:
    """So many inputs, classes by their weights, mixed."""
    classes = [kind for kind in CLASSES if only is None or only in kind.name]
    if not classes:
        raise SystemExit(f"--only {only}: no such class; there are {', '.join(kind.name for kind in CLASSES)}")
    total, found = sum(kind.weight for kind in classes), []
    for kind in classes:
        found += [((number + 0.5) / kind.weight, kind, number) for number in range(-(-count * kind.weight // total))]
    return [(kind, number) for _, kind, number in sorted(found, key=lambda entry: entry[0])[:count]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="inputs (default: 1000, some minutes)")
    parser.add_argument("--seed", type=int, default=1, help="of all inputs (default: 1)")
    parser.add_argument("--only", help="of the classes with this in their names")
    parser.add_argument("--minutes", type=float, default=60, help="begin none after so long (default: 60)")
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes at a time (default: cores)")
    parser.add_argument("--repeat", metavar="CLASS:SEED:NUMBER", help="one input alone; its output is shown")
    parser.add_argument("--show", action="store_true", help="a line on each input")
    given = parser.parse_args()
    if not hasattr(os, "fork") or sys.platform == "darwin":
        print("make fuzz: needs Linux: elsewhere a process with these libraries can't be copied", file=sys.stderr)
        return 3
    import_all()
    chosen = drawn(given.count, given.only)
    if given.repeat:
        name, seed, number = given.repeat.rsplit(":", 2)
        chosen, given.seed = [(next(kind for kind in CLASSES if kind.name == name), int(number))], int(seed)
    place, here = Path(tempfile.mkdtemp(prefix="fuzz-")), os.getpid()
    counts: dict[str, Counter[str]] = {kind.name: Counter() for kind, _ in chosen}
    begin, interrupted = time.monotonic(), False
    try:
        fuzz = Fuzz(place, given.seed)
        for kind, number, shown, column, ended in fuzz.all(chosen, given.workers, begin + 60 * given.minutes):
            counts[kind.name][column] += 1
            if column in FAULTS or given.show or given.repeat:
                said = ended.error.strip() or ended.out.decode(errors="replace").strip()
                last = (said.splitlines() or [""])[-1][:300]
                memory = f"{ended.seconds:.1f} s, {ended.peak / 1e6:.0f} MB"
                print(
                    f"{column}: {kind.name}:{given.seed}:{number}: {shown}: {ended.status}, {memory}: {last}",
                    flush=True,
                )
            if given.repeat:
                print(ended.out.decode(errors="replace")[-3000:], ended.error[-9000:], sep="\n")
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if os.getpid() == here:
            os.chdir("/")
            shutil.rmtree(place, ignore_errors=True)
    print(table(counts))
    faults = sum(found[column] for found in counts.values() for column in FAULTS)
    done = sum(sum(found.values()) for found in counts.values())
    print(f"seed {given.seed}: {done} inputs, {faults} faults, {time.monotonic() - begin:.0f} s")
    return 1 if faults else 130 if interrupted else 0


if __name__ == "__main__":
    raise SystemExit(main())
