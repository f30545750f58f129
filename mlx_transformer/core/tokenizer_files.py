"""The files of a vocabulary in a model's folder: tokenizer.json, or of two languages with one each

    source_tokenizer.json, target_tokenizer.json

each a plain tokenizer.json by itself. In memory both are one text, {"source": ..., "target": ...}: who only passes a
vocabulary on need not know which kind it is. Neither has the name by which other programs would take it for the
whole.
"""

from __future__ import annotations

import json
from pathlib import Path

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import parse_json, read_text

JOINT = "tokenizer.json"
SIDES = {"source": "source_tokenizer.json", "target": "target_tokenizer.json"}
NAMES = (JOINT, *SIDES.values())
DAMAGED = "the file is damaged or no tokenizer.json"

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
"""The first tokens of a vocabulary that this program learns; after them it has one for each byte."""
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256


def tokenizer_path(folder: Path) -> Path | None:
    """Return what `Tokenizer.load` takes: the file of a joint vocabulary, or the folder with two; None if there is
    neither.

    `UserError` for one of two, or for all three.
    """
    joint, sides = (folder / JOINT).is_file(), [(folder / name).is_file() for name in SIDES.values()]
    if any(sides) and (joint or not all(sides)):
        both = " and ".join(SIDES.values())
        raise UserError(f"{folder}: holds either {JOINT} or {both}: remove what doesn't belong to the model")
    return folder / JOINT if joint else folder if any(sides) else None


def read_tokenizer(path: Path) -> str:
    """Return the text of what `tokenizer_path` returned, or of a single file."""
    if not path.is_dir():
        return read_text(path)
    sides = {
        side: parse_json(read_text(path / name), f"{path / name}: not JSON", DAMAGED) for side, name in SIDES.items()
    }
    return json.dumps(sides, ensure_ascii=False)


def join_texts(source: str, target: str) -> str:
    """Return two vocabularies as one text."""
    return json.dumps({"source": json.loads(source), "target": json.loads(target)}, ensure_ascii=False)


def side_texts(text: str, origin: str = JOINT) -> dict[str, str] | None:
    """Return the texts of the two vocabularies; None for a joint one."""
    if not text.startswith('{"source"'):  # as `join_texts` begins: a joint one is parsed once
        return None
    values = parse_json(text, f"{origin}: not JSON", DAMAGED)
    if not isinstance(values, dict) or values.keys() != SIDES.keys():
        return None
    return {side: json.dumps(values[side], ensure_ascii=False, indent=1) + "\n" for side in SIDES}


def tokenizer_files(text: str) -> dict[str, str]:
    """Return {name: contents} of the files that hold a vocabulary."""
    sides = side_texts(text)
    return {JOINT: text} if sides is None else {SIDES[side]: each for side, each in sides.items()}
