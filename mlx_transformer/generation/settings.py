"""How a model generates unless told otherwise: generation.json in its folder, fields of `Options` by name.

The caller's settings win, field by field. A model trained here has no such file. One of several languages has their
tokens there too, {code: id} as `languages`: the target's is the first of every output, the source's of every source.
Where `target_language_in_source`, as in SMaLL-100, the target's is the first of every source, and nothing is forced.
Where `source_language_last`, as in mBART, the source's stands behind the end of every source; where
`target_language_starts`, as there too, the decoder begins with the target's, in place of the start token.
`shortlist` is the name of a file beside it, which names the candidates of each sentence.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError, shortened
from mlx_transformer.system.fields import unknown_keys
from mlx_transformer.system.files import read_json
from mlx_transformer.system.manifest import CARD

from .options import Options, check_options

SETTINGS = "generation.json"
LANGUAGES, SHORTLIST, TASK_PREFIX = "languages", "shortlist", "task_prefix"
TARGET_IN_SOURCE, SOURCE_LAST = "target_language_in_source", "source_language_last"
TARGET_STARTS = "target_language_starts"
PLACES = (TARGET_IN_SOURCE, SOURCE_LAST, TARGET_STARTS)
"""Where a model reads languages, if it isn't before its source and its output."""
BESIDE = (LANGUAGES, *PLACES, SHORTLIST, TASK_PREFIX)
"""The keys of the file beside fields of `Options`."""
NO_SHORTLIST = "none"
"""In place of a file's name: no candidates, all tokens."""
SOURCE_LANGUAGE, TARGET_LANGUAGE = "source_language", "target_language"

FIELDS = frozenset(field.name for field in dataclasses.fields(Options))

Settings = dict[str, Any]


def checked_settings(values: Any, config: TransformerConfig, where: str) -> Settings:
    """Return the settings, with ids as tuples; `UserError` that begins with `where` for what no search of the model
    takes."""
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(values).__name__}")
    languages = values.get(LANGUAGES, {})
    written = {name: value for name, value in values.items() if name not in BESIDE}
    if problems := unknown_keys(written, Options):
        raise UserError(f"{where}: {'; '.join(problems)}")
    for name in PLACES:
        if not isinstance(values.get(name, False), bool):
            raise UserError(f"{where}: {name} is neither true nor false")
    known = range(min(config.vocab_size, config.source_vocab_size))
    if not isinstance(languages, dict) or not all(type(id) is int and id in known for id in languages.values()):
        raise UserError(f"{where}: {LANGUAGES} are not {{code: id}} within the vocabulary of {len(known)}")
    if not isinstance(values.get(TASK_PREFIX, ""), str):
        raise UserError(f"{where}: {TASK_PREFIX} is no text")
    file = values.get(SHORTLIST)
    if file is not None and (not isinstance(file, str) or Path(file).name != file):
        raise UserError(f"{where}: {SHORTLIST} {file!r:.60} is no name of a file beside it")
    try:
        options = Options(**written)
        check_options(options, config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    extra = {name: values[name] for name in BESIDE if values.get(name)}
    return {name: getattr(options, name) for name in written} | extra


def read_settings(folder: Path, config: TransformerConfig) -> Settings:
    """Return those of a model's folder, {} where it has none; `UserError` for a damaged file."""
    path = folder / SETTINGS
    return within(checked_settings(read_json(path), config, str(path)), config) if path.exists() else {}


def within(settings: Settings, config: TransformerConfig) -> Settings:
    """Return the settings, with no limit above what the model has positions for."""
    most = settings.get("max_new_tokens")
    return settings if most is None else {**settings, "max_new_tokens": min(most, config.max_positions)}


def settings_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: contents} of the file, {} of no settings."""
    return {SETTINGS: json.dumps(settings, indent=2) + "\n"} if settings else {}


def named_files(settings: Mapping[str, Any], folder: Path | None) -> dict[str, Path]:
    """Return {name: file} of what the settings of a model in `folder` name, which goes where they go."""
    name = settings.get(SHORTLIST)
    return {} if name is None or folder is None else {name: folder / name}


def files_with_weights(settings: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return what a checkpoint made of a folder's model has beside its weights, as arguments of `save_checkpoint`:
    these settings, the files that they name, how a text's vector is made, and what its card says of license, languages
    and origin."""
    # Who only searches needs nothing of what writes.
    from mlx_transformer.core.card import carried
    from mlx_transformer.core.text_embedding import embedding_files

    texts = settings_text(settings) | ({} if folder is None else {CARD: carried(folder)})
    vectors = {} if folder is None else dict(embedding_files(folder))
    return {"texts": {**texts, **named_files(settings, folder), **vectors}}


