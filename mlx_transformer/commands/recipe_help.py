"""What `train --help-recipe` prints: every key of a recipe, read from the classes that check recipes."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mlx_transformer.core.config import PRESETS, TransformerConfig
from mlx_transformer.system.fields import kinds_of, meanings_of

HEAD = """\
# Every key of a recipe and its default; one without is unset. Take the # away from those you change:
#   mlx-transformer train --help-recipe > my.toml
#   mlx-transformer train my.toml --out FOLDER       flags win over the file
# Each is an option of train too, but for tables: --beta1 0.95 for beta1, --no-gated for gated = false.
"""
CORPORA = "[[data.corpora]]"
COLUMN, WIDTH = 32, 118
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


@dataclass(frozen=True)
class Key:
    name: str
    default: Any
    """The default; None where the key is unset."""
    type_name: str
    meaning: str

    def lines(self) -> Iterator[str]:
        default = "" if self.default is None else " " + json.dumps(self.default)
        key = f"# {self.name} ={default}"
        missing = " " * (len(key) - COLUMN + 1)  # of the first line's room, beside a long key
        text = textwrap.wrap(f"{self.meaning} ({self.type_name})", WIDTH - COLUMN - 2, initial_indent=missing)
        for left, right in itertools.zip_longest([key], text, fillvalue=""):
            yield f"{left:{COLUMN - 1}} # {right.lstrip()}"


def recipe_help() -> str:
    """Return a TOML file with every key in a comment."""
    from mlx_transformer.training import options

    # Training takes one architecture.
    model = [key for key in _keys(TransformerConfig) if key.name not in (*options.FROM_TOKENIZER, "architecture")]
    sized = PRESETS[options.ModelOptions.preset]
    model = [
        replace(key, default=None, meaning=f"{key.meaning} Unset: the preset's.") if key.name in sized else key
        for key in model
    ]
    model = [replace(key, default=options.NORM_PLACEMENT) if key.name == "norm_placement" else key for key in model]
    tables = {
        "[data]": _keys(options.DataOptions),
        f"# {CORPORA:{COLUMN - 3}} # Several corpora: such a table for each of them.": _keys(options.CorpusOptions),
        "[model]": [*_keys(options.ModelOptions), *model],
        "[training]": _keys(options.TrainingOptions),
    }
    return HEAD + "".join(
        "\n".join(["", table, *(line for key in keys for line in key.lines()), ""]) for table, keys in tables.items()
    )


def _keys(of: type) -> list[Key]:
    """List the keys of a table, from the fields of a dataclass."""
    meanings = meanings_of(of)
    type_names = {
        name: ", ".join(kind.choices) if kind.type is str and kind.choices else TYPES[kind.type]
        for name, kind in kinds_of(of).items()
    }
    tables = {f.name: dict(f.default) for f in fields(of) if isinstance(f.default, Mapping)}
    type_names |= dict.fromkeys(tables, "table")
    return [
        Key(f.name, tables.get(f.name, f.default), type_names[f.name], meanings.get(f.name, ""))
        for f in fields(of)
        if f.name in type_names
    ]
