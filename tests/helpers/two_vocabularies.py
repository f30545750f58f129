"""A run of seconds whose languages have nothing in common but the digits, and a vocabulary each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer

MODEL = {"preset": "tiny", "d_model": 32, "heads": 1, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1}
WORDS = {"source": ["alpha", "beta", "gamma"], "target": ["УНО", "ДОС", "ТРЕС", "КУАТРО"]}
LINES = ["alpha beta 7", "gamma gamma", "7 alpha beta gamma alpha 12"]


def write_text(folder: Path, count: int = 90) -> dict[str, str]:
    """Files of both languages; the target has more words, and so a larger vocabulary."""
    rng = np.random.default_rng(0)
    paths = {}
    for side, words in WORDS.items():
        lines = [" ".join([*rng.choice(words, rng.integers(1, 6)), str(i)]) for i in range(count)]
        (folder / side).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        paths[side] = str(folder / side)
    return paths


def recipe(folder: Path, data: dict[str, Any] | None = None, model: dict | None = None, **training: Any) -> Recipe:
    text = write_text(folder)
    given = {"separate_vocabularies": True, "vocab_size": 300, "batch_tokens": 256, **text, **(data or {})}
    values = {
        "steps": 3,
        "warmup_steps": 2,
        "cooldown": 0.0,
        "log_every": 1,
        "valid_sentences": 2,
        "valid_every": 1000,
        **training,
    }
    given = {key: value for key, value in given.items() if value is not None}
    return Recipe.from_dict({"data": given, "model": {**MODEL, **(model or {})}, "training": values})


def trained(folder: Path) -> Path:
    """FOLDER/run."""
    Trainer(recipe(folder, steps=40, learning_rate=5e-3, warmup_steps=10), folder / "run").run()
    return folder / "run"
