"""What tests of Marian's files share: a folder's network, and three sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from export.validate.origin.marian import MarianNetwork, read_marian

SOURCES = [[5, 9, 3, 7, 0], [12, 0], [4, 4, 20, 21, 6, 28, 1, 0]]
TARGETS = [[6, 7, 22], [3, 3, 9], [25, 11, 2]]


def model_file(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.suffix in (".bin", ".npz") and "model" in path.name)


def network(folder: Path, **changes: Any) -> MarianNetwork:
    tensors, options = read_marian(model_file(folder))
    return MarianNetwork(tensors, {**options, **changes})
