"""run.json: what a run was asked for and what it ran on, and whether it may go on from there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_json

RECORD = "run.json"
MODEL = "model"  # in the record: what the trained model was made of
# What may differ between a run and its continuation: how long it goes on, what is reported, where the files are (their
# digests may not differ): nothing that is computed.
MAY_CHANGE = {
    f"recipe.training.{name}"
    for name in (
        "epochs steps minutes log_every keep checkpoint_seconds checkpoint_steps valid_every valid_sentences "
        "patience final average"
    ).split()
} | {
    f"recipe.data.{name}"
    for name in (
        "source target pairs valid_source valid_target valid_pairs text valid_text cache "
        "corpora.source corpora.target corpora.pairs"
    ).split()
}
NUMBER = re.compile(r"(?<=\.corpora)\.\d+")
# Differences that only change the last bits of what is computed: said, not refused.
ENVIRONMENT = {"blas", "versions.mlx"}


def check_same(folder: Path, record: dict[str, Any], defaults: Mapping[str, Any], warn: Callable[[str], None]) -> Any:
    """The record of the run so far, if `record` continues it."""
    before = read_json(folder / RECORD)
    if isinstance(before, dict):
        before.pop(MODEL, None)
    old, new = {**_flat(dict(defaults)), **_flat(before)}, _flat(record)
    _check_device(folder, old, new)
    # The recipe first: the rest mostly follows from it.
    names = sorted(old.keys() | new.keys(), key=lambda name: (not name.startswith("recipe."), name))
    changes = {
        name: f"{name} was {_short(old.get(name))}, now {_short(new.get(name))}"
        for name in names
        if old.get(name) != new.get(name)
    }
    for name in ENVIRONMENT & changes.keys():
        warn(f"{changes[name]}: the run goes on, not bit by bit as it would have")
    refused = [
        text
        for name, text in changes.items()
        if NUMBER.sub("", name) not in MAY_CHANGE | ENVIRONMENT and not name.startswith("versions.")
    ]
    if refused:
        more = f"; and {len(refused) - 8} more" if len(refused) > 8 else ""
        differences = "; ".join(refused[:8]) + more
        raise UserError(
            f"{folder}: cannot resume with another recipe: {differences} (--resume alone takes the run's own)"
        )
    return before


def _check_device(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Another kind of device has other batches, so that a run would go on with text it has seen or never sees."""
    was, now = old.get("device"), new.get("device")
    if was == "Device(cpu, 0)":  # earlier versions' word for it
        was = old["device"] = "cpu"
    if was != now:
        where = "with MLX_TRANSFORMER_DEVICE=cpu" if was == "cpu" else f"on a machine with {was}"
        raise UserError(
            f"{folder}: cannot resume on {now} what was trained on {was}: batches are cut otherwise there; "
            f"continue it {where}, or start a new run with another --out"
        )


def as_json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:12]}..."


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, list | tuple) and all(isinstance(inner, dict) for inner in value):  # tables of one name
        value = {str(i): inner for i, inner in enumerate(value)}
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{name}.{key}".lstrip(".")).items()}
    return {name: value}
