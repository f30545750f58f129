"""Generation settings of published models: generation_config.json (if there is none, config.json) to ours, and back.

`transformers` counts the decoder's start token in its lengths; we don't.

A folder's chat templates are settings too. The first file that has one counts, as in transformers:

    chat_template.jinja      the template; beside it additional_chat_templates/NAME.jinja
    tokenizer_config.json    chat_template: the text, or [{"name": ..., "template": ...}]
    chat_template.json       {"chat_template": ...}, of processors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer_files import CHAT_TEMPLATE
from mlx_transformer.decoding.steps import banned_ids
from mlx_transformer.generation.settings import (
    CHAT_TEMPLATES,
    DEFAULT,
    SPECIAL_TOKENS,
    TASK_PREFIX,
    Settings,
    checked_settings,
)
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.files import optional_object, read_text

from .engine import Published
from .keys import Values
from .languages import content_of

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "do_sample": (False,),
    "forced_decoder_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "stop_strings": ([], ""),
    "guidance_scale": (1, 1.0),
    "watermarking_config": (),
    "max_time": (),
}
"""{key without a counterpart in our search: values without effect, in addition to null}"""


def settings_of(config: Values, generation: Values, c: TransformerConfig, where: str) -> tuple[Settings, list[str]]:
    """Our settings from config.json and generation_config.json, and notes on dropped settings.

    where: the path for errors. Raises `UserError` for invalid values.
    """
    source = generation or config
    present = {key: value for key, value in source.items() if value is not None}
    settings: Settings = {}
    if present.get("num_beams", 1) != 1 or "length_penalty" in present:
        early = present.get("early_stopping", False)
        if early not in (True, False, "never"):
            raise UserError(f'{where}: early_stopping={early!r} must be true, false or "never"')
        settings |= {"beam": present.get("num_beams", 1), "penalty_form": "length"}
        settings |= {"length_penalty": present.get("length_penalty", 1.0)}
        settings |= {"early_stopping": True} if early is True else {"heuristic_stop": True} if early is False else {}
    settings |= _lengths(present, c)
    if present.get("repetition_penalty", 1) != 1:
        settings["repetition_penalty"] = present["repetition_penalty"]
    if present.get("no_repeat_ngram_size", 0) != 0:
        settings["no_repeat_ngram"] = present["no_repeat_ngram_size"]
    if "forced_bos_token_id" in present:
        settings["forced_first"] = [present["forced_bos_token_id"]]
    if (start := generation.get("decoder_start_token_id")) not in (None, c.bos_id):
        settings["start_id"] = start
    left = [key for key, neutral in NEUTRAL.items() if key in present and present[key] not in neutral]
    if (forced := present.get("forced_eos_token_id")) in (c.eos_id, [c.eos_id]):
        settings["forced_end"] = True
    elif forced is not None:
        left.append(f"forced_eos_token_id={forced}")
    ends = present.get("eos_token_id", c.eos_id)
    ends = (ends or [c.eos_id]) if isinstance(ends, list) else [ends]
    if c.eos_id not in ends:  # `transformers` wouldn't end there, but we do
        raise UserError(
            f"{where}: eos_token_id={present['eos_token_id']!r} lacks config.json's {c.eos_id}, which ends here"
        )
    if others := [id for id in ends if id != c.eos_id]:
        settings["end_ids"] = others
    suppressed, sequences = _banned(present, c, ends)
    settings |= {"suppressed": suppressed} if suppressed else {}
    settings |= {"banned_sequences": sequences} if sequences else {}
    if first := present.get("begin_suppress_tokens"):
        settings["suppressed_first"] = first
    if prefix := present.get("prefix", config.get("prefix")):
        settings[TASK_PREFIX] = prefix
    notes = _tasks(config)
    notes += [f"settings of generation left behind: {first_of(left, ', ')}"] if left else []
    return checked_settings(settings, c, where), notes


def published_settings(settings: Mapping[str, Any], c: TransformerConfig) -> Values:
    """generation_config.json for our settings; those without a key in it are dropped, e.g. the GNMT length penalty."""
    s = dict(settings)
    lines: Values = {}
    if "beam" in s:
        stop = {"early_stopping": True} if s.get("early_stopping") else {}
        stop = stop or {"early_stopping": False if s.get("heuristic_stop") else "never"}
        lines |= {"num_beams": s["beam"], **stop}
    if s.get("penalty_form") == "length":
        lines["length_penalty"] = s["length_penalty"]
    if s.get("max_new_tokens") is not None:
        lines["max_length"] = s["max_new_tokens"] + 1
    names = {"min_new_tokens": "min_new_tokens", "repetition_penalty": "repetition_penalty"}
    names |= {"no_repeat_ngram": "no_repeat_ngram_size"}
    lines |= {theirs: s[ours] for ours, theirs in names.items() if ours in s}
    if s.get("forced_first"):
        lines["forced_bos_token_id"] = s["forced_first"][0]
    if s.get("forced_end"):
        lines["forced_eos_token_id"] = c.eos_id
    if s.get("end_ids"):
        lines["eos_token_id"] = list(dict.fromkeys([c.eos_id, *s["end_ids"]]))
    if s.get("suppressed"):
        lines["suppress_tokens"] = list(s["suppressed"])
    if s.get("suppressed_first"):
        lines["begin_suppress_tokens"] = list(s["suppressed_first"])
    if s.get("banned_sequences"):
        lines["bad_words_ids"] = [*([id] for id in banned_ids(c)), *map(list, s["banned_sequences"])]
    return lines


def with_first_end(published: Published) -> Published:
    """The model with only the first of several end tokens in its config.json; the others become `end_ids`, also where
    there is no generation_config.json."""
    config, ends = published.config, published.config.get("eos_token_id")
    if not isinstance(ends, list) or not ends:
        return published
    return replace(published, config={**config, "eos_token_id": ends[0]}, generation=published.generation or config)


def _lengths(theirs: Values, c: TransformerConfig) -> Settings:
    ours: Settings = {}
    least = theirs.get("min_new_tokens", theirs.get("min_length", 0))
    if "min_new_tokens" not in theirs and _is_number(least):
        least = max(0, least - 1)
    if least != 0:
        ours["min_new_tokens"] = least
    # A decoder's max_length counts its prompt too: that limit is the model's positions.
    most = theirs.get("max_new_tokens", theirs.get("max_length") if c.has_encoder else None)
    if most is not None:
        counted = most - ("max_new_tokens" not in theirs) if _is_number(most) else most
        ours["max_new_tokens"] = min(counted, c.max_positions) if _is_number(counted) else counted
    if _is_number(least) and _is_number(ours.get("max_new_tokens")) and least > ours["max_new_tokens"]:
        ours["max_new_tokens"] = least
    return ours


def _banned(theirs: Values, c: TransformerConfig, ends: list[Any]) -> tuple[list[Any], list[Any]]:
    """Banned ids (without those we always ban), and banned sequences. An end token in bad_words_ids isn't banned, as in
    `transformers`; in suppress_tokens it is."""
    words = theirs.get("bad_words_ids", [])
    words = [word for word in (words if isinstance(words, list) else [words]) if word not in [[end] for end in ends]]
    single = [word[0] if isinstance(word, list) and len(word) == 1 else None for word in words]
    ids = theirs.get("suppress_tokens", [])
    ids = [*(ids if isinstance(ids, list) else [ids]), *(id for id in single if id is not None)]
    sequences = [word for word, id in zip(words, single, strict=True) if id is None]
    return [id for id in dict.fromkeys(map(_hashable, ids)) if id not in (*banned_ids(c), -1)], sequences


def _tasks(config: Values) -> list[str]:
    """A note that lists the prefixes of T5's tasks, e.g. "summarize: ", from which users choose."""
    tasks = config.get("task_specific_params")
    prefixes = (
        [task.get("prefix") for task in tasks.values() if isinstance(task, dict)] if isinstance(tasks, dict) else []
    )
    named = [repr(prefix) for prefix in prefixes if prefix and isinstance(prefix, str)]
    return [f"texts begin with a task (--task-prefix): {', '.join(named):.300}"] if named else []


