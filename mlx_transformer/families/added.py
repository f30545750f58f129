"""Tokens a model's maker added to a published vocabulary, read from the folder's files.

tokenizer.json                       added_tokens: ids, spelling, flags
tokenizer_config.json                added_tokens_decoder: the same by id, since transformers 4.34
added_tokens.json                    {token: id} without flags, in earlier versions
special_tokens_map.json              the special tokens: additional_special_tokens, extra_special_tokens in version 5

The first file with the token counts. Tokens with a role (e.g. [SEP]) and language tokens are not added tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer_files import JOINT
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.files import optional_object
from mlx_transformer.text.added_tokens import (
    FLAGS,
    NORMALIZED,
    SILENT,
    WHOLE,
    AddedToken,
    added_tokens,
    filler,
    silencing,
    silent_contents,
    without_silencing,
)
from mlx_transformer.text.published_ids import ROLES, roles_of
from mlx_transformer.text.tokenizer import Tokenizer

from .languages import content_of

ADDED = "added_tokens.json"
MOST_ROWS = 1 << 21
ROLE_KEYS = ("pad_token", "bos_token", "eos_token", "unk_token", "cls_token", "sep_token")
MASK_KEY = "mask_token"
BLANK = re.compile(r"<(extra_id|unk|mask)_\d+>|<mask>")
"""Tokens in every vocabulary of T5, Pegasus or BART, e.g. <extra_id_0>."""
USUAL: Mapping[str, Any] = {"truncation_side": "right", "add_bos_token": True, "add_eos_token": True}
"""{unread key of tokenizer_config.json: the value we behave by}; another value changes the model's input."""
CLEAN_UP = "clean_up_tokenization_spaces"
SWITCHES = ("legacy", "legacy_behaviour", "add_prefix_space", "separate_vocabs", CLEAN_UP)
LISTS = ("additional_special_tokens", "extra_special_tokens")


