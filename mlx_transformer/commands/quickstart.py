"""The whole path on the built-in corpus: text in, a trained Transformer, a proven ONNX model, text out."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from mlx_transformer.data.corpus import ParallelText
from mlx_transformer.generation.scoring import score
from mlx_transformer.system.durable import write_text
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import versions
from mlx_transformer.system.terminal import Console

RUN = "run.json clock.txt metrics.jsonl tensorboard tokenizer.json checkpoints model".split()
MADE = [*RUN, "onnx", "report", "data", "summary.json"]
PAGES = {
    "explain.html": "the model at work on one sentence, in both runtimes",
    "training.html": "how it was trained",
    "validate.html": "the proof that both runtimes compute the same",
}
"""Pages of OUT/report, and what they show."""
MARKER = ".quickstart"  # says that the folder is ours to clear


def run(out: Path, minutes: float, seed: int) -> int:
    """Build, train, score, export, validate, translate; returns the exit code (0: the two runtimes are equal).

    Writes OUT/model, OUT/onnx, OUT/report, with the pages PAGES in it, and OUT/summary.json. A finished quickstart in
    OUT is replaced.
    """
    from export import OnnxTransformer, export_onnx
    from export.explain.command import explain
    from export.validate import validate_command
    from mlx_transformer.device import set_tf32
    from mlx_transformer.report.runs import read_run
    from mlx_transformer.report.training_page import page
    from mlx_transformer.runtime.transformer import load
    from mlx_transformer.training.data import load_data
    from mlx_transformer.training.recipe import load_recipe
    from mlx_transformer.training.trainer import Trainer

    set_tf32(False)  # equality is judged in this process, so from its first product on
    _clear(out)
    seconds: dict[str, float] = {}
    begin = time.monotonic()
    recipe = load_recipe("quickstart", {"training": {"minutes": minutes, "seed": seed}})

    with _stage("corpus", seconds):
        data = load_data(recipe)
        assert data.held_out is not None
        parts = {"train": getattr(data.train, "text", None), "valid": data.valid, "held_out": data.held_out}
        for name, part in parts.items():
            assert isinstance(part, ParallelText)
            part.write(out / "data" / f"{name}.en", out / "data" / f"{name}.de")
        _say(f"{len(data.train):,} phrases to train on, {len(data.held_out):,} held out")
    with _stage("train", seconds):
        result = Trainer(recipe, out, data=data).run()
    if result.interrupted is not None:
        _say(f"saved; the model so far is {result.model}")
        return 128 + result.interrupted
    held_out = data.held_out
    with _stage("evaluate", seconds):
        model, _ = load(result.model)
        translations = model.translate(held_out.source)
        scores = score(translations, held_out.target)
        by_kind = _by_kind(held_out, translations)
        _say(f"held-out phrases: exact match {scores['exact_match']:.1f} %, BLEU {scores['bleu']:.1f}")
    with _stage("export", seconds):
        export_onnx(result.model, out / "onnx")
    report = out / "report"
    with _stage("validate", seconds):
        files = report / "validate.json", report / "validate.html"
        verdict = validate_command(result.model, out / "onnx", json=files[0], html=files[1], seed=seed)
    with _stage("translate", seconds):
        onnx_translations = OnnxTransformer(out / "onnx").translate(held_out.source)
        differ = sum(a != b for a, b in zip(translations, onnx_translations, strict=True))
    with _stage("explain", seconds):
        explain(result.model, [held_out.source[0]], out=report / "explain.html", beside=str(out / "onnx"))
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
        "steps": result.state.step,
        "target_tokens": result.state.target_tokens,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "seconds_total": round(time.monotonic() - begin, 1),
        "paths": {
            name: str(out / name) for name in ("model", "onnx", "report", "data", "metrics.jsonl", "summary.json")
        },
        "versions": versions(),
    }
    _write_json(out / "summary.json", summary)
    _print_summary(summary, held_out, translations, onnx_translations)
    return 0 if equal else 1


def _clear(out: Path) -> None:
    """Make `out`, or remove what an earlier quickstart left there; refuse a folder with anything else in it."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; --out needs a folder")
    marker = out / MARKER
    if out.exists() and any(out.iterdir()):
        names = {path.name for path in out.iterdir()} - {MARKER}
        foreign = sorted(names - set(MADE) if marker.exists() else names)
        if foreign:
            raise UserError(
                f"{out}: holds {foreign[0]!r}, which quickstart did not make; choose another folder with --out"
            )
    for path in (out / name for name in MADE):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    try:
        (out / "data").mkdir(parents=True)
        (out / "report").mkdir()
        marker.touch()
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error


@contextmanager
def _stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    _say(f"[{name}]")
    begin = time.monotonic()
    yield
    seconds[name] = time.monotonic() - begin


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _by_kind(text: ParallelText, translations: list[str]) -> dict[str, float]:
    """Exact match in percent for each kind of phrase."""
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
        console.width = 120  # a log has no width of its own
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
    size = (
        f"{summary['parameters']:,} parameters, {summary['steps']:,} steps, {summary['target_tokens']:,} target tokens"
    )
    times = ", ".join(f"{name} {value:.0f}" for name, value in summary["seconds"].items())
    table = Table(title="Summary", title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False)
    for _ in range(2):
        table.add_column(overflow="fold")  # paths are copied from it
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
    """Commands to go on with, as a shell reads them. paths: where the report and the exported model are."""
    program = "open" if sys.platform == "darwin" else "xdg-open"
    for page, shows in PAGES.items():
        file = f"{paths['report']}/{page}"
        yield f"{shlex.join([program, file])}  # {shows}"
    yield f"{shlex.join([_as_called(), 'translate', paths['onnx'], 'May 3, 2024'])}  # a phrase of your own"


def _as_called() -> str:
    """This program as the user has typed it, or make for him: by a path from here, or by its name."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "mlx-transformer" and not called.is_absolute() else "mlx-transformer"
