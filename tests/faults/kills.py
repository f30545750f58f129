"""Training runs of every kind, `distil` among them, interrupted at random moments (KILL, TERM, INT) and resumed until
they are done: no checkpoint is lost, and in the end curve and weights are bit for bit those of a run that nobody
interrupted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from commands import Case, Verdict, begin, call, complaint, contents, finished
from copying_model import LINES, STUDENT, write_copying_model
from forks import Child
from tiny_run import write_recipe

KILLS = 200
IN_ONE = 10
"""Kills of one case: of one run after another, until there were so many."""
STEPS = 16
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
"""One of them is drawn. Where a run has no time to end by itself, most can go wrong."""
BY_SIGNAL = {-9, 128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}
BEFORE = "KeyboardInterrupt"
"""What the fork says that an INT met before the command began."""

TRAINING = {"checkpoint_seconds": 0, "valid_every": 7}
"""A checkpoint after each step, the last two kept, so that a process does hardly anything but save and prune."""
DISTILLED = STUDENT.replace("steps = 4", "steps = 6") + "checkpoint_seconds = 0\nlog_every = 1\n"
OTHERS = "[training]\ncheckpoint_seconds = 0\nlog_every = 1\nvalid_every = 7\n"


def recipes(base: Path, folder: Path) -> dict[str, Path]:
    """{kind of run: its recipe}"""
    text = f'[data]\ntext = "{base / "0.source"}"\nvocab_size = 260\nbatch_tokens = 128\nmax_length = 32\n'
    model = '[model]\npreset = "tiny"\ndecoder_layers = 1\nd_model = 16\nheads = 1\nd_ff = 32\n'
    pairs = f'[data]\nsource = "{base / "0.source"}"\ntarget = "{base / "0.target"}"\nbatch_tokens = 128\n'
    averaged = 'final = "average"\naverage = 2\ncheckpoint_steps = 3\n'
    others = {
        "decoder": f'{text}{model}{OTHERS}{averaged}objective = "language-model"\n',
        "adapter": f'{pairs}{OTHERS}start_from = "{base / "quantized"}"\nadapter = "lora"\n',
    }
    best = {"best": "loss", "patience": 100, "final": "moving-average", "moving_average": 0.9}
    found = {}
    for kind in ("train", "best", *others):
        (folder / kind).mkdir()
        if kind in others:
            found[kind] = folder / kind / "recipe.toml"
            found[kind].write_text(others[kind], encoding="utf-8")
        else:
            found[kind] = write_recipe(folder / kind, **TRAINING, **(best if kind == "best" else {}))
    return found


def cases(base: Path, folder: Path, count: int | None, seed: int) -> list[Case]:
    left, made = KILLS if count is None else count, recipes(base, folder)
    each = min(IN_ONE, -(-left // len(made)))
    sizes = [min(each, left - begun) for begun in range(0, left, each)]
    runs = {}
    for kind, recipe in list(made.items())[: len(sizes)]:
        whole = folder / kind / "whole"
        ended = call(f"train {recipe} --out {whole} --steps {STEPS}", folder / "process")
        if ended.status:
            raise SystemExit(f"{kind}: {ended.error}")
        given = partial(training, recipe=recipe)
        runs[kind] = partial(killed, given=given, whole=contents(whole), longest=ended.seconds)
    return _spread(runs, sizes, seed)


def write_teacher(folder: Path) -> tuple[Path, str]:
    """A teacher that copies, and the command, but for its OUT, by which a student learns from it."""
    teacher, source, recipe = write_copying_model(folder, onnx=False) / "model", folder / "source", folder / "student"
    source.write_text("".join(f"{line}\n" for line in LINES), "utf-8")
    recipe.with_suffix(".toml").write_text(DISTILLED, "utf-8")
    return teacher, f"distil {teacher} --source {source} --recipe {recipe}.toml --beam 1 --out "


def distilling(base: Path, folder: Path, count: int | None, seed: int) -> list[Case]:
    """A student, by the command that goes on when it is given again."""
    teacher, given = write_teacher(folder)
    read, whole = contents(teacher), folder / "whole"
    ended = call(given + str(whole), folder / "process")
    if ended.status:
        raise SystemExit(f"distil: {ended.error}")
    run = partial(killed, given=lambda out: f"{given}{out}", whole=contents(whole), longest=ended.seconds)

    def tried(place: Path, kills: int, seed: str) -> Verdict:
        verdict = run(place, kills=kills, seed=seed)
        return verdict if contents(teacher) == read else Verdict("lost", "the teacher has changed", kills)

    left = KILLS if count is None else count
    return _spread({"distil": tried}, [min(IN_ONE, left - begun) for begun in range(0, left, IN_ONE)], seed)


def _spread(runs: Mapping[str, Callable[..., Verdict]], sizes: list[int], seed: int) -> list[Case]:
    found = []
    for i, kills in enumerate(sizes):
        kind = list(runs)[i % len(runs)]
        found.append(Case(kind, f"{kills} kills, {seed}:{i}", partial(runs[kind], kills=kills, seed=f"{seed}:{i}")))
    return found


def training(run: Path, recipe: Path) -> str:
    return f"train --resume {run}" if (run / "run.json").exists() else f"train {recipe} --out {run} --steps {STEPS}"


def killed(
    folder: Path, given: Callable[[Path], str], whole: dict[str, str], longest: float, kills: int, seed: str
) -> Verdict:
    """given: the command that makes a run there, or goes on with it. longest: seconds that a whole run takes."""
    random, done, runs = Random(seed), 0, 0
    while done < kills:
        run = folder / f"run-{runs}"
        runs += 1
        fault, killed_here = _one_run(folder, run, given, random, longest, kills - done)
        done += killed_here
        if not fault and contents(run) != whole:
            found = contents(run)
            fault = f"in the end others: {[name for name in {**whole, **found} if whole.get(name) != found.get(name)]}"
        if fault:
            return Verdict("lost", f"run {runs}, after {done} kills: {fault}", done)
    return Verdict("none lost", "", done)


def _one_run(
    folder: Path, run: Path, given: Callable[[Path], str], random: Random, longest: float, most: int
) -> tuple[str, int]:
    """What is wrong, and how often it was killed before it was done."""
    kills = 0
    while True:
        child = begin(given(run), folder / "process")
        sent = random.choice(SIGNALS)
        known = _wait(child, run, random.uniform(0, longest) if kills < most else None, sent)
        ended = finished(child)
        if sent == signal.SIGINT and BEFORE in ended.error.splitlines()[-1:]:
            continue
        if known is None or ended.status not in BY_SIGNAL:  # done before the kill came
            return ("" if ended.status == 0 else complaint(ended) or f"refused: {ended.error[-300:]}"), kills
        kills += 1
        if fault := _lost(run, known):
            return fault, kills


def _wait(child: Child, run: Path, seconds: float | None, sent: int) -> int | None:
    """Interrupt it after so long; the newest checkpoint that was complete right before. None: it is to end itself."""
    if seconds is None:
        return None
    time.sleep(seconds)
    known = newest_step(run)
    with suppress(ProcessLookupError):
        os.kill(child.process, sent)
    return known


def newest_step(run: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*")), default=0)


def _lost(run: Path, known: int) -> str:
    """What is wrong with a run after a kill."""
    from mlx_transformer.core.checkpoint import open_checkpoint
    from mlx_transformer.system.errors import UserError
    from mlx_transformer.training.run_folder import Run

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
