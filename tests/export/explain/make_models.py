"""Trains the three small models that the page of `explain` opens with, by their recipes, and writes them in float16:

PYTHONPATH=.:docs:tests/helpers python tests/export/explain/make_models.py [training | RUN ...]

RUN: the folder of a finished run of a recipe of that name, which is taken as it is. Five minutes on a CPU core without.
training: only what the page tells of a training, that of row 26 of the claims; seconds.
Which head looks where depends on the seed and on the machine's rounding: test_shipped.py says then what has changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from claims import stacks
from imports import ROOT

from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.system.manifest import CARD

NAMES = ("sentences", "sentences-decoder", "sentences-encoder")
SHIPPED = ROOT / "export/explain/models"
TRAINING = ROOT / "export/explain/walk/training.json"


def trained(name: str, folder: Path) -> Path:
    """The model of a recipe, trained into a folder."""
    from mlx_transformer.training.recipe import load_recipe
    from mlx_transformer.training.trainer import Trainer

    return Trainer(load_recipe(name, {}), folder / name).run().model


def write_half(model: Path, folder: Path) -> None:
    """The same checkpoint with its numbers rounded to float16."""
    checkpoint = open_checkpoint(model)
    half = {name: array.astype(np.float16) for name, array in checkpoint.tensors()}
    save_checkpoint(folder, checkpoint.config, half, checkpoint.tokenizer_json())
    (folder / CARD).unlink()


def make(runs: Mapping[str, Path]) -> None:
    with tempfile.TemporaryDirectory() as place:
        for name in NAMES:
            model = runs[name] / "model" if name in runs else trained(name, Path(place))
            write_half(model, SHIPPED / name)


def write_training() -> None:
    TRAINING.write_text(json.dumps(stacks.training_shown()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_training()
    if sys.argv[1:] != ["training"]:
        make({Path(run).name: Path(run) for run in sys.argv[1:]})
