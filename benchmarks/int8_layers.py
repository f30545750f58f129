"""What each layer of an encoder costs in int8, and what it costs to leave some in float32: neighbours, size, speed.

    python benchmarks/int8_layers.py CHECKPOINT --text FILE --folder FOLDER [--lines 400] [--rounds 3]

The first table is `export/package/layers.py`'s measurement. The second takes layers to float32 in its order, the
costliest for its size first. Neighbours: share of each line's ten nearest that stay among them. Speed: lines a second
of target cpu's package, one thread, the process's time, in turns with float32's; the median of the rounds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from export import OnnxTransformer, export_onnx
from export.package.layers import Encoders, measured
from export.package.plan import Plan
from export.package.quality import Text
from export.settings import ExportSettings
from mlx_transformer.data.corpus import read_lines

BATCHES = (8, 64)


def seconds(model: OnnxTransformer, lines: list[str], batch: int) -> float:
    began = time.process_time()
    for i in range(0, len(lines), batch):
        model.embed(lines[i : i + batch])
    return time.process_time() - began


def ratios(folder: Path, texts: list[str], rounds: int, precisions: dict[str, Path]) -> dict[str, list[float]]:
    """Return for each package how many times as fast as float32 it is, by the size of batches."""
    wide = OnnxTransformer(folder, threads=1)
    models = {name: OnnxTransformer(place, threads=1, precision="int8") for name, place in precisions.items()}
    found: dict[str, list[float]] = {name: [] for name in models}
    for batch in BATCHES:
        each: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(rounds):
            before = seconds(wide, texts, batch)
            for name, model in models.items():
                each[name].append(before / seconds(model, texts, batch))
        for name, values in each.items():
            found[name].append(median(values))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="one text a line")
    parser.add_argument("--folder", type=Path, required=True, help="for the packages; must not be there")
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timed", type=int, default=200, help="lines that are timed")
    options = parser.parse_args()
    lines = [line for line in read_lines(options.text) if line.strip()][: options.lines]
    plan = Plan.of(options.checkpoint, ExportSettings(precision=["int8"]))
    _, found = measured(plan, None, Text(lines, None, options.text.name))
    assert found is not None
    print("\n".join(found.lines()), flush=True)
    order = found.order(plan.config)
    mixes = [order[:count] for count in range(len(order))]
    moved = list(Encoders(plan, lines, list(found.each)).moved(mixes))
    wide = export_onnx(options.checkpoint, options.folder / "float32", target="cpu")
    places = {
        str(count): export_onnx(
            options.checkpoint, options.folder / str(count), target="cpu", precision="int8", float32_layers=mix
        )
        for count, mix in enumerate(mixes)
    }
    speeds = ratios(wide, lines[: options.timed], options.rounds, places)
    print("\n| in float32 besides | neighbours | moved | MB | speed, batches of 8, of 64 |\n|-|-|-|-|-|")
    for count, (mix, each) in enumerate(zip(mixes, moved, strict=True)):
        size = sum(file.stat().st_size for file in (places[str(count)] / "onnx").iterdir()) / 1e6
        speed = ", ".join(f"{ratio:.2f}" for ratio in speeds[str(count)])
        print(f"| {mix[-1] if mix else 'none'} | {each.neighbours:.2%} | {each.distance:.4f} | {size:.1f} | {speed} |")


if __name__ == "__main__":
    main()