def _hashable(value: Any) -> Any:
    """An id unchanged; anything else as text, which is refused later."""
    return value if _is_number(value) else repr(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


ADDITIONAL, OF_PROCESSORS, KEY = "additional_chat_templates", "chat_template.json", "chat_template"


def read_chat(path: Path, settings: Mapping[str, Any]) -> Settings:
    """Return a folder's templates and the tokens that they read, as settings of generation; {} if it has no template.
    settings: tokenizer_config.json and special_tokens_map.json. `UserError` for a template that is none."""
    files = {DEFAULT: path / CHAT_TEMPLATE} if (path / CHAT_TEMPLATE).is_file() else {}
    files |= {file.stem: file for file in sorted((path / ADDITIONAL).glob("*.jinja"))}
    templates = {name: read_text(file) for name, file in files.items()}
    if not templates:
        found = settings.get(KEY) or optional_object(path / OF_PROCESSORS).get(KEY)
        templates = _named(found, path) if found else {}
    if not templates:
        return {}
    tokens = {name: content_of(value) for name, value in settings.items() if name.endswith("_token") and value}
    more = settings.get("extra_special_tokens")
    tokens |= {name: content_of(value) for name, value in more.items()} if isinstance(more, dict) else {}
    tokens = {name: text for name, text in tokens.items() if isinstance(text, str) and text}
    return {CHAT_TEMPLATES: templates, **({SPECIAL_TOKENS: tokens} if tokens else {})}


def _named(found: Any, path: Path) -> dict[str, str]:
    """Return the templates of one text, of [{"name": ..., "template": ...}], or of {name: text}."""
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = {each.get("name"): each.get("template") for each in found}
    templates: Any = {DEFAULT: found} if isinstance(found, str) else found
    texts = [*templates, *templates.values()] if isinstance(templates, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{path}: its {KEY} is no text, and no list of names and templates")
    return templates
