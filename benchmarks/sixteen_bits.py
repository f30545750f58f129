"""What sixteen bits cost in quality: the quickstart trained in float32, bfloat16 and float16, equal steps and seed.

    python benchmarks/sixteen_bits.py --folder /tmp/sixteen-bits [--steps 2700] [--precisions float32 bfloat16 float16]

MLX's CPU backend multiplies numbers of sixteen bits tens of times slower than those of float32. On a CPU the factors,
which are of sixteen bits, are therefore multiplied in float32 and the product is rounded once, as GPUs do; all else is
computed as `train` does. The models are judged on the 1000 phrases held out, decoded greedily.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from mlx_transformer.system.machine import usable_cores
from mlx_transformer.training.data import load_data
from mlx_transformer.training.recipe import load_recipe

PRECISIONS = ("float32", "bfloat16", "float16")
HELD_OUT = ("heldout.en", "heldout.de")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="new or empty, for the runs")
    parser.add_argument("--steps", type=int, default=2700, help="more than the quickstart's own")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS[:2])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", choices=PRECISIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"--folder {options.folder}: holds files already; name a new folder")
    data = load_data(load_recipe("quickstart", {"training": {"seed": options.seed}}))
    assert data.held_out is not None
    options.folder.mkdir(parents=True, exist_ok=True)
    data.held_out.write(*(options.folder / name for name in HELD_OUT))
    rows = [judged(options, precision) for precision in options.precisions]
    print(f"\n{options.steps} steps, seed {options.seed}", end="; ")
    print(f"{usable_cores()} cores, {platform.machine()}, {date.today()}\n")
    print("| precision | last validation loss | exact match | BLEU | seconds |\n|-|-|-|-|-|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def judged(options: argparse.Namespace, precision: str) -> list[str]:
    """A row of the table."""
    begin = time.monotonic()
    given = ["--steps", str(options.steps), "--seed", str(options.seed), "--folder", str(options.folder)]
    call(__file__, *given, "--worker", precision)
    seconds = time.monotonic() - begin
    run = options.folder / precision
    source, reference = (str(options.folder / name) for name in HELD_OUT)
    judge = ["-m", "mlx_transformer", "evaluate", str(run), "--source", source, "--reference", reference]
    scores = json.loads(call(*judge))
    with open(run / "metrics.jsonl", encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines]
    loss = [entry["loss"] for entry in entries if entry["kind"] == "valid"][-1]
    return [precision, f"{loss:.3f}", f"{scores['exact_match']:.1f} %", f"{scores['bleu']:.1f}", f"{seconds:.0f}"]


def call(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: exit status {done.returncode}")
    return done.stdout


def work(options: argparse.Namespace) -> None:
    """Train one precision."""
    import mlx.core as mx

    from mlx_transformer.cli import main as program

    if mx.default_device().type == mx.DeviceType.cpu:
        multiply_as_gpus_do(mx)
    given = {"steps": options.steps, "seed": options.seed, "precision": options.worker}
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    program(["train", "quickstart", *flags, "--out", str(options.folder / options.worker)])


def multiply_as_gpus_do(mx: Any) -> None:
    """Products of sixteen-bit numbers in float32, rounded once."""
    product, attention = mx.array.__matmul__, mx.fast.scaled_dot_product_attention

    def low(*factors: Any) -> bool:
        return any(factor.dtype in (mx.bfloat16, mx.float16) for factor in factors)

    def matmul(a: Any, b: Any) -> Any:
        if not low(a, b):
            return product(a, b)
        return product(a.astype(mx.float32), b.astype(mx.float32)).astype(mx.result_type(a, b))

    def addmm(c: Any, a: Any, b: Any) -> Any:
        if not low(a, b):
            return product(a, b) + c
        return (product(a.astype(mx.float32), b.astype(mx.float32)) + c).astype(mx.result_type(a, b, c))

    def fused(q: Any, k: Any, v: Any, **options: Any) -> Any:
        if not low(q, k, v):
            return attention(q, k, v, **options)
        return attention(*(each.astype(mx.float32) for each in (q, k, v)), **options).astype(q.dtype)

    mx.array.__matmul__, mx.matmul, mx.addmm = matmul, matmul, addmm
    mx.fast.scaled_dot_product_attention = fused


if __name__ == "__main__":
    main()
