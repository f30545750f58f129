"""A student that is trained in seconds, on phrases of the built-in corpus: it translates some of them."""

from __future__ import annotations

from pathlib import Path

from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer

RECIPE = {
    "data": {
        "corpus": "cldr:en-de",
        "train_pairs": 3000,
        "vocab_size": 400,
        "vocab_model": "unigram",
        "batch_tokens": 500,
    },
    "model": {"preset": "student", "d_model": 64, "heads": 2, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 1},
    "training": {"steps": 240, "learning_rate": 5e-3, "label_smoothing": 0.0, "valid_sentences": 0, "valid_every": 999},
}


def train_student(folder: Path, steps: int = 240) -> Path:
    """The run in a new folder; a hundred steps are enough for scales."""
    Trainer(Recipe.from_dict(RECIPE | {"training": RECIPE["training"] | {"steps": steps}}), folder).run()
    return folder
