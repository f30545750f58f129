"""Weights of cross-attention for pairs of texts, from either runtime: what `translate --alignment` is made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from mlx_transformer.generation.alignment import CrossWeights, alignment_layer

from .opening import Opened, open_model

ROWS = 16
"""Pairs computed together."""


def cross_weights(
    folder: Path, threads: int | None = None, precision: str | None = None, verify: bool = True
) -> CrossWeights:
    """The weights of the layer that `alignment_layer` chooses, from a model that is opened for it: each translation is
    read by it once, all its tokens at once. `UserError` as `open_model`."""
    runtime = None if precision is None else f"onnxruntime:cpu:all:{precision}"
    model = open_model(folder, runtime, threads, verify)

    def weights(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[NDArray]:
        found: list[NDArray] = [np.zeros((0, len(source)), np.float32) for source in sources]
        # Neighbours in length are computed together; nothing is written of an empty one.
        order = sorted((i for i, row in enumerate(targets) if row), key=lambda i: (len(sources[i]), len(targets[i])))
        for first in range(0, len(order), ROWS):
            rows = order[first : first + ROWS]
            of_rows = _weights(model, [sources[i] for i in rows], [targets[i] for i in rows])
            for i, each in zip(rows, of_rows, strict=True):
                found[i] = each[: len(targets[i]), : len(sources[i])]
        return found

    return weights


def _weights(model: Opened, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> NDArray:
    """(B, T, S), of the longest of them; padding is on the right."""
    config = model.config
    source, real = _padded(sources, config.pad_id)
    read, _ = _padded([[config.bos_id, *row[:-1]] for row in targets], config.eos_id)
    name = f"decoder.layers.{alignment_layer(config)}.cross_attention.weights"
    case = Case("pairs", source, None if real.all() else real, read, 1)
    return np.asarray(model.engine.points(case, [name])[name], np.float32).mean(axis=1)


def _padded(rows: Sequence[Sequence[int]], fill: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    lengths = np.array([len(row) for row in rows])
    real = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(real.shape, fill, np.int64)
    ids[real] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return ids, real
