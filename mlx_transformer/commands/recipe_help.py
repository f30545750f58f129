"""The text that `train --help-recipe` prints: every key of a recipe, read from the classes that check recipes."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from mlx_transformer.core.heads import Head
from mlx_transformer.core.presets import PRESETS
from mlx_transformer.system.fields import field_docs, field_types

HEAD = """\
# Every key of a recipe and its default; one without is unset. Take the # away from those you change:
#   mlx-transformer train --help-recipe > my.toml
#   mlx-transformer train my.toml --out FOLDER       flags win over the file
# Each is an option of train too, but for tables: --beta1 0.95 for beta1, --no-gated for gated = false.
"""
CORPORA = "[[data.corpora]]"
COLUMN, WIDTH = 32, 118
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def recipe_help() -> str:
    """Return a TOML file with every key in a comment."""
    from mlx_transformer.training import options

    sized = PRESETS[options.ModelOptions.preset]
    tables: dict[str, list[str]] = {table: [] for table in options.TABLES}
    for table, name, of in options.recipe_keys():
        default = {"norm_placement": options.NORM_PLACEMENT, **dict.fromkeys(sized)}.get(name, getattr(of, name))
        tables[table] += _lines(of, name, default, " Unset: the preset's." if name in sized else "")
    corpora = [line for f in fields(options.CorpusOptions) for line in _lines(options.CorpusOptions, f.name, f.default)]
    parts = {
        "[data]": tables["data"],
        f"# {CORPORA:{COLUMN - 3}} # Several corpora: such a table for each of them.": corpora,
        "[model]": tables["model"],
        "[training]": tables["training"],
    }
    return HEAD + "".join("\n".join(["", head, *lines, ""]) for head, lines in parts.items())


def _lines(of: type, name: str, default: Any, more: str = "") -> Iterator[str]:
    """Describe a key of a table, from the field of a dataclass; nothing for one that is a table of its own."""
    kind = field_types(of).get(name)
    if kind is not None:
        type_name = ", ".join(kind.choices) if kind.type is str and kind.choices else TYPES[kind.type]
    elif isinstance(default, Mapping):
        type_name, default = "table", dict(default)
    elif isinstance(default, Head):
        type_name, default = "table", default.to_dict()
    elif name == "layer_pattern":
        type_name, default = "list of tables", list(default)
    else:
        return
    key = f"# {name} =" + ("" if default is None else " " + json.dumps(default))
    missing = " " * (len(key) - COLUMN + 1)  # of the first line's room, beside a long key
    meaning = f"{field_docs(of).get(name, '')}{more} ({type_name})"
    text = textwrap.wrap(meaning, WIDTH - COLUMN - 2, initial_indent=missing)
    for left, right in itertools.zip_longest([key], text, fillvalue=""):
        yield f"{left:{COLUMN - 1}} # {right.lstrip()}"
