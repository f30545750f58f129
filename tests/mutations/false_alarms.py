"""Random configs, weights and seeds that are equal by construction: `validate` must say so of every one.

make false-alarms runs 200: every target and precision, fixed int8 scales that cut much or little, each optimisation
level of ONNX Runtime, one thread and two, all the rows of a small model or as few as of a large one.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from options import OPTIONS, fitted
from random_models import write_model
from rich.console import Console

from export.precision.table import ACTIVATIONS, IN_BLOCKS, PRECISIONS
from export.validate import Report, compare
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import (
    INT8_SCALES,
    SIGNED,
    SYMMETRIC,
    Int8Scales,
    ProductScales,
    multiplied_names,
)
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.core.quantization import BITS, Scheme
from mlx_transformer.system.errors import UserError

LEVELS = ("all", "extended", "basic", "none")
TARGETS = ("portable", "cpu", "web", "cuda")
LOWER = [name for name in PRECISIONS if name != "float32"]
GROUP = 32
"""Of a checkpoint quantised for precision packed: the only size that divides models this narrow."""


def random_config(rng: np.random.Generator) -> TransformerConfig:
    """Any valid combination of options, small."""
    while True:
        heads = int(rng.choice([1, 2, 4]))
        values = {name: allowed[rng.integers(len(allowed))] for name, allowed in OPTIONS.items()}
        if rng.integers(4) == 0:  # more of those with both stacks
            values["architecture"] = "encoder-decoder"
        values |= dict(
            vocab_size=int(rng.integers(20, 90)),
            d_model=int(rng.choice([16, 32, 48])),
            d_ff=int(rng.integers(8, 80)),
            heads=heads,
            key_value_heads=int(rng.choice([k for k in (1, 2, 4) if heads % k == 0])),
            encoder_layers=int(rng.integers(1, 4)),
            decoder_layers=int(rng.integers(1, 4)),
            max_positions=int(rng.integers(20, 60)),
        )
        try:
            return TransformerConfig(**fitted(values))
        except UserError:
            continue


def random_options(config: TransformerConfig, rng: np.random.Generator) -> dict[str, Any]:
    """Of `export_onnx`: a target and what it takes."""
    target = str(rng.choice(TARGETS))
    # Sixteen bits are computed in on a GPU alone where the target is one.
    precision = str(rng.choice(LOWER)) if target != "cuda" and rng.integers(2) else "float32"
    if precision == "packed" and (config.d_model % GROUP or target == "web"):
        precision = "int8"
    chosen = {"activations": str(rng.choice(list(ACTIVATIONS)))} if precision in IN_BLOCKS else {}
    return {"target": target, "precision": precision, **chosen}


def fixed_scales(config: TransformerConfig, rng: np.random.Generator) -> Int8Scales:
    """Any range for the inputs of each product: whatever it cuts is part of the network."""
    ranges = {name: rng.uniform(0.5, 6.0) for name in sorted(multiplied_names(config))}
    products = {
        name: ProductScales(np.float32(SYMMETRIC / ranges[name]), int(rng.choice([SYMMETRIC, SIGNED])))
        for name in ranges
    }
    return Int8Scales({name: products.get(name, ProductScales()) for name in quantizable_shapes(config)})


def runs(count: int, seed: int) -> Iterator[tuple[TransformerConfig, str, Report]]:
    """(config, what else was chosen, report)"""
    rng = np.random.default_rng(seed)
    for i in range(count):
        config = random_config(rng)
        options = random_options(config, rng)
        level, threads = LEVELS[i % len(LEVELS)], 1 + i // len(LEVELS) % 2
        chosen = ["mlx", "reference", f"onnxruntime:cpu:{level}:{options.get('precision', 'float32')}"]
        with tempfile.TemporaryDirectory(prefix="false-alarms-") as folder:
            scheme = Scheme(GROUP, int(rng.choice(BITS))) if options.get("precision") == "packed" else None
            fixed = options.get("precision") == "int8" and rng.integers(2)
            texts = {INT8_SCALES: fixed_scales(config, rng).json()} if fixed else {}
            models = write_model(config, Path(folder), int(rng.integers(1 << 31)), scheme, texts=texts, **options)
            share = float(rng.choice([1.0, 0.4]))
            with patch.object(sys.modules[compare.__module__], "share_of", lambda config, share=share: share):
                report = compare(*models, chosen, int(rng.integers(1 << 31)), threads=threads)
            told = [
                *options.values(),
                *["fixed scales"] * bool(fixed),
                level,
                f"{threads} threads",
                f"{share:.0%} of the rows",
            ]
            yield config, ", ".join(told), report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console, alarms, nearest = Console(), 0, 0.0
    for i, (config, choices, report) in enumerate(runs(options.count, options.seed), 1):
        shares = [point.worst.share for point in report.points]
        nearest = max([nearest, *(share for share in shares if np.isfinite(share))])
        if not report.equal:
            alarms += 1
            console.print(f"{i}: {config}, {choices}, seed {report.seed}: {report.failures()[:2]}")
        elif i % 10 == 0:
            console.print(f"{i} of {options.count}: {alarms} alarms, nearest {nearest:.2f} of the budget")
    console.print(f"{alarms} false alarms in {options.count} runs; nearest {nearest:.2f} of the budget")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
