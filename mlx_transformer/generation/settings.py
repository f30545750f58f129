"""How a model generates unless told otherwise: generation.json in its folder, fields of `Options` by name.

What a caller gives wins, field by field. A model trained here has no such file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import unknown_keys
from mlx_transformer.system.files import read_json

from .options import Options, check_options

SETTINGS = "generation.json"

Settings = dict[str, Any]


def checked_settings(values: Any, config: TransformerConfig, where: str) -> Settings:
    """The settings, with ids as tuples; `UserError` that begins with `where` for what no search of the model takes."""
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(values).__name__}")
    if problems := unknown_keys(values, Options):
        raise UserError(f"{where}: {'; '.join(problems)}")
    try:
        options = Options(**values)
        check_options(options, config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return {name: getattr(options, name) for name in values}


def read_settings(folder: Path, config: TransformerConfig) -> Settings:
    """Those of a model's folder, {} where it has none; `UserError` for a damaged file. A model of fewer positions, in a
    graph of fixed shape, has shorter outputs."""
    path = folder / SETTINGS
    return within(checked_settings(read_json(path), config, str(path)), config) if path.exists() else {}


def within(settings: Settings, config: TransformerConfig) -> Settings:
    """The settings, with no limit above what the model has positions for."""
    most = settings.get("max_new_tokens")
    return settings if most is None else {**settings, "max_new_tokens": min(most, config.max_positions)}


def settings_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """{name: contents} of the file, {} of no settings."""
    return {SETTINGS: json.dumps(settings, indent=2) + "\n"} if settings else {}


def resolved(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a search takes: the model's settings, and what was given in their place.

    Who asks for several outputs, or for sampling, is not refused for a beam that he did not ask for: the model's own
    gives way. So does its least length to a shorter limit.
    """
    merged = {**settings, **given}
    names = {field.name for field in dataclasses.fields(Options)}
    known = {name: value for name, value in merged.items() if name in names}
    if known.get("sample") is True and "beam" not in given:
        merged.pop("beam", None)
    limit, least = known.get("max_new_tokens"), known.get("min_new_tokens", 0)
    if limit is not None and isinstance(limit, int) and isinstance(least, int) and least > limit:
        name = "min_new_tokens" if "max_new_tokens" in given else "max_new_tokens"
        if name not in given:
            merged.pop(name, None)
    return merged
