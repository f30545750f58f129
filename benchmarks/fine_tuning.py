"""Fine-tuning: what a model of five kinds of phrases gains on five others, all of it or an adapter, beside a new model.

    python benchmarks/fine_tuning.py --folder /tmp/fine-tuning

The kinds of the built-in corpus are cut in two halves. A model of the first half goes on with the second: all weights,
LoRA or DoRA, as many steps as a model that knows nothing gets. Each (with its adapter merged, as `train` leaves it) is
exported, proven by `validate`, and judged by exact match on held-out phrases of both halves, decoded greedily by the
ONNX graphs.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from mlx_transformer.data.built_in import build
from mlx_transformer.system.machine import usable_cores
from mlx_transformer.system.tensors import read_tensors

HALVES = {
    "first": ("date", "interval", "number", "currency", "territory"),
    "second": ("time", "relative", "unit", "list", "language"),
}
PROGRAM = [sys.executable, "-m", "mlx_transformer"]


@dataclass(frozen=True)
class Way:
    """How one model is trained: flags of `train` but for text, steps and folder."""

    name: str
    half: str
    flags: tuple[str, ...]
    from_base: bool = True


# The better of a few that were tried by hand, for 100 and 150 steps; what isn't here is train's own.
ADAPTER = ("--adapter-rank", "32", "--adapter-alpha", "64", "--adapter-targets", "*", "--learning-rate", "1e-2")
NEW = ("--preset", "tiny", "--vocab-size", "2000")
BASE = Way("model of the first half", "first", NEW, from_base=False)
WAYS = (
    Way("new model", "second", NEW, from_base=False),
    Way("all weights", "second", ("--optimizer", "muon")),
    Way("LoRA", "second", ("--adapter", "lora", *ADAPTER)),
    Way("DoRA", "second", ("--adapter", "dora", *ADAPTER)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="new or empty, for text and models")
    parser.add_argument("--base-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"--folder {options.folder}: holds files already; name a new folder")
    corpus = build("cldr:en-de", seed=options.seed)
    for half, kinds in HALVES.items():
        (options.folder / half).mkdir(parents=True)
        for name, text in (("train", corpus.train), ("heldout", corpus.held_out)):
            of_half = text.select([i for i, kind in enumerate(text.kinds or []) if kind in kinds])
            of_half.write(*(options.folder / half / f"{name}.{side}" for side in ("en", "de")))
    rows = [judged(options, BASE, options.base_steps)]
    rows += [judged(options, way, options.steps) for way in WAYS]
    print(f"\n{usable_cores()} cores, {platform.machine()}, {date.today()}")
    print("; ".join(f"{half} half: {', '.join(kinds)}" for half, kinds in HALVES.items()) + "\n")
    print("| | trained on | steps | weights trained | seconds | exact match, first half | second half | validate |")
    print("|-|-|-|-|-|-|-|-|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def judged(options: argparse.Namespace, way: Way, steps: int) -> list[str]:
    """A row of the table: one model trained, exported, proven, and asked for both halves."""
    folder = options.folder / way.name.replace(" ", "-")
    base = options.folder / BASE.name.replace(" ", "-")
    source, target = (str(options.folder / way.half / f"train.{side}") for side in ("en", "de"))
    begin = time.monotonic()
    start = ["--from", str(base)] if way.from_base else []
    train = ["train", "--source", source, "--target", target, "--steps", str(steps), "--out", str(folder)]
    call(*train, *start, *way.flags, "--seed", str(options.seed))
    seconds = time.monotonic() - begin
    onnx = folder / "onnx"
    call("export", str(folder), str(onnx))
    proof = subprocess.run([*PROGRAM, "validate", str(folder), str(onnx)], capture_output=True, text=True)
    scores = [f"{exact_match(options.folder / half, onnx):.1f} %" for half in HALVES]
    proven = "equal" if proof.returncode == 0 else f"exit status {proof.returncode}"
    return [way.name, f"{way.half} half", str(steps), f"{weights_trained(folder):,}", f"{seconds:.0f}", *scores, proven]


def weights_trained(run: Path) -> int:
    """Numbers in what a run trained: a model, or an adapter alone."""
    folder = run / "adapter" if (run / "adapter").exists() else run / "model"
    (file,) = folder.glob("*.safetensors")
    return sum(array.size for array in read_tensors(file).values())


def exact_match(text: Path, onnx: Path) -> float:
    done = call("evaluate", str(onnx), "--source", str(text / "heldout.en"), "--reference", str(text / "heldout.de"))
    return json.loads(done)["exact_match"]


def call(*arguments: str) -> str:
    done = subprocess.run([*PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"mlx-transformer {' '.join(arguments)}: exit status {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
