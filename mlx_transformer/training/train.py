"""Training from Python: a recipe and changes of it, by the keys' names."""

from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path
from typing import Any

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

from .group import joined
from .options import DataOptions, TrainingOptions
from .recipe import load_recipe
from .trainer import Result, Trainer


def train(
    recipe: str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str],
    resume: bool = False,
    force: bool = False,
    **keys: Any,
) -> Result:
    """Train a model, write it into the run's folder `out`, and return the result, whose `model` is the checkpoint.

    recipe: a TOML file, or the name of a built-in recipe; None: the defaults, or with `resume` the run's own. keys: of
    any table of a recipe, such as source="train.en", preset="tiny", steps=500 (`mlx_transformer/recipes/README.md` has
    all). force: replace a run that `out` holds. `UserError` for what can't be trained; an interrupted run says so in
    the result, and `resume` goes on with it.
    """
    tables: dict[str, dict[str, Any]] = {"data": {}, "model": {}, "training": {}}
    for key, value in keys.items():
        tables[_table_of(key)][key] = os.fspath(value) if isinstance(value, os.PathLike) else value
    out = Path(out)
    chosen = load_recipe(None if recipe is None else os.fspath(recipe), tables, run=out if resume else None)
    return Trainer(chosen, out, resume, force=force, group=joined()).run()


def _table_of(key: str) -> str:
    """Return the table of a recipe that a key stands in; vocab_size, which is in two, is that of the text."""
    kinds = {"data": DataOptions, "training": TrainingOptions, "model": TransformerConfig}
    names = {table: [field.name for field in dataclasses.fields(kind)] for table, kind in kinds.items()}
    names["model"].append("preset")
    for table, known in names.items():
        if key in known:
            return table
    close = difflib.get_close_matches(key, [name for known in names.values() for name in known], 1)
    raise UserError(f"train: unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
