"""Which files of a folder are a Marian model's: its weights, vocabularies, shortlist and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_transformer.core.folders import Place
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.files import read_text

from .options import parse_options

PAIRS = (("srcvocab*.spm", "trgvocab*.spm"), ("source.spm", "target.spm"))
GENERATION = ("beam-size", "normalize", "word-penalty", "max-length-factor", "allow-unk", "skip-cost")
"""Keys of the settings that say how the model is meant to be searched."""


@dataclass(frozen=True)
class MarianFiles:
    """The files of one model."""

    model: Path
    vocabularies: tuple[Path, ...] = ()
    """One for both languages, or source and target; none: the model takes ids."""
    shortlist: Path | None = None
    uses_shortlist: bool = False
    """The settings name it, so that the maker's engine searches with it."""
    settings: Path | None = None
    generation: dict[str, Any] | None = None
    """The settings of the search."""
    unread: tuple[Path, ...] = ()
    """Files that might be settings, but name no model."""

    @property
    def others(self) -> list[Path]:
        """All but the model."""
        return [*dict.fromkeys(self.vocabularies), *filter(None, (self.shortlist, self.settings))]


def holds_marian(folder: Path) -> bool:
    """Return whether a folder is a Marian model with settings that name it, such as `to_marian` writes."""
    try:
        return folder.is_dir() and Place.of(folder).what == "a Marian model" and _settings(folder)[0] is not None
    except UserError:
        return False


def find_files(path: Path) -> MarianFiles:
    """Return the files of the model at a path, or in a folder. `UserError` if there is none, or several."""
    folder = path if path.is_dir() else path.parent
    settings, values, unread = _settings(folder)
    named = [folder / Path(name).name for name in _texts(values.get("models"))]
    models = [path] if path != folder else [model for model in named if model.is_file()] or Place(folder).marian_models
    if not models:
        raise UserError(f"{path}: holds no Marian model (model*.npz, model*.bin)")
    if len(models) > 1:
        raise UserError(f"{path}: holds several models: {_names(models)}; give one of them")
    listed = _texts(values.get("shortlist"))[:1]
    shortlists = [folder / Path(name).name for name in listed] or sorted(folder.glob("lex*.bin"))
    if missing := [file.name for file in shortlists if not file.is_file()]:
        raise UserError(f"{settings}: names the shortlist {missing[0]}, which isn't there; restore it, or take it out")
    if len(shortlists) > 1:
        raise UserError(f"{folder}: holds several shortlists: {_names(shortlists)}; leave one")
    generation = {key: values[key] for key in GENERATION if isinstance(values.get(key), int | float)}
    shortlist = shortlists[0] if shortlists else None
    vocabularies = _vocabularies(folder, values)
    return MarianFiles(models[0], vocabularies, shortlist, bool(listed), settings, generation, unread)


def _settings(folder: Path) -> tuple[Path | None, dict[str, Any], tuple[Path, ...]]:
    """Return the file that names the others, and what it says; where none does, those that might: one of a training
    says what its validation was searched with."""
    files = sorted([*folder.glob("*decoder*.yml"), *folder.glob("config*.yml")])
    for file in files:
        values = parse_options(read_text(file), str(file))
        if "models" in values:
            return file, values, ()
    return None, {}, tuple(files)


def _vocabularies(folder: Path, values: dict[str, Any]) -> tuple[Path, ...]:
    named = [folder / Path(name).name for name in _texts(values.get("vocabs"))]
    if len(named) == 2 and all(file.is_file() and file.suffix == ".spm" for file in named):
        return tuple(dict.fromkeys(named))
    if any(file.suffix != ".spm" for file in named) or any(folder.glob("*vocab*.yml")):
        return ()  # Opus-MT's: a list of pieces gives their ids, and two SentencePiece models cut text
    for patterns in PAIRS:
        pair = [sorted(folder.glob(pattern)) for pattern in patterns]
        if all(len(files) == 1 for files in pair):
            return pair[0][0], pair[1][0]
    joint = sorted(folder.glob("vocab*.spm"))
    if len(joint) > 1:
        raise UserError(f"{folder}: holds several vocabularies: {_names(joint)}; leave one")
    return tuple(joint)


def _names(files: Sequence[Path]) -> str:
    return first_of([file.name for file in files], ", ")


def _texts(value: Any) -> Sequence[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []
