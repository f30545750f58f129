"""How a model generates by default: `generation.json` in its folder, e.g. {"beam": 4, "max_new_tokens": 512}.

Its keys are fields of `Options`. The caller's options win, field by field. A model trained here has no such file.
Further keys:

languages: {code: id}, the language tokens of a multilingual model. Every output begins with the target's token
(forced), and every source with the source's token, unless one of these is true: target_language_in_source: every source
begins with the target's token, and nothing is forced, e.g. in SMaLL-100, or in an Opus-MT of several languages, whose
texts may contain the token: ">>deu<< Hello". source_language_last: the source's token follows the end token of every
source, e.g. in mBART. target_language_starts: the decoder starts with the target's token instead of the start token,
e.g. in mBART. shortlist: the name of a file in the same folder with the candidate tokens of each source token.
task_prefix: text before every source, e.g. T5's "translate English to German: ". source_language, target_language:
defaults for texts without named languages (`with_languages`). chat_templates: {name: text} of a decoder's templates;
"default" is in a file of its own, chat_template.jinja. special_tokens: {variable in templates: token}, e.g.
{"bos_token": "<s>"}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer_files import CHAT_TEMPLATE
from mlx_transformer.decoding.options import Options, check_options
from mlx_transformer.system.errors import UserError, shortened
from mlx_transformer.system.fields import unknown_keys
from mlx_transformer.system.files import read_json, read_text
from mlx_transformer.system.manifest import CARD

SETTINGS = "generation.json"
LANGUAGES, SHORTLIST, TASK_PREFIX = "languages", "shortlist", "task_prefix"
TARGET_IN_SOURCE, SOURCE_LAST = "target_language_in_source", "source_language_last"
TARGET_STARTS = "target_language_starts"
PLACES = (TARGET_IN_SOURCE, SOURCE_LAST, TARGET_STARTS)
"""Flags for models with other places of language tokens than first in the source and first in the output."""
SOURCE_LANGUAGE, TARGET_LANGUAGE = "source_language", "target_language"
TYPED = re.compile(">>([^<>]+)<<")
CHAT_TEMPLATES, SPECIAL_TOKENS = "chat_templates", "special_tokens"
BESIDE = (LANGUAGES, *PLACES, SHORTLIST, TASK_PREFIX, SOURCE_LANGUAGE, TARGET_LANGUAGE, CHAT_TEMPLATES, SPECIAL_TOKENS)
"""The keys of the file that are not fields of `Options`."""
DEFAULT = "default"
"""The name of a model's only chat template."""
NO_SHORTLIST = "none"
"""Value instead of a shortlist file: all tokens are candidates."""

Settings = dict[str, Any]


