"""Tokenizer files in a model's folder: tokenizer.json, or two files for models with a vocabulary per language:

    source_tokenizer.json, target_tokenizer.json

Each has the format of tokenizer.json. It has another name so that no program takes one side for the whole tokenizer. In
memory both are a single text, {"source": ..., "target": ...}, so that code can copy tokenizers of either kind.
"""

from __future__ import annotations

import json
from pathlib import Path

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import parse_json, read_text

JOINT = "tokenizer.json"
SIDES = {"source": "source_tokenizer.json", "target": "target_tokenizer.json"}
NAMES = (JOINT, *SIDES.values())
CHAT_TEMPLATE = "chat_template.jinja"
"""Beside a decoder's tokenizer: how a conversation becomes a prompt."""
DAMAGED = "the file is damaged or no tokenizer.json"

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
"""The first tokens of vocabularies trained here; one token for each of the 256 byte values follows."""
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256


def tokenizer_path(folder: Path) -> Path | None:
    """The argument for `Tokenizer.load`: tokenizer.json, or the folder if it has two vocabularies. None if it has none.

    Raises `UserError` if only one of the two files is there, or either beside tokenizer.json.
    """
    joint, sides = (folder / JOINT).is_file(), [(folder / name).is_file() for name in SIDES.values()]
    if any(sides) and (joint or not all(sides)):
        both = " and ".join(SIDES.values())
        raise UserError(f"{folder}: holds either {JOINT} or {both}: remove what doesn't belong to the model")
    return folder / JOINT if joint else folder if any(sides) else None


def read_tokenizer(path: Path) -> str:
    """Read the tokenizer at a path from `tokenizer_path` as text."""
    if not path.is_dir():
        return read_text(path)
    sides = {
        side: parse_json(read_text(path / name), f"{path / name}: not JSON", DAMAGED) for side, name in SIDES.items()
    }
    return json.dumps(sides, ensure_ascii=False)


def join_texts(source: str, target: str) -> str:
    """Combine two tokenizer.json texts."""
    return json.dumps({"source": json.loads(source), "target": json.loads(target)}, ensure_ascii=False)


def side_texts(text: str, origin: str = JOINT) -> dict[str, str] | None:
    """Split a text of `join_texts` into {"source": ..., "target": ...}; None for a joint vocabulary."""
    if not text.startswith('{"source"'):  # a joint vocabulary; skip parsing it
        return None
    values = parse_json(text, f"{origin}: not JSON", DAMAGED)
    if not isinstance(values, dict) or values.keys() != SIDES.keys():
        return None
    return {side: json.dumps(values[side], ensure_ascii=False, indent=1) + "\n" for side in SIDES}


def tokenizer_files(text: str) -> dict[str, str]:
    """{file name: contents} of the files to write for a tokenizer's text."""
    sides = side_texts(text)
    return {JOINT: text} if sides is None else {SIDES[side]: each for side, each in sides.items()}
