"""Files cut short at every byte, and single bits that flip: found, in one line, or without an effect."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import readers
from commands import Case, Verdict, call, complaint, contents, copy, part

FLIPS = 1000
IN_ONE = 1000
"""Cuts of one case."""
BY_COMMAND = 200


@dataclass(frozen=True)
class Damaged:
    """A folder that is damaged, and the command that reads it."""

    name: str
    command: str


CURVE = re.compile(rb'"kind": "train", ("step": .*) "tokens_per_second"')
COMMANDS = (
    *(Damaged(name, f"translate {{f}}/{name} --input {{b}}/in.txt") for name in ("model", "quantized", "onnx", "cpu")),
    Damaged("run", "train --resume {f}/run --steps 4"),
)


def cuts(base: Path, folder: Path, count: int | None, seed: int) -> list[Case]:
    """In one process, by the functions that read; and by commands, some of them."""
    found = []
    for reader in readers.READERS:
        size = (base / reader.file).stat().st_size
        lengths = list(range(size))
        if count is not None:
            lengths = sorted(Random(f"{seed}{reader}").sample(lengths, min(size, -(-count // len(readers.READERS)))))
        for begun in range(0, len(lengths), IN_ONE):
            some = lengths[begun : begun + IN_ONE]
            name = f"{reader.file} at {some[0]} to {some[-1]}"
            found.append(Case(reader.of, name, partial(readers.cut, base=base, reader=reader, lengths=some)))
    number = BY_COMMAND if count is None else -(-count // 10)
    return [*found, *_by_command(base, folder, "cut", number, seed)]


def flips(base: Path, folder: Path, count: int | None, seed: int) -> list[Case]:
    return _by_command(base, folder, "flip", FLIPS if count is None else count, seed)


def _by_command(base: Path, folder: Path, how: str, count: int, seed: int) -> list[Case]:
    wholes = {}
    for damaged in COMMANDS[:count]:
        place = folder / f"{how}-{damaged.name}"
        place.mkdir()
        wholes[damaged.name] = _run(damaged, place, base, lambda: "")[1]
    found = []
    for i in range(count):
        damaged, random = COMMANDS[i % len(COMMANDS)], Random(f"{how}:{seed}:{i}")
        files = sorted(path.relative_to(base) for path in (base / damaged.name).rglob("*") if path.is_file())
        file = random.choice(files)
        at = random.randrange((base / file).stat().st_size * (8 if how == "flip" else 1))
        case = partial(tried, base=base, damaged=damaged, file=file, how=how, at=at, whole=wholes[damaged.name])
        found.append(Case(f"{damaged.name}, by a command", f"{how} {file} at {at}", case))
    return found


def tried(folder: Path, base: Path, damaged: Damaged, file: Path, how: str, at: int, whole: Any) -> Verdict:
    def change() -> str:
        data = bytearray((folder / file).read_bytes())
        if how == "cut":
            del data[at:]
        else:
            data[at // 8] ^= 1 << at % 8
        (folder / file).write_bytes(data)
        return ""

    ended, found = _run(damaged, folder, base, change)
    if ended.status == 0:
        log = file.name == "metrics.jsonl"  # what is known of steps before; no digest, as it grows
        if found == whole:
            return Verdict("found, older one taken" if "is damaged, trying" in ended.error else "no effect")
        if log and {**found, "curve": None} == {**whole, "curve": None}:
            return Verdict("log line differs")
        return Verdict("not found", f"other results: {ended.error[-200:]!r}")
    fault = complaint(ended)
    return Verdict("found" if not fault else "not told", fault)


def _run(damaged: Damaged, folder: Path, base: Path, change: Callable[[], object]) -> tuple[Any, Any]:
    """How the command ended, and what it made."""
    copy(base / damaged.name, folder / damaged.name)
    change()
    ended = call(damaged.command.format(f=folder, b=base), folder / "process")
    if damaged.name != "run":
        return ended, ended.out
    made = part(contents(folder), ("run",))
    kept: dict[str, Any] = {name: made[name] for name in made if "/model/" in name or "step-00000004" in name}
    log = folder / "run" / "metrics.jsonl"  # its scores apart: where it was resumed, it had ended before, with one more
    return ended, {**kept, "curve": CURVE.findall(log.read_bytes()) if log.exists() else None}
