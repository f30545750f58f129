"""Tiny BERTs with heads, of random weights (`golden_encoders/`), and with a vocabulary of a few words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mlx_transformer.convert import import_huggingface

GOLDEN = Path(__file__).parents[1] / "mlx_transformer" / "families" / "golden_encoders"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"a good film was bad and so it is not ##s ##ing , .".split()]


def published(name: str, folder: Path, **changes: object) -> Path:
    """Write the folder as `transformers` has it, with these changes of its config.json."""
    shutil.copytree(GOLDEN / name, folder)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values |= dict(cls_token_id=2, sep_token_id=3, **changes)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    words = [*WORDS, *(f"word{i}" for i in range(values["vocab_size"] - len(WORDS)))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return folder


def head_model(name: str, folder: Path, **changes: object) -> Path:
    """Write it as a checkpoint, FOLDER/model."""
    assert import_huggingface(published(name, folder / "theirs", **changes), folder / "model") == []
    return folder / "model"
