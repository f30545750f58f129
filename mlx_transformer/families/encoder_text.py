"""The vocabularies of published encoders as a tokenizer.json of ours: WordPiece, byte-level BPE or SentencePiece.

A folder's own tokenizer.json splits text as its model expects, so it is kept, except for settings of lengths (which
follow from the model); the ids of its special tokens are added (`text/published_ids.py`). Older files, e.g. vocab.txt,
are converted to the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_transformer.core.tokenizer_files import JOINT
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import JsonObject, read_object, read_text
from mlx_transformer.text.added_tokens import CUT, SILENT, WHOLE
from mlx_transformer.text.published_ids import ROLES, roles_of
from mlx_transformer.text.sentencepiece_tokenizer import is_sentencepiece
from mlx_transformer.text.tokenizer import check_parts, read_backend

from .added import listed, role_names, with_tokens
from .languages import content_of, listed_tokens

WORDS = "vocab.txt"
LOWER = {"type": "Lowercase"}
MOST_TOKENS = 1 << 21
NAMES = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}
SETTINGS_OF = {"pad": "pad_token", "bos": "cls_token", "eos": "sep_token", "unk": "unk_token", "mask": "mask_token"}


def adopted(path: Path, settings: Mapping[str, Any], fills: bool = False, start: int | None = None) -> str:
    """Add the ids of special tokens to a folder's tokenizer.json; returns its text.

    settings: tokenizer_config.json. fills: a typed [MASK] becomes the mask token, as the model restores hidden words.
    start: id of the decoder's start token, if there is a decoder. Raises `UserError` for a file that doesn't put a
    token before and after each text.
    """
    specification = read_object(path / JOINT)
    check_parts(specification, str(path / JOINT))
    read_backend(lambda: read_text(path / JOINT), str(path / JOINT))
    return _with_roles(specification, _ends(specification, path / JOINT), settings, path / JOINT, fills, start=start)


def wordpiece(path: Path, settings: Mapping[str, Any], rows: int = MOST_TOKENS, fills: bool = False) -> str:
    """Make a tokenizer.json from a vocab.txt, which has a token per line (Devlin et al. 2019).

    settings, fills: as for `adopted`. rows: the model's number of ids. Raises `UserError` for a larger vocabulary, or
    if a special token is missing.
    """
    told = JsonObject(dict(settings), str(path / "tokenizer_config.json"))
    text = read_text(path / WORDS)
    if text.count("\n") > rows:
        raise UserError(f"{path / WORDS}: has {text.count(chr(10)):,} lines, but the model has {rows:,} ids")
    lines = text.split("\n")
    tokens = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    names = {role: _named(settings, role) or name for role, name in NAMES.items()}
    if missing := [name for name in names.values() if name not in vocabulary and name != names["mask"]]:
        raise UserError(f"{path / WORDS}: has no {' and no '.join(missing)}")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = sorted({name for name in names.values() if name in vocabulary}, key=lambda name: vocabulary[name])
    specification: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[name], "content": name, **flags} for name in special],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": told.flag("tokenize_chinese_chars", True),
            "strip_accents": None if told.get("strip_accents") is None else told.flag("strip_accents"),
            "lowercase": told.flag("do_lower_case", True),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": names["unk"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }
    ends = [(names["bos"], vocabulary[names["bos"]]), (names["eos"], vocabulary[names["eos"]])]
    specification["post_processor"] = _template(ends, typed=True)
    return _with_roles(specification, ends, settings, path / WORDS, fills)


def lower_cased(text: str) -> str:
    """Make a tokenizer.json lower-case text first, as in sentence-transformers. Added tokens that are looked for in
    text as it was typed keep their case."""
    specification = json.loads(text)
    normalizer = specification.get("normalizer")
    whole = isinstance(normalizer, dict) and normalizer.get("type") == "Sequence"
    inside = normalizer["normalizers"] if whole else [normalizer] if normalizer else []
    if LOWER not in inside:
        specification["normalizer"] = {"type": "Sequence", "normalizers": [LOWER, *inside]}
    return json.dumps(specification, ensure_ascii=False, indent=1) + "\n"


def of_pair_ends(
    text: str, ends: tuple[str, str], settings: Mapping[str, Any], where: Path, fills: bool = False
) -> str:
    """Put each text between two tokens, e.g. <s> and </s>, in a tokenizer.json of ours; the cut stays the same."""
    specification = json.loads(text)
    known, roles = _ids(specification), roles_of(specification)
    template = _template([(name, known[name]) for name in ends], typed=False)
    specification["post_processor"] = {**template, ROLES: roles}
    return _with_roles(specification, [(name, known[name]) for name in ends], settings, where, fills, as_written=False)


def _with_roles(
    specification: Mapping[str, Any],
    ends: list[tuple[str, int]],
    settings: Mapping[str, Any],
    where: Path,
    fills: bool,
    as_written: bool = True,
    start: int | None = None,
) -> str:
    known = _ids(specification)
    roles: dict[str, Any] = {"bos": ends[0][1], "eos": ends[1][1], **({"as_written": True} if as_written else {})}
    kept = roles_of(specification)
    for role, usual in (("pad", "<pad>"), ("unk", "<unk>"), ("mask", "<mask>")):
        spelled = _named(settings, role)
        ids = [known[name] for name in (spelled, NAMES[role], usual) if name in known]
        if not ids and role != "mask":
            raise UserError(f"{where}: has no {NAMES[role]} and no {usual}")
        roles |= {role: ids[0]} if ids else {}
    template = specification["post_processor"]
    if template["type"] != "TemplateProcessing":
        template = _template(ends, typed=template["type"] == "BertProcessing")
    roles |= {name: kept[name] for name in (SILENT, WHOLE, CUT) if name in kept}
    changed = {"truncation": None, "padding": None, "post_processor": {**template, ROLES: roles}}
    changed = {**specification, **changed}
    if as_written or not is_sentencepiece(changed):  # pieces have their tokens already
        texts = {id: text for text, id in known.items()}
        named = {texts[id] for id in roles.values() if type(id) is int and id in texts}
        named |= role_names(settings, mask=True)
        named -= {texts.get(roles["mask"], "")} if fills and "mask" in roles else set()
        if start is not None:
            changed["post_processor"][ROLES] |= {"bos": start}
        changed = with_tokens(changed, [*listed(where.parent, settings).values()], named)
    return json.dumps(changed, ensure_ascii=False, indent=1) + "\n"


def _ends(specification: Mapping[str, Any], where: Path) -> list[tuple[str, int]]:
    """(token, id) of the tokens before and after a text, e.g. [CLS] and [SEP]."""
    processor = specification.get("post_processor")
    kind = processor.get("type") if isinstance(processor, dict) else None
    nothing: Any = ("", "")
    try:
        if kind in ("BertProcessing", "RobertaProcessing"):
            return [(str(text), int(id)) for text, id in (processor["cls"], processor["sep"])]  # type: ignore[index]
        if kind == "TemplateProcessing":
            first, text, last = (next(iter(part.items()), nothing) for part in processor["single"])  # type: ignore[index]
            if (first[0], text[0], last[0]) == ("SpecialToken", "Sequence", "SpecialToken"):
                tokens = processor["special_tokens"]  # type: ignore[index]
                return [(part["id"], tokens[part["id"]]["ids"][0]) for part in (first[1], last[1])]
    except (LookupError, TypeError, ValueError, OverflowError, StopIteration, AttributeError):
        pass
    raise UserError(f"{where}: must put a single token before and a single token after each text, as encoders need")


def _template(ends: list[tuple[str, int]], typed: bool) -> dict[str, Any]:
    """The template `[CLS] A [SEP]`, and for pairs `[CLS] A [SEP] B [SEP]` with token types 0 and 1 (typed), or
    RoBERTa's `<s> A </s></s> B </s>` with type 0."""

    def special(name: str, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    (first, _), (last, _) = ends
    a, b = ({"Sequence": {"id": name, "type_id": kind * typed}} for kind, name in enumerate("AB"))
    between = [special(last)] if typed else [special(last), special(last)]
    return {
        "type": "TemplateProcessing",
        "single": [special(first), a, special(last)],
        "pair": [special(first), a, *between, b, special(last, int(typed))],
        "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in ends},
    }


def _ids(specification: Mapping[str, Any]) -> dict[str, int]:
    """{token: id} of possible special tokens: added tokens and the vocabulary."""
    model = specification.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    if isinstance(vocabulary, list):
        pieces = [entry[0] if isinstance(entry, list) and entry else None for entry in vocabulary]
        known = {piece: id for id, piece in enumerate(pieces) if isinstance(piece, str)}
    return known | listed_tokens(specification)


def _named(settings: Mapping[str, Any], role: str) -> str | None:
    name = settings.get(SETTINGS_OF[role])
    return None if name is None else content_of(name)