def listed(path: Path, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """List every token beside the vocabulary by id, including roles and languages.

    settings: tokenizer_config.json and special_tokens_map.json."""
    file = optional_object(path / JOINT)
    entries = [] if "lookup" in roles_of(file) else file.get("added_tokens") or []  # of ours, beside the maker's files
    if not isinstance(entries, list):
        raise UserError(f"{path / JOINT}: added_tokens is {entries!r:.40}, not a list")
    ids = (entry.get("id") if isinstance(entry, dict) else None for entry in entries)
    read = [_checked(entry, id, path / JOINT) for entry, id in zip(entries, ids, strict=True)]
    tokens = {token.id: token for token in read}
    for id, entry in (settings.get("added_tokens_decoder") or {}).items():
        token = _checked(entry, int(id) if id.isdecimal() and len(id) < 10 else None, path / "tokenizer_config.json")
        if token.content not in {each.content for each in tokens.values()}:
            tokens.setdefault(token.id, token)
    special = {*role_names(settings, mask=True), *_special(settings)}
    spelled = {token.content for token in tokens.values()}
    for content, id in optional_object(path / ADDED).items():
        if type(id) is not int or id < 0:
            raise UserError(f"{path / ADDED}: {content!r:.40} has the id {id!r:.40}")
        if content and content not in spelled:
            is_special = content in special
            tokens.setdefault(id, AddedToken(id, content, special=is_special, normalized=not is_special))
    return tokens


def _checked(entry: Any, id: Any, where: Path) -> AddedToken:
    """Read an entry; raise `UserError` unless it has a spelling, an id and boolean flags."""
    token = AddedToken.read(entry, id)
    if token is None or not all(isinstance(entry.get(flag, False), bool) for flag in FLAGS):
        raise UserError(f"{where}: {entry!r:.60} is no added token; restore the file from a copy")
    return token


def _is_token(value: Any) -> bool:
    return isinstance(value.get("content") if isinstance(value, dict) else value, str)


def checked_settings(settings: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    """Check the types of all keys about tokens in tokenizer_config.json, and return it. Raises `UserError`."""
    kinds = {**dict.fromkeys((*ROLE_KEYS, MASK_KEY), "a token"), **dict.fromkeys(LISTS, "a list of tokens")}
    kinds |= dict.fromkeys(SWITCHES, "true or false") | {"added_tokens_decoder": "an object"}
    for key, kind in kinds.items():
        value: Any = settings.get(key)
        each = value.values() if isinstance(value, dict) else value
        fits = isinstance(value, dict) if kind == "an object" else _is_token(value)
        if kind == "true or false":
            fits = isinstance(value, bool)
        if kind == "a list of tokens":
            fits = isinstance(value, list | dict) and all(map(_is_token, each))
        if value is not None and not fits:
            raise UserError(f"{where}: {key} is {value!r:.60}, not {kind}")
    return settings


def role_names(settings: Mapping[str, Any], mask: bool) -> set[str]:
    """The tokens with a role in a text, e.g. [CLS]. mask: include the mask token."""
    keys = (*ROLE_KEYS, MASK_KEY) if mask else ROLE_KEYS
    return {content_of(settings[key]) for key in keys if settings.get(key) is not None}


def makers_tokens(
    path: Path, settings: Mapping[str, Any], roles: Collection[str], rows: int, mask: bool = False
) -> list[AddedToken]:
    """List the added tokens by id: each is a single id in a text.

    roles: further names of role and language tokens, left out like the folder's own. rows: number of the model's ids;
    raises `UserError` for a token beyond them."""
    named = {*roles, *role_names(settings, mask)}
    tokens = [token for token in listed(path, settings).values() if token.content not in named]
    if beyond := [token for token in tokens if token.id >= rows]:
        raise UserError(
            f"{path}: added token {beyond[0].content!r:.60} has id {beyond[0].id}, but the model has {rows} ids"
        )
    return sorted(tokens)


def with_tokens(
    specification: Mapping[str, Any], tokens: Sequence[AddedToken], roles: Collection[str]
) -> dict[str, Any]:
    """Add tokens to a parsed tokenizer.json.

    roles: tokens that are split like any text when somebody types them. Raises `UserError` if a token's id or spelling
    is taken."""
    model = specification.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    size = len(vocabulary) if isinstance(vocabulary, (dict, list)) else 0
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    every = {token.id: token for token in added_tokens(specification)}
    for token in tokens:
        if every.setdefault(token.id, token).content != token.content:
            raise UserError(f"the added token {token.content!r:.60} has id {token.id}, which is another's")
    for token in every.values():
        if known.get(token.content, token.id) != token.id or (token.id < size and known and token.content not in known):
            raise UserError(f"the added token {token.content!r:.60} has id {token.id}, which is another's")
    if (last := max(every, default=0)) > MOST_ROWS:
        raise UserError(f"the added token {every[last].content!r:.60} has id {last}: no model has so many")
    gaps = {id: filler(id) for id in range(size, max(every, default=-1)) if id not in every}
    silent = sorted(id for id, token in every.items() if token.special and token.content not in roles)
    processor = dict(specification["post_processor"])
    processor[ROLES] = {**processor.get(ROLES, {}), **({SILENT: silent} if silent else {})}
    entries = [
        token.entry(special=token.content in roles or id in gaps) for id, token in sorted((every | gaps).items())
    ]
    changed = {**specification, "added_tokens": entries, "post_processor": processor}
    decoder = specification.get("decoder")
    if silent and isinstance(decoder, dict) and decoder.get("type") == "ByteLevel":
        changed["decoder"] = silencing(decoder, silent_contents(changed))
    return changed


def with_specials(specification: Mapping[str, Any], published: bool) -> dict[str, Any]:
    """Set the flags `special` and `normalized` of added tokens in a parsed tokenizer.json of ours.

    published: as their maker set them. Otherwise no token that is looked for in text is special."""
    roles = roles_of(specification)
    flagged = {"special": {*roles.get(SILENT, ())}, "normalized": {*roles.get(NORMALIZED, ())}}
    entries = [
        {**entry, **{flag: published for flag, ids in flagged.items() if entry.get("id") in ids}}
        for entry in specification.get("added_tokens") or ()
    ]
    changed = {**specification, "added_tokens": entries}
    plain, contents = without_silencing(specification), silent_contents(specification)
    silences = isinstance(plain, dict) and (plain.get("type") == "ByteLevel" or WHOLE in roles_of(specification))
    changed["decoder"] = silencing(plain, contents) if silences and contents and not published else plain
    return changed


def summary(tokenizer: str, config: TransformerConfig, settings: Mapping[str, Any]) -> list[str]:
    """Notes on an imported vocabulary: added tokens, embedding rows without a token, and unsupported settings of
    tokenizer_config.json."""
    whole = Tokenizer(tokenizer)
    lines = []
    mask = None if whole.mask_id is None else whole.token(whole.mask_id)
    added = [token.content for token in whole.source.added if not BLANK.fullmatch(token.content)]
    if added := [content for content in added if content != mask]:
        named = first_of(list(map(repr, added)), ", ")
        lines.append(f"tokens that were added to its vocabulary, each one id in a text: {named}")
    sides = {"": (whole, config.vocab_size)}
    if whole.separate:
        sides = {"source ": (whole.source, config.source_vocab_size), "target ": (whole, config.vocab_size)}
    for side, (each, rows) in sides.items():
        unnamed = [id for id in each.special_ids if each.token(id) == filler(id).content]
        unnamed = sorted({*unnamed, *range(each.vocab_size, rows)})
        if unnamed:
            which = f"{unnamed[0]} to {unnamed[-1]}" if len(unnamed) > 1 else f"{unnamed[0]}"
            lines.append(f"{len(unnamed)} of {rows} {side}rows of the table have no token (ids {which})")
    added_ends = zip(("add_bos_token", "add_eos_token"), map(bool, whole.ends), strict=True) if whole.is_makers else ()
    usually = {**USUAL, **dict(added_ends)}
    ignored = [key for key, usual in usually.items() if settings.get(key, usual) not in (usual, None)]
    if config.has_decoder and settings.get(CLEAN_UP) is True:
        ignored.append(CLEAN_UP)
    if ignored:
        lines.append(f"not done, though tokenizer_config.json asks for it: {first_of(ignored, ', ')}")
    return lines


def _special(settings: Mapping[str, Any]) -> list[str]:
    """The special tokens without a role."""
    names: list[str] = []
    for key in LISTS:
        values = settings.get(key)
        values = list(values.values()) if isinstance(values, dict) else values
        names += [content_of(each) for each in values] if isinstance(values, list) else []
    return names
