"""Commands of a forked process, those that write, and what they wrote."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forks import Child, Ended

PART_LINES = 2
"""Of `translate` here: a text of a few lines has several parts."""


@dataclass(frozen=True)
class Verdict:
    """How a case ended, in a word or two, and what is wrong with it, if anything is. count: of what it tried."""

    ended: str
    fault: str = ""
    count: int = 1


@dataclass(frozen=True)
class Case:
    """One thing to try in an empty folder of its own, in a process of its own. of: what it is counted with."""

    of: str
    name: str
    run: Callable[[Path], Verdict]


@dataclass(frozen=True)
class Writer:
    """A command that writes OUT, "{o}"; "{b}" is the folder of `bases.make`. old: what OUT is before, nothing if empty.
    beside: what else it writes, each after OUT's name and with the same ending as what it is before."""

    name: str
    command: str
    old: str = ""
    out: str = "out"
    again: str = ""
    """How it is given after it was interrupted, where that differs."""
    beside: tuple[str, ...] = ()


WRITERS = (
    Writer("export", "export {b}/model {o} --force", "cpu"),
    Writer(
        "export, new",
        "export {b}/model {o} --target cpu --precision int8",
        again="export {b}/model {o} --target cpu --precision int8 --force",
    ),
    Writer("export --search", "export {b}/model {o} --search --force", "text.onnx", "out.onnx"),
    Writer("quantize", "quantize {b}/model {o} --group-size 32 --force", "alone"),
    Writer("import", "import {b}/theirs {o} --force", "alone"),
    Writer("to-huggingface", "to-huggingface {b}/model {o} --force", "theirs"),
    Writer("import of Marian's", "import {b}/of-marian {o} --force", "alone"),
    Writer("to-marian", "to-marian {b}/student {o} --force", "of-marian"),
    Writer(
        "translate",
        "translate {b}/model --input {b}/in.txt --output {o} --force",
        "in.txt",
        "out.txt",
        "translate {b}/model --input {b}/in.txt --output {o} --force --resume",
    ),
    Writer(
        "evaluate",
        "evaluate {b}/model --source {b}/in.txt --reference {b}/in.txt --output {o} --force",
        "in.txt",
        "o.txt",
    ),
    Writer(
        "score",
        "score {b}/model --source {b}/in.txt --reference {b}/in.txt --output {o} --force",
        "scores.txt",
        "o.txt",
    ),
    Writer(
        "validate",
        "validate {b}/model {b}/onnx --json {o} --html {o}.html --threads 1 --force",
        "report.json",
        "out.json",
        beside=("out.json.html",),
    ),
    Writer("train", "train {b}/recipe.toml --out {o} --steps 4", again="train --resume {o}"),
)


def call(
    arguments: str | list[str], folder: Path, prepare: Callable[[], Callable[[], object] | None] | None = None
) -> Ended:
    """A command in a fork, to its end. prepare: what is done there before; it may return what is done after. Its
    outputs are kept in `folder`."""
    return finished(begin(arguments, folder, prepare))


def begin(
    arguments: str | list[str],
    folder: Path,
    prepare: Callable[[], Callable[[], object] | None] | None = None,
    part_lines: int | None = PART_LINES,
) -> Child:
    given = arguments.split() if isinstance(arguments, str) else arguments

    def prepared() -> Callable[[], int]:
        from mlx_transformer import cli
        from mlx_transformer.generation import line_files

        sys.modules["tensorboardX"] = None  # type: ignore[assignment] - whose thread writes when it likes
        if part_lines is not None:
            line_files.PART_LINES = part_lines
        after = prepare() if prepare is not None else None

        def run() -> int:
            status = 0
            try:
                cli.main(given)
            except SystemExit as done:
                status = done.code if isinstance(done.code, int) else 70
            if after is not None:
                after()
            return status

        return run

    folder.mkdir(exist_ok=True)
    for name in ("out", "error"):  # a child of before may have said more
        (folder / name).unlink(missing_ok=True)
    return Child(folder, prepared)


def finished(child: Child) -> Ended:
    while (ended := child.ended()) is None:
        time.sleep(0.002)
    return ended


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files below, but for what depends on the time, the memory and the place."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(_timeless(path)).hexdigest()[:16]
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _timeless(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".html" and data.endswith(b"</html>\n"):
        return b"a whole page"
    if path.name == "out.json" and data.startswith(b"{") and json.loads(data):
        return b"a whole report"
    if path.name in ("origin.json", "marian.json"):  # the way to the original: from each place another
        return re.sub(rb'"place": "[^"]*"', b"", data)
    if path.name == "run.json":  # of distil: its text lies in the run
        data = data.replace(str(path.parent).encode(), b".")
    if path.name in ("metrics.jsonl", "training.json"):
        measured = rb"seconds|tokens_per_second|peak_memory_mb|cache_memory_mb|compilations"
        data = re.sub(rb'"(%s)": [0-9.e+-]+' % measured, b"", data)
    if path.name == "manifest.json":  # of a checkpoint that has such files
        data = re.sub(rb'("(?:training|origin|marian)\.json": \{)[^}]*', rb"\1", data)
    return data


def part(found: dict[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Of what is one of these files or folders."""
    return {path: digest for path, digest in found.items() if path.split("/")[0] in names}


def complaint(ended: Ended, name: str = "") -> str:
    """What is wrong with how a command was refused: one line that names the file, and nothing else is right."""
    if ended.killed:
        return ended.killed
    if ended.status < 0:
        return f"ended by signal {-ended.status}"
    if ended.status != 2:
        return f"status {ended.status}: {ended.error[-200:]!r}"
    lines = ended.error.strip().splitlines()
    told = [line for line in lines if line.startswith(("mlx-transformer: ", "validate: "))]
    if "Traceback (most recent call last)" in ended.error or not told or told != lines[-1:]:
        return f"not one line of error: {ended.error[-300:]!r}"
    if name not in lines[-1]:
        return f"{name} is not named: {lines[-1]!r}"
    return ""
