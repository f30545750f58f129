"""Byte-level BPE of published models, vocab.json and merges.txt as BART and RoBERTa have them, as a tokenizer.json.

The words within which bytes are merged are GPT-2's, which the component ByteLevel knows by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlx_transformer.system.errors import UserError
from mlx_transformer.text.published_ids import ROLES

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def byte_level_json(vocabulary: Mapping[str, int], merges: str, roles: Mapping[str, Any], space: bool) -> str:
    """Return the text of a `tokenizer.json` that gives `<s> text </s>`. merges: the text of merges.txt. space: a text
    begins with one. Raises `UserError` for a vocabulary without one of these two."""
    if missing := [token for token in ("<s>", "</s>", "<unk>") if token not in vocabulary]:
        raise UserError(f"the vocabulary has no {' and no '.join(missing)}")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ends = [{"SpecialToken": {"id": token, "type_id": 0}} for token in ("<s>", "</s>")]
    parts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": True}
    specification = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            # as `transformers` has it of these files: a space before <mask> belongs to it
            {"id": vocabulary[t], "content": t, **flags, "lstrip": t == "<mask>"}
            for t in SPECIAL
            if t in vocabulary
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [ends[0], parts[0], ends[1]],
            "pair": [ends[0], parts[0], ends[1], ends[1], parts[1], ends[1]],
            "special_tokens": {t: {"id": t, "ids": [vocabulary[t]], "tokens": [t]} for t in ("<s>", "</s>")},
            ROLES: dict(roles),
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocabulary.items(), key=lambda each: each[1])),
            "merges": _pairs(merges),
        },
    }
    return json.dumps(specification, ensure_ascii=False, indent=1) + "\n"


def _pairs(merges: str) -> list[list[str]]:
    lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    pairs = [line.split(" ") for line in lines]
    for line, pair in zip(lines, pairs, strict=True):
        if len(pair) != 2:
            raise UserError(f"merges.txt: {line!r:.60} is no pair of tokens")
    return pairs
