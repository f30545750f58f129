"""A training run of seconds: a text of copied digits, a model of a few thousand parameters, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from forked import Forked, Process

from mlx_transformer.text.tokenizer import Tokenizer
from mlx_transformer.training.objectives import Reading
from mlx_transformer.training.recipe import Recipe

MODEL = {"preset": "tiny", "d_model": 16, "heads": 1, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1}
COMMAND = [sys.executable, "-c", "from mlx_transformer.cli import main; main()"]


def write_pairs(folder: Path, count: int = 120, seed: int = 0) -> tuple[Path, Path]:
    """Lines of 2 to 6 digits, the target a copy of the source."""
    rng = np.random.default_rng(seed)
    lines = ["".join(str(d) for d in rng.integers(0, 10, rng.integers(2, 7))) for _ in range(count)]
    paths = folder / f"{seed}.source", folder / f"{seed}.target"
    for path in paths:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return paths


def recipe(folder: Path, model: dict | None = None, **training) -> Recipe:
    """Dropout is on; five steps an epoch. No line is translated: these models say nothing, and at great length."""
    source, target = folder / "0.source", folder / "0.target"
    if not source.exists():
        write_pairs(folder)
    data = {"source": str(source), "target": str(target), "vocab_size": 260, "batch_tokens": 128}
    training = {"warmup_steps": 10, "cooldown": 0, "valid_every": 1000, **training}
    training = {"steps": 4, "log_every": 1, "valid_sentences": 0, **training}
    return Recipe.from_dict({"data": data, "model": {**MODEL, **(model or {})}, "training": training})


def reading(tokenizer: Tokenizer, chosen: Recipe) -> Reading:
    """How the text of a recipe becomes ids."""
    return Reading(tokenizer, chosen.data, chosen.config(tokenizer.vocab_size))


def write_recipe(folder: Path, **training) -> Path:
    """The same as a TOML file."""
    values = recipe(folder, **training).to_dict()
    tables = {"data": values["data"], "model": {"preset": values["preset"], **values["model"]}}
    tables["training"] = values["training"]
    path = folder / "recipe.toml"
    rows = []
    for table, entries in tables.items():
        rows.append(f"[{table}]")
        rows += [f"{key} = {json.dumps(value)}" for key, value in entries.items() if value is not None]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def start(*arguments: object, command: Sequence[str] = COMMAND, kind: type[Process] = Forked, **options) -> Process:
    """The command line in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
    return kind([*command, *map(str, arguments)], encoding="utf-8", **pipes)


def metrics(run: Path, kind: str) -> list[dict]:
    """Of the lines that are whole: one is half there while it is written, or for good where its writer was killed."""
    path = run / "metrics.jsonl"
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [entry for entry in map(json.loads, whole) if entry["kind"] == kind]
