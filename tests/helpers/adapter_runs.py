"""A model of seconds that has learned to copy digits, from one half of made-up pairs, and runs that teach it to count
one up, from the other half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.device import deciding_as
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer

SIZES = {"preset": "tiny", "d_model": 32, "heads": 1, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 1}
BASES = ["float32", "4 bits"]


def write_half(folder: Path, half: int, count: int = 400) -> dict[str, str]:
    """Made-up pairs: 2 to 6 digits; of half 0 the target is a copy, of half 1 every digit is the next."""
    rng = np.random.default_rng(half)
    lines = [rng.integers(0, 10, rng.integers(2, 7)) for _ in range(count)]
    paths = {"source": folder / f"half{half}.source", "target": folder / f"half{half}.target"}
    for path, numbers in zip(paths.values(), (lines, [(line + half) % 10 for line in lines]), strict=True):
        path.write_text("".join("".join(map(str, line)) + "\n" for line in numbers), encoding="utf-8")
    return {name: str(path) for name, path in paths.items()}


def write_bases(folder: Path) -> dict[str, Path]:
    """The checkpoints of `BASES`, the second made of the first by `quantize`; and the text of both halves."""
    data = {**write_half(folder, 0), "vocab_size": 260, "batch_tokens": 256}
    training = {"steps": 150, "warmup_steps": 40, "log_every": 10, "valid_sentences": 0, "valid_every": 1000}
    model = {**SIZES, "dropout": 0.0}
    with deciding_as("cpu"):  # whose batches hold twice the lines: the same model wherever it is adapted
        first = Trainer(Recipe.from_dict({"data": data, "model": model, "training": training}), folder / "first").run()
    quantize_checkpoint(first.model, folder / "integers", Scheme(32, 4))
    write_half(folder, 1)
    return {"float32": first.model, "4 bits": folder / "integers"}


def adapting(base: Path, out: Path, resume: bool = False, **training: Any) -> Trainer:
    """A run of `OUT`, by default LoRA of rank 4 on all linear maps, on the other half."""
    folder = next(folder for folder in base.parents if (folder / "half1.source").exists())
    data = {"source": str(folder / "half1.source"), "target": str(folder / "half1.target"), "batch_tokens": 256}
    defaults = {"adapter": "lora", "adapter_rank": 4, "adapter_targets": "*", "start_from": str(base)}
    defaults |= {"learning_rate": 1e-2, "warmup_steps": 5, "cooldown": 0.0, "label_smoothing": 0.0}
    defaults |= {"steps": 6, "log_every": 1, "valid_sentences": 0, "valid_every": 1000}
    values = {key: value for key, value in {**defaults, **training}.items() if value is not None}
    return Trainer(Recipe.from_dict({"data": data, "training": values}), out, resume)
