"""The command `quickstart`: train on the built-in corpus, score, export, prove, translate."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from mlx_transformer.core.outputs import check_outside
from mlx_transformer.data.corpus import ParallelText
from mlx_transformer.generation.evaluate import score
from mlx_transformer.system.durable import Output, clear_leftovers, open_locked, write_text
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import versions
from mlx_transformer.system.progress import Console, duration

RUN = "run.json clock.txt metrics.jsonl tensorboard tokenizer.json checkpoints model".split()
SUMMARY = "summary.json"  # written last: a quickstart without it was interrupted
AFTER = ["onnx", "report", "data", SUMMARY]
MADE = [*RUN, *AFTER]
PAGES = {
    "explain.html": "the model at work on one sentence, in both runtimes",
    "training.html": "how it was trained",
    "validate.html": "the proof that both runtimes compute the same",
}
"""Pages of OUT/report, and what each shows."""
MARKER = ".quickstart"  # marks the folder as ours, so it may be cleared
ENOUGH = 80.0  # % exact match; the whole recipe reached 87 to 90 with three seeds


def run(out: Path, minutes: float | None, seed: int) -> int:
    """Train, score, export, validate and translate; return the exit status (0: it learned, and both runtimes are
    equal).

    Writes OUT/model, OUT/onnx, OUT/report with the pages in PAGES, and OUT/summary.json. A finished quickstart in OUT
    is replaced; an interrupted one continues.
    minutes: limit on training; None: all steps of the recipe.
    Raises `UserError` at the end if fewer than ENOUGH % of the held-out phrases are right.
    """
    with _held(out):
        try:
            return _run(out, minutes, seed)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command goes on from there") from None


def _run(out: Path, minutes: float | None, seed: int) -> int:
    from export import OnnxTransformer, export_onnx
    from export.explain.command import explain
    from export.validate import validate_command
    from mlx_transformer.device import set_tf32
    from mlx_transformer.report.training_page import page, read_run
    from mlx_transformer.runtime.transformer import load
    from mlx_transformer.training.data import load_data
    from mlx_transformer.training.recipe import load_recipe
    from mlx_transformer.training.trainer import Trainer

    set_tf32(False)  # before the first matrix product: `validate` runs in this process
    recipe = load_recipe("quickstart", {"training": {"minutes": minutes, "seed": seed}})
    resume = _clear(out, seed)
    seconds: dict[str, float] = {}
    begin = time.monotonic()

    with _stage("corpus", seconds):
        data = load_data(recipe)
        assert data.held_out is not None
        parts = {"train": getattr(data.train, "text", None), "valid": data.valid, "held_out": data.held_out}
        for name, part in parts.items():
            assert isinstance(part, ParallelText)
            files = [Output.any(out / "data" / f"{name}.{code}", "text") for code in ("en", "de")]
            part.write(files[0], files[1])
        _say(f"{len(data.train):,} phrases to train on, {len(data.held_out):,} held out")
    with _stage("train", seconds):
        trainer = Trainer(recipe, out, resume, data=data)
        earlier = trainer.state.seconds  # of training before an interruption
        result = trainer.run()
    state, steps = result.state, recipe.training.steps or 0
    if result.interrupted is not None:
        _say(f"saved at step {state.step:,} of {steps:,}; the same command goes on from there")
        return 128 + result.interrupted
    seconds["train"] += earlier
    held_out = data.held_out
    with _stage("evaluate", seconds):
        model, _ = load(result.model)
        translations = model.translate(held_out.source)
        scores = score(translations, held_out.target)
        by_kind = _by_kind(held_out, translations)
        _say(f"held-out phrases: exact match {scores['exact_match']:.1f} %, BLEU {scores['bleu']:.1f}")
    with _stage("export", seconds):
        export_onnx(result.model, Output.any(out / "onnx", "ONNX folder"))
    report = out / "report"
    with _stage("validate", seconds):
        files = Output.any(report / "validate.json", "report"), Output.any(report / "validate.html", "page")
        verdict = validate_command(result.model, out / "onnx", json=files[0], html=files[1], seed=seed)
    with _stage("translate", seconds):
        onnx_translations = OnnxTransformer(out / "onnx").translate(held_out.source)
        differ = sum(a != b for a, b in zip(translations, onnx_translations, strict=True))
    with _stage("explain", seconds):
        shown = Output.any(report / "explain.html", "page")
        explain(result.model, [held_out.source[0]], out=shown, beside=str(out / "onnx"))
        write_text(report / "training.html", page([read_run(out)]))
    _write_json(report / "evaluation.json", {**scores, "exact_match_by_kind": by_kind})
    _write_translations(report / "translations.tsv", held_out, translations, onnx_translations)

    equal = verdict == 0 and differ == 0
    summary: dict[str, Any] = {
        "exact_match": scores["exact_match"],
        "bleu": scores["bleu"],
        "chrf": scores["chrf"],
        "scores": scores,
        "exact_match_by_kind": by_kind,
        "validate": {0: "equal", 1: "mismatch"}.get(verdict, "not completed"),
        "translations_compared": len(translations),
        "translations_that_differ": differ,
        "parameters": result.parameters,
        "steps": state.step,
        "steps_planned": steps,
        "target_tokens": state.target_tokens,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "seconds_total": round(time.monotonic() - begin + earlier, 1),
        "paths": {
            name: str(out / name) for name in ("model", "onnx", "report", "data", "metrics.jsonl", "summary.json")
        },
        "versions": versions(),
    }
    _write_json(out / SUMMARY, summary)
    _print_summary(summary, held_out, translations, onnx_translations)
    sys.stdout.flush()  # so that the reason for a failure is the last line
    if not equal:
        _say(f"the two runtimes differ: see {report / 'validate.html'} and {report / 'translations.tsv'}")
        return 1
    if scores["exact_match"] < ENOUGH:
        reason = (
            f"only {scores['exact_match']:.1f} % of the held-out phrases are right, at least {ENOUGH:.0f} % should be"
        )
        if state.step < steps:
            reason += f": --minutes {minutes:g} ended training after {state.step:,} of {steps:,} steps; leave it out"
            if state.step:
                needed = duration(state.seconds / state.step * steps)
                reason += f" (all steps take about {needed} at this speed)"
        else:
            reason += f", though all {steps:,} steps are done; take another --seed than {seed}"
        raise UserError(reason)
    return 0


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Make `out` if necessary, and keep other quickstarts out of it; refuse a folder with other files.

    If nothing is written, the folder is left as it was.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; --out needs a folder")
    check_outside(out)
    if not (out / MARKER).exists():
        _check_ours(out, ())
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = open_locked(out / MARKER)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error
    if handle is None:
        raise UserError(f"{out}: another quickstart is at work there; wait for it, or choose another folder with --out")
    try:
        clear_leftovers(out, "*")
        _check_ours(out, (MARKER, *MADE))
        yield
    finally:
        with suppress(OSError):  # Windows can't remove an open file
            if [path.name for path in out.iterdir()] == [MARKER]:
                (out / MARKER).unlink()
                if is_new:
                    out.rmdir()
        os.close(handle)


def _check_ours(out: Path, ours: Iterable[str]) -> None:
    names = {path.name for path in out.iterdir()} if out.exists() else set[str]()
    if foreign := sorted(names.difference(ours)):
        raise UserError(f"{out}: holds {foreign[0]!r}, which quickstart did not make; choose another folder with --out")


def _clear(out: Path, seed: int) -> bool:
    """Make room in `out`; return whether to continue an interrupted quickstart. A finished one is removed."""
    from mlx_transformer.training.recipe import load_recipe

    resume = (out / "run.json").exists() and not (out / SUMMARY).exists()
    if resume:
        before = load_recipe(None, {}, run=out).training.seed
        if before != seed:
            raise UserError(
                f"{out}: holds an interrupted quickstart of --seed {before}; go on with that, choose another --out, "
                "or remove the folder"
            )
        _say(f"{out}: going on with the quickstart that was interrupted there")
    elif (out / SUMMARY).exists():
        _say(f"{out}: replacing the quickstart that was finished there")
    for path in (out / name for name in (AFTER if resume else MADE)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    try:
        (out / "data").mkdir()
        (out / "report").mkdir()
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error
    return resume


@contextmanager
def _stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    _say(f"[{name}]")
    begin = time.monotonic()
    yield
    seconds[name] = time.monotonic() - begin


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _by_kind(text: ParallelText, translations: list[str]) -> dict[str, float]:
    """Return exact match in percent for each kind of phrase."""
    hits: dict[str, list[bool]] = {}
    for kind, translation, reference in zip(text.kinds or [], translations, text.target, strict=True):
        hits.setdefault(kind, []).append(translation == reference)
    return {kind: round(100 * sum(values) / len(values), 1) for kind, values in hits.items()}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def _write_translations(path: Path, text: ParallelText, mlx: list[str], onnx: list[str]) -> None:
    rows = ["kind\tsource\treference\tmlx\tonnx runtime"]
    rows += ["\t".join(row) for row in zip(text.kinds or [], text.source, text.target, mlx, onnx, strict=True)]
    write_text(path, "\n".join(rows) + "\n")


def _print_summary(summary: dict[str, Any], text: ParallelText, mlx: list[str], onnx: list[str]) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a log file has no width
    phrases = Table(title="One held-out phrase of each kind", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("kind", "right", "source", "MLX", "ONNX Runtime", "reference"):
        phrases.add_column(column, overflow="fold", justify="right" if column == "right" else "left")
    printed: set[str] = set()
    for kind, *row in zip(text.kinds or [], text.source, mlx, onnx, text.target, strict=True):
        if kind not in printed:
            printed.add(kind)
            source, first, second, reference = row
            right = f"{summary['exact_match_by_kind'][kind]:.0f} %"
            same = "same" if second == first else second, "same" if reference == first else reference
            phrases.add_row(kind, right, source, first, *same)
    console.print(phrases)
    lines = summary["translations_compared"]
    differ = summary["translations_that_differ"]
    steps, planned = summary["steps"], summary["steps_planned"]
    done = f"{steps:,} steps" if steps == planned else f"{steps:,} of {planned:,} steps"
    size = f"{summary['parameters']:,} parameters, {done}, {summary['target_tokens']:,} target tokens"
    times = ", ".join(f"{name} {value:.0f}" for name, value in summary["seconds"].items())
    table = Table(title="Summary", title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False)
    for _ in range(2):
        table.add_column(overflow="fold")  # fold, don't cut: people copy paths from here
    table.add_row("exact match", f"{summary['exact_match']:.1f} % of {lines} held-out phrases of ten kinds")
    table.add_row("BLEU, chrF", f"{summary['bleu']:.1f}, {summary['chrf']:.1f}")
    table.add_row("validate", summary["validate"])
    table.add_row("both runtimes", f"{lines} identical translations" if differ == 0 else f"{differ} of {lines} differ")
    table.add_row("training", size)
    table.add_row("seconds", f"{summary['seconds_total']:.0f}: {times}")
    for name, path in summary["paths"].items():
        table.add_row(name, path)
    console.print(table)
    for line in what_next(summary["paths"]):
        console.print(line, soft_wrap=True)


def what_next(paths: Mapping[str, str]) -> Iterator[str]:
    """Yield commands to try next, as a shell reads them. paths: the report and the exported model."""
    program = "open" if sys.platform == "darwin" else "xdg-open"
    for page, shows in PAGES.items():
        file = f"{paths['report']}/{page}"
        yield f"{shlex.join([program, file])}  # {shows}"
    yield f"{shlex.join([_as_called(), 'translate', paths['onnx'], 'May 3, 2024'])}  # a phrase of your own"


def _as_called() -> str:
    """Return this program's name as it was typed, with its path if that is relative."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "mlx-transformer" and not called.is_absolute() else "mlx-transformer"
