"""What tests of Marian's files share: a folder's network, and its numbers on three sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from marian_network import MarianNetwork, State

from mlx_transformer.families.marian_files.conversion import read_model
from mlx_transformer.families.marian_files.options import parse_options

SOURCES = [[5, 9, 3, 7, 0], [12, 0], [4, 4, 20, 21, 6, 28, 1, 0]]
TARGETS = [[6, 7, 22], [3, 3, 9], [25, 11, 2]]


def model_file(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.suffix in (".bin", ".npz") and "model" in path.name)


def network(folder: Path, **changes: Any) -> MarianNetwork:
    *items, options = read_model(model_file(folder))
    values = {**parse_options(options.text(), "here"), **changes}
    return MarianNetwork({item.name: item for item in items}, values)


def forced(judge: MarianNetwork, source: list[int], target: list[int]) -> np.ndarray:
    """(T+1, V): logits after the start, and after each token of the target."""
    state = State(judge.encode(source))
    return np.stack([judge.step(state, token) for token in [None, *target]])
