"""A training run of seconds on plain text: lines of counted digits, one stack alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer

SIZES: dict[str, Any] = {"preset": "tiny", "d_model": 16, "heads": 1, "d_ff": 32}
LAYERS = {
    "language-model": {"decoder_layers": 1},
    "masked-language-model": {"encoder_layers": 1},
    "denoising": {"encoder_layers": 1, "decoder_layers": 1},
}


def write_text(folder: Path, count: int = 150) -> Path:
    """Lines that count on from a digit: "3 4 5 6 7"."""
    path = folder / "text.txt"
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 10, count)
    lines = [" ".join(str((start + i) % 10) for i in range(rng.integers(4, 9))) for start in starts]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def recipe(folder: Path, objective: str, model: dict | None = None, data: dict | None = None, **training) -> Recipe:
    """Dropout is on."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(folder)
    tables = {
        "data": {"text": str(text), "vocab_size": 270, "batch_tokens": 128, "max_length": 32, **(data or {})},
        "model": {**SIZES, **LAYERS[objective], **(model or {})},
        "training": {"objective": objective, "steps": 4, "log_every": 1, "valid_every": 1000, "cooldown": 0}
        | {"learning_rate": 1e-2, "warmup_steps": 1, **training},
    }
    return Recipe.from_dict(tables)


def train(folder: Path, objective: str, name: str = "run", resume: bool = False, **options) -> Any:
    return Trainer(recipe(folder, objective, **options), folder / name, resume).run()
