"""A training run, killed at random moments and resumed until it is done: no checkpoint is lost, and in the end its
curve and its weights are bit for bit those of a run that nobody killed."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from random import Random

from commands import Case, Verdict, begin, call, complaint, contents, finished
from forks import Child

KILLS = 200
IN_ONE = 10
"""Kills of one case: of one run after another, until there were so many."""
STEPS = 16


def recipe(base: Path, folder: Path) -> Path:
    """A checkpoint after each step, the last two kept, so that a process does hardly anything but save and prune."""
    path = folder / "recipe.toml"
    text = (base / "recipe.toml").read_text(encoding="utf-8")
    path.write_text(text.replace("valid_every = 1000", "valid_every = 7"), encoding="utf-8")
    return path


def cases(base: Path, folder: Path, count: int | None, seed: int) -> list[Case]:
    given, whole = recipe(base, folder), folder / "whole"
    ended = call(f"train {given} --out {whole} --steps {STEPS}", folder / "process")
    if ended.status:
        raise SystemExit(f"train: {ended.error}")
    left = KILLS if count is None else count
    sizes = [min(IN_ONE, left - begun) for begun in range(0, left, IN_ONE)]
    run = partial(killed, recipe=given, whole=contents(whole), longest=ended.seconds)
    return [
        Case("train", f"{kills} kills, {seed}:{i}", partial(run, kills=kills, seed=f"{seed}:{i}"))
        for i, kills in enumerate(sizes)
    ]


def killed(folder: Path, recipe: Path, whole: dict[str, str], longest: float, kills: int, seed: str) -> Verdict:
    """longest: seconds that a whole run takes."""
    random, done, runs = Random(seed), 0, 0
    while done < kills:
        run = folder / f"run-{runs}"
        runs += 1
        fault, killed_here = _one_run(folder, run, recipe, random, longest, kills - done)
        done += killed_here
        if not fault and contents(run) != whole:
            found = contents(run)
            fault = f"in the end others: {[name for name in {**whole, **found} if whole.get(name) != found.get(name)]}"
        if fault:
            return Verdict("lost", f"run {runs}, after {done} kills: {fault}", done)
    return Verdict("none lost", "", done)


def _one_run(folder: Path, run: Path, recipe: Path, random: Random, longest: float, most: int) -> tuple[str, int]:
    """What is wrong, and how often it was killed before it was done."""
    kills = 0
    while True:
        resumed = (run / "run.json").exists()
        given = f"train --resume {run}" if resumed else f"train {recipe} --out {run} --steps {STEPS}"
        child = begin(given, folder / "process")
        known = _wait(child, run, random.uniform(0, longest) if kills < most else None)
        ended = finished(child)
        if known is None or ended.status != -9:  # done before the kill came
            return ("" if ended.status == 0 else complaint(ended) or f"refused: {ended.error[-300:]}"), kills
        kills += 1
        if fault := _lost(run, known):
            return fault, kills


def _wait(child: Child, run: Path, seconds: float | None) -> int | None:
    """Kill it after so long; the newest checkpoint that was complete right before. None: it is not to be killed."""
    if seconds is None:
        return None
    time.sleep(seconds)
    known = newest_step(run)
    child.end()
    return known


def newest_step(run: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*")), default=0)


def _lost(run: Path, known: int) -> str:
    """What is wrong with a run after a kill."""
    from mlx_transformer.spec.checkpoint import open_checkpoint
    from mlx_transformer.spec.errors import UserError
    from mlx_transformer.training.run import Run

    complaints: list[str] = []
    looking = Run.__new__(Run)  # without its lock: to look at its checkpoints alone
    looking.folder, looking.warn = run, complaints.append
    newest = looking.newest()
    if complaints:
        return f"a checkpoint is half: {complaints}"
    if (newest[2]["step"] if newest else 0) < known:
        return f"checkpoint {known} was complete, and is lost"
    if (run / "model").exists():
        try:
            open_checkpoint(run / "model")
        except UserError as error:
            return f"the model is half: {error}"
    return ""
