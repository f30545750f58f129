"""Average the weights of several checkpoints of a run, e.g. its last 5 or 20 as in the paper (section 6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.checkpoint import CHECKPOINT, Checkpoint, open_checkpoint, resolve, save_checkpoint
from mlx_transformer.core.outputs import claim
from mlx_transformer.generation.settings import files_with_weights, read_settings
from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import checked_tokenizer


def averaged(checkpoints: Sequence[Checkpoint]) -> dict[str, NDArray]:
    """The mean of each parameter, summed in float64, in the type of the first. Raises `UserError` if the configs
    differ."""
    first, *others = checkpoints
    for other in others:
        if other.config != first.config:
            raise UserError(f"{other.folder}: its config differs from that of {first.folder}; no average makes sense")
    means = {}
    for name in first.names():
        begin = first.tensor(name)
        total = begin.astype(np.float64)
        for other in others:
            total += other.tensor(name)
        means[name] = (total / len(checkpoints)).astype(begin.dtype)
    return means


def average_checkpoints(folders: Sequence[str | Path], out: Target, force: bool = False) -> Path:
    """Write the average of two or more checkpoints to the folder `out`; return its path.

    out: new or empty, or with `force` another checkpoint, which is replaced. Raises `UserError` if the checkpoints
    differ in config or tokenizer, or if `out` is one of them.
    """
    if len(folders) < 2:
        problem = f"{folders[0]}: is one checkpoint" if folders else "nothing to average"
        raise UserError(f"{problem}: give two or more of one run")
    output = claim(out, CHECKPOINT, force, *(resolve(folder) for folder in folders))
    opened = [open_checkpoint(folder) for folder in folders]
    texts = [checked_tokenizer(checkpoint) for checkpoint in opened]
    for checkpoint, text in zip(opened, texts, strict=True):
        if text != texts[0]:
            raise UserError(f"{checkpoint.folder}: its tokenizer.json differs from that of {opened[0].folder}")
    weights = averaged(opened)
    first = opened[0]
    own = files_with_weights(read_settings(first.folder, first.config), first.folder)
    return save_checkpoint(output, first.config, weights, texts[0], **own)