def language_id(settings: Mapping[str, Any], code: str) -> int:
    """Return the token of a language; `UserError` for one that the model doesn't have."""
    languages = settings.get(LANGUAGES, {})
    if not languages:
        raise UserError(f"language {shortened(str(code))!r}: the model has no tokens of languages; leave it out")
    if code not in languages:
        folded = {name.lower(): name for name in languages}  # ENG_latn is nearest to eng_Latn
        import difflib

        near = [folded[name] for name in difflib.get_close_matches(str(code).lower(), folded, n=3, cutoff=0.4)]
        hint = f"near it are {', '.join(near)}" if near else f"it has {len(languages)}"
        raise UserError(f"{shortened(str(code))!r} is none of the model's languages: {hint}")
    return languages[code]


class Around(NamedTuple):
    """The ids before and behind those of a source."""

    before: list[int]
    behind: list[int]

    def __call__(self, ids: Sequence[int]) -> list[int]:
        return [*self.before, *ids, *self.behind]


def around_source(settings: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Around, dict[str, Any]]:
    """Return the token of a source's language, where `source_language` is an option, and all other options. Where the
    target's stands in its place, `target_language` is the option."""
    others = {name: value for name, value in options.items() if name != SOURCE_LANGUAGE}
    source = options.get(SOURCE_LANGUAGE)
    if settings.get(TARGET_IN_SOURCE):
        if source is not None:
            raise UserError(f"{SOURCE_LANGUAGE}: the model is told the target's language alone: leave it out")
        source = others.pop(TARGET_LANGUAGE, None)
    token = [] if source is None else [language_id(settings, source)]
    return Around([], token) if settings.get(SOURCE_LAST) else Around(token, []), others


def with_source_language(settings: Mapping[str, Any], ids: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return source ids with their language's token, and all other options (`around_source`)."""
    around, others = around_source(settings, options)
    return (ids if ids is None or not any(around) else [around(row) for row in ids]), others


def resolved(settings: Mapping[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a search takes: the model's settings, and what was given in their place.

    Who asks for several outputs, or for sampling, is not refused for a beam that he did not ask for: the model's own
    gives way. So does its least length to a shorter limit, and its limit to one by the source's length.
    `target_language` is its token, forced first, or what the decoder begins with.
    """
    merged = {name: value for name, value in {**settings, **passed}.items() if name not in BESIDE}
    if (target := merged.pop(TARGET_LANGUAGE, None)) is not None:
        language = language_id(settings, target)
        merged |= {"start_id": language} if settings.get(TARGET_STARTS) else {"forced_first": (language,)}
    known = {name: value for name, value in merged.items() if name in FIELDS}
    if "max_length_factor" in passed and "max_new_tokens" not in passed:
        merged.pop("max_new_tokens", None)
    if known.get("sample") is True and "beam" not in passed:
        merged.pop("beam", None)
    limit, least = known.get("max_new_tokens"), known.get("min_new_tokens", 0)
    if limit is not None and isinstance(limit, int) and isinstance(least, int) and least > limit:
        name = "min_new_tokens" if "max_new_tokens" in passed else "max_new_tokens"
        if name not in passed:
            merged.pop(name, None)
    return merged
