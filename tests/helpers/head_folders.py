"""Tiny BERTs with heads as `transformers` has them, of random weights (`golden_encoders/`), and with a vocabulary of a
few words. Needs none of our packages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "mlx_transformer" / "families" / "golden_encoders"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"a good film was bad and so it is not ##s ##ing , .".split()]
LABELS = {"0": "I-X", "1": "B-X", "2": "O"}
"""Of the model that tags."""


def published(name: str, folder: Path, **changes: object) -> Path:
    """Write the folder as `transformers` has it, with these changes of its config.json."""
    shutil.copytree(GOLDEN / name, folder)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values |= dict(cls_token_id=2, sep_token_id=3, **changes)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    words = [*WORDS, *(f"word{i}" for i in range(values["vocab_size"] - len(WORDS)))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return folder