def checked_settings(values: Any, config: TransformerConfig, where: str) -> Settings:
    """Check the contents of generation.json; returns them with lists of ids as tuples. where: the file, for errors."""
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
        raise UserError(f"{where}: {LANGUAGES} must be {{code: id}} with ids below {len(known)}")
    for name in (SOURCE_LANGUAGE, TARGET_LANGUAGE):
        if name in values and (not isinstance(values[name], str) or values[name] not in languages):
            raise UserError(f"{where}: {name} {values[name]!r:.60} is not in its {LANGUAGES}")
    for name in (CHAT_TEMPLATES, SPECIAL_TOKENS):
        texts = values.get(name, {})
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise UserError(f"{where}: {name} must be {{name: text}}")
    if not isinstance(values.get(TASK_PREFIX, ""), str):
        raise UserError(f"{where}: {TASK_PREFIX} must be text")
    file = values.get(SHORTLIST)
    if file is not None and (not isinstance(file, str) or Path(file).name != file):
        raise UserError(f"{where}: {SHORTLIST} {file!r:.60} must be the name of a file in the same folder")
    try:
        options = Options(**written)
        check_options(options, config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    extra = {name: values[name] for name in BESIDE if values.get(name)}
    return {name: getattr(options, name) for name in written} | extra


def read_settings(folder: Path, config: TransformerConfig) -> Settings:
    """Read generation.json in a model's folder, and its chat template; {} without either. Raises `UserError` if one is
    damaged."""
    path, template = folder / SETTINGS, folder / CHAT_TEMPLATE
    settings = checked_settings(read_json(path), config, str(path)) if path.exists() else {}
    if template.is_file():
        settings[CHAT_TEMPLATES] = {DEFAULT: read_text(template), **settings.get(CHAT_TEMPLATES, {})}
    return within(settings, config)


def within(settings: Settings, config: TransformerConfig) -> Settings:
    """Limit max_new_tokens to the model's positions."""
    most = settings.get("max_new_tokens")
    return settings if most is None else {**settings, "max_new_tokens": min(most, config.max_positions)}


def settings_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """{"generation.json": contents, "chat_template.jinja": the default template}, without empty files."""
    templates = dict(settings.get(CHAT_TEMPLATES, {}))
    texts = {CHAT_TEMPLATE: templates.pop(DEFAULT)} if DEFAULT in templates else {}
    others = {name: value for name, value in settings.items() if name != CHAT_TEMPLATES}
    others |= {CHAT_TEMPLATES: templates} if templates else {}
    return ({SETTINGS: json.dumps(others, indent=2) + "\n"} if others else {}) | texts


def named_files(settings: Mapping[str, Any], folder: Path | None) -> dict[str, Path]:
    """{name: path} of the files named by the settings, e.g. the shortlist; they are copied with generation.json."""
    name = settings.get(SHORTLIST)
    return {} if name is None or folder is None else {name: folder / name}


def files_with_weights(settings: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Arguments of `save_checkpoint` for a model made from the model in `folder`: the files beside the weights.

    They are the settings, the files named by them, the pooling files of an embedding model, and the model card with
    its license, languages and origin.
    """
    # Lazy: a search doesn't need the modules that write files.
    from mlx_transformer.core.card import carried
    from mlx_transformer.core.text_embedding import embedding_files

    texts = settings_text(settings) | ({} if folder is None else {CARD: carried(folder)})
    vectors = {} if folder is None else dict(embedding_files(folder))
    return {"texts": {**texts, **named_files(settings, folder), **vectors}}


def language_id(settings: Mapping[str, Any], code: str) -> int:
    """The token id of a language code, e.g. "deu_Latn". Raises `UserError` if the model doesn't have the language."""
    languages = settings.get(LANGUAGES, {})
    if not languages:
        raise UserError(f"language {shortened(str(code))!r}: the model has no language tokens; leave it out")
    if code not in languages:
        folded = {name.lower(): name for name in languages}  # so that ENG_latn suggests eng_Latn
        import difflib

        near = [folded[name] for name in difflib.get_close_matches(str(code).lower(), folded, n=3, cutoff=0.4)]
        hint = f"did you mean {', '.join(near)}?" if near else f"the model has {len(languages)}"
        raise UserError(f"unknown language {shortened(str(code))!r}; {hint}")
    return languages[code]


def typed_language(settings: Mapping[str, Any], line: str) -> str | None:
    """The target language at the beginning of a text, e.g. "deu" in ">>deu<< Hello"; None if the model doesn't read it
    there."""
    match = TYPED.match(line) if settings.get(TARGET_IN_SOURCE) else None
    return match[1] if match and match[1] in settings.get(LANGUAGES, {}) else None


def with_languages(
    settings: Mapping[str, Any], options: Mapping[str, Any], told: bool = False, lines: Iterable[str] = ()
) -> dict[str, Any]:
    """Add the folder's default languages to the options for translating text, for languages that the caller doesn't
    name.

    told: the sources already have their language token, so that only the target's is needed. lines: the sources' texts,
    which may name the target. Raises `UserError` if a language of a multilingual model is still unknown: the model
    would guess it.
    """
    chosen = dict(options)
    languages = settings.get(LANGUAGES)
    if not languages:
        return chosen
    typed = [typed_language(settings, line) for line in lines if line.strip()]
    told = told or (bool(typed) and None not in typed)
    begun = _chooses_first(options) or bool(settings.get("forced_first"))
    for name in (SOURCE_LANGUAGE, TARGET_LANGUAGE):
        if chosen.get(name) is None:
            chosen.pop(name, None)
            if name in settings and not (name == TARGET_LANGUAGE and begun):
                chosen[name] = settings[name]
    for name in [name for name in (SOURCE_LANGUAGE, TARGET_LANGUAGE) if name in chosen]:
        language_id(settings, chosen[name])
    in_source = settings.get(TARGET_IN_SOURCE)
    of_source = TARGET_LANGUAGE if in_source else SOURCE_LANGUAGE
    for name in ([SOURCE_LANGUAGE] if in_source else []) + ([of_source] if told else []):
        if options.get(name) is None:
            chosen.pop(name, None)
    missing = [] if told or of_source in chosen else [of_source]
    missing += [] if in_source or begun or TARGET_LANGUAGE in chosen else [TARGET_LANGUAGE]
    if missing:
        some = ", ".join(list(languages)[:3])
        typing = ", or begin each text with one, as in >>fra<< Hello" if in_source and not all(typed) else ""
        raise UserError(
            f"{' and '.join(missing)}: the model has {len(languages)} languages ({some}, ...), and its folder has no "
            f"default: name one{typing}"
        )
    return chosen


def _chooses_first(options: Mapping[str, Any]) -> bool:
    """Whether other options determine the first token of an output."""
    return bool(options.get("forced_first") or options.get("prefix")) or options.get("start_id") is not None


class Around(NamedTuple):
    """Ids to put before and after the ids of a source, unless it begins with one of `own`."""

    before: list[int]
    behind: list[int]
    own: frozenset[int] = frozenset()

    def __call__(self, ids: Sequence[int]) -> list[int]:
        return [*self.before, *ids, *self.behind] if self.own.isdisjoint(ids[:1]) else [*ids]


def around_source(settings: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Around, dict[str, Any]]:
    """(the language token to put around a source, the options without this language)

    The language is `source_language`, or `target_language` if the model has target_language_in_source.
    """
    others = {name: value for name, value in options.items() if name != SOURCE_LANGUAGE}
    source = options.get(SOURCE_LANGUAGE)
    if settings.get(TARGET_IN_SOURCE):
        if source is not None:
            raise UserError(f"{SOURCE_LANGUAGE}: the model needs only the target's language: leave it out")
        source = others.pop(TARGET_LANGUAGE, None)
    token = [] if source is None else [language_id(settings, source)]
    own = frozenset(settings[LANGUAGES].values() if token and settings.get(TARGET_IN_SOURCE) else ())
    return Around([], token) if settings.get(SOURCE_LAST) else Around(token, [], own), others


def with_source_language(
    settings: Mapping[str, Any], ids: Any, options: Mapping[str, Any], prefix: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Add language tokens to source ids; returns the ids, and the remaining options (see `around_source`).

    Languages are chosen by `with_languages`. If the caller names none, a row that already has a language token keeps
    it; a row that begins with its target's token always keeps it.
    """
    tokens = {*settings.get(LANGUAGES, {}).values()}
    if ids is None or not tokens:
        return ids, around_source(settings, options)[1]
    name = TARGET_LANGUAGE if settings.get(TARGET_IN_SOURCE) else SOURCE_LANGUAGE
    has = [options.get(name) is None and not tokens.isdisjoint(row) for row in ids]
    begun = {} if prefix is None else {"prefix": prefix}
    chosen = with_languages(settings, {**options, **begun}, told=all(has))
    around, others = around_source(settings, {key: chosen[key] for key in chosen.keys() - begun.keys()})
    return [row if told else around(row) for row, told in zip(ids, has, strict=True)], others


def resolved(settings: Mapping[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the model's settings with the caller's options, which win.

    A setting that contradicts an option is dropped: the model's beam if sample=True, its max_new_tokens if
    max_length_factor is given, its min_new_tokens if max_new_tokens is shorter. `target_language` becomes
    `forced_first`, or `start_id` if the decoder begins with it.
    """
    merged = {name: value for name, value in {**settings, **passed}.items() if name not in BESIDE}
    if (target := passed.get(TARGET_LANGUAGE)) is not None:
        language = language_id(settings, target)
        merged |= {"start_id": language} if settings.get(TARGET_STARTS) else {"forced_first": (language,)}
    if "max_length_factor" in passed and "max_new_tokens" not in passed:
        merged.pop("max_new_tokens", None)
    if merged.get("sample") is True and "beam" not in passed:
        merged.pop("beam", None)
    limit, least = merged.get("max_new_tokens"), merged.get("min_new_tokens", 0)
    if isinstance(limit, int) and isinstance(least, int) and least > limit:
        name = "min_new_tokens" if "max_new_tokens" in passed else "max_new_tokens"
        if name not in passed:
            merged.pop(name, None)
    return merged


def chosen_options(settings: Mapping[str, Any], passed: Mapping[str, Any]) -> tuple[Around, Options]:
    """(the language token to put around a source, the `Options` of a search with the model's settings)"""
    around, others = around_source(settings, passed)
    return around, Options.of(resolved(settings, others))
