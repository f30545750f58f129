"""Adapters with random arrays, alone or beside the integers of a small checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from quantized_models import wide
from random_models import random_weights

from mlx_transformer.convert.merge import keep_adapter
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.adapter import Adapter, AdapterConfig, linear_maps
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint, weights_digest
from mlx_transformer.core.quantization import Scheme


def made(base, kind="lora", targets=None, size=0.1, **options):
    """An adapter of a checkpoint with random arrays."""
    config = open_checkpoint(base).config
    values = {"rank": 3, "alpha": 6.0, "base": weights_digest(open_checkpoint(base).folder), **options}
    described = AdapterConfig(kind=kind, targets=tuple(targets or linear_maps(config)), **values)
    rng = np.random.default_rng(3)
    shapes = described.shapes(config)
    arrays = {name: (size * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    arrays |= {name: np.abs(array) + 1 for name, array in arrays.items() if name.endswith(".magnitude")}
    return Adapter(described, arrays)


def kept(folder: Path, kind: str, scheme: Scheme, alpha: float = 5.0, **changes) -> Path:
    """FOLDER/kept, of which FOLDER/base, FOLDER/integers and FOLDER/adapter are the parts."""
    save_checkpoint(folder / "base", wide(**changes), random_weights(wide(**changes), 3), force=True)
    quantize_checkpoint(folder / "base", folder / "integers", scheme)
    made(folder / "integers", kind, alpha=alpha).write(folder / "adapter")
    keep_adapter(folder / "integers", folder / "adapter", folder / "kept")
    return folder / "kept"
