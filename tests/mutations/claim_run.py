"""Take each mechanism out of a copy of the project and run the tests of the row that claims it, or of the page that
shows it: `make mutations-claims` prints which of them failed. One that no test sees makes the exit status 1."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from claim_mutations import CHANGES, Change
from claims.table import ROWS
from evaluated import IN_WORDS
from imports import ROOT
from rich.console import Console
from rich.table import Table

COPIED = ("mlx_transformer", "export", "docs", "tests", "pyproject.toml", "README.md")
FAILED = "FAILED "
SECONDS = 600


@dataclass(frozen=True)
class Seen:
    """The tests that failed, by their names; `wrong`: why the change says nothing, if it doesn't."""

    name: str
    tests: tuple[str, ...]
    wrong: str = ""


def named_by(number: int) -> list[str]:
    """The tests of a row: those that it names, those of its numbers, its figure and its formula, and those that hold
    the guide's formulas, captions and terms."""
    row = ROWS[number]
    table = "tests/claims/test_table.py::"
    shown = [f"{table}test_every_figure[{row.picture}]"] if row.shown else []
    numbers = [] if row.trained else [f"{table}test_the_numbers_hold[{number}]"]
    here = [f"{table}test_bytes_and_times_stand_at_their_names"] if number in (29, 31) else []
    formulas = "tests/claims/test_formulas.py::test_the_formula"
    formula = [f"{formulas}_of_a_row_is_what_the_code_computes[{number}]"] if number not in IN_WORDS else []
    guide = [
        f"{formulas}s_of_the_guide_are_what_the_code_computes",
        f"{table}test_a_caption_says_what_its_row_is_about",
    ]
    guide += ["tests/docs/test_guide.py::test_the_terms_of_the_walk_stand_on_the_pages_they_lead_to"]
    return [*numbers, *shown, *here, *formula, *guide, *(f"tests/{test}" for test in row.tests)]


def named_tests(change: Change) -> list[str]:
    return [*change.tests] or named_by(change.row)


def copy_project(folder: Path) -> Path:
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "node_modules", "golden*"))
        else:
            shutil.copy2(source, target)
    return folder


def run(name: str, change: Change, project: Path) -> Seen:
    """In a copy of the project, which is as it was when this returns."""
    path = project / change.file
    text = path.read_text(encoding="utf-8")
    if change.old not in text:
        return Seen(name, (), f"{change.file} has no {change.old!r:.60}")
    path.write_text(text.replace(change.old, change.new, 1), encoding="utf-8")
    try:
        return _tested(name, change, project)
    finally:
        path.write_text(text, encoding="utf-8")


def _tested(name: str, change: Change, project: Path) -> Seen:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "-rf", "--tb=no", "-m", "not slow"]
    command = [sys.executable, "-B", "-m", "pytest", *options, *named_tests(change)]
    environment = {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    environment |= {"HOME": str(project), "MUTATED": "1"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=SECONDS)
    failed = [line for line in done.stdout.splitlines() if line.startswith(FAILED)]
    names = tuple(line.removeprefix(FAILED).partition(" - ")[0].partition("::")[2] for line in failed)
    if done.returncode not in (0, 1):
        return Seen(name, names, f"pytest ended with {done.returncode}: {done.stdout[-200:]}{done.stderr[-200:]}")
    return Seen(name, names, "" if names else "no test of its row failed")


def all_seen(names: list[str], workers: int) -> list[Seen]:
    """What was seen of each, in this order; each worker has a copy of the project."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        projects = [copy_project(Path(folder) / str(i)) for i in range(workers)]
        shares = [names[i::workers] for i in range(workers)]
        done = pool.map(lambda s, p: [run(n, CHANGES[n], p) for n in s], shares, projects)
        found = {seen.name: seen for share in done for seen in share}
    return [found[name] for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in CHANGES]:
        parser.error(f"no such change: {', '.join(unknown)}")
    outcomes = all_seen(arguments.names or list(CHANGES), arguments.workers)
    table = Table("row", "what is taken out", "seen by")
    for seen in outcomes:
        table.add_row(str(CHANGES[seen.name].row or "page"), seen.name, seen.wrong or ", ".join(seen.tests))
    console = Console()
    console.print(table)
    missed = [seen.name for seen in outcomes if seen.wrong]
    console.print(f"{len(outcomes) - len(missed)} of {len(outcomes)} seen by the tests of their rows")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
