"""What each layer of an encoder costs in int8, and what it costs to leave some in float32: neighbours, size, speed.

    python benchmarks/int8_layers.py CHECKPOINT --text FILE --folder FOLDER [--lines 400] [--rounds 3]

The first table is `export/package/layers.py`'s measurement. The second has what is left in float32 so that so many
neighbours stay, as `--least-neighbours` chooses it. Neighbours: share of each line's ten nearest that stay among them,
on those lines and on as many that nobody has chosen by. Speed: of target cpu's package, one thread, the process's time,
in turns with float32's and with that of all in int8; the least of the rounds of each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from export import OnnxTransformer, export_onnx
from export.package.layers import EACH, Encoders, costliest, fewest, matrices_of, measured
from export.package.plan import Plan
from export.package.quality import Text
from export.settings import ExportSettings
from mlx_transformer.data.corpus import read_lines

BATCHES = (8, 64)
SHARES = (0.96, 0.97, 0.98, 0.99, 0.995)


def seconds(model: OnnxTransformer, lines: list[str], batch: int) -> float:
    began = time.process_time()
    for i in range(0, len(lines), batch):
        model.embed(lines[i : i + batch])
    return time.process_time() - began


def speeds(folder: Path, texts: list[str], rounds: int, packages: dict[str, Path]) -> dict[str, list[float]]:
    """Return for each package how many times as fast as float32 it is, by the size of batches."""
    models = {name: OnnxTransformer(place, threads=1, precision="int8") for name, place in packages.items()}
    wide = OnnxTransformer(folder, threads=1)
    found: dict[str, list[float]] = {name: [] for name in models}
    for batch in BATCHES:
        rows = [[seconds(model, texts, batch) for model in (wide, *models.values())] for _ in range(rounds)]
        before, *after = map(min, zip(*rows, strict=True))
        for name, least in zip(models, after, strict=True):
            found[name].append(before / least)
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
    every = [line for line in read_lines(options.text) if line.strip()]
    lines, others = every[: options.lines], every[options.lines : 2 * options.lines]
    plan = Plan.of(options.checkpoint, ExportSettings(precision=["int8"]))
    _, found = measured(plan, None, Text(lines, None, options.text.name))
    assert found is not None
    print("\n".join(found.lines()), flush=True)
    matrices = matrices_of(plan, found.each)
    order = costliest(plan, lines[::EACH], matrices)
    print(f"\ncostliest first: {', '.join(order)}", flush=True)
    encoders = Encoders(plan, lines, matrices)
    mixes = {"all int8": []} | {f"{share:g}": fewest(encoders, order, share)[0] for share in SHARES}
    moved = dict(zip(mixes, encoders.moved(list(mixes.values())), strict=True))
    unseen = dict(zip(mixes, Encoders(plan, others, matrices).moved(list(mixes.values())), strict=True))
    wide = export_onnx(options.checkpoint, options.folder / "float32", target="cpu")
    packages = {
        name: export_onnx(options.checkpoint, options.folder / name, target="cpu", precision="int8", float32_layers=mix)
        for name, mix in mixes.items()
    }
    fast = speeds(wide, lines[: options.timed], options.rounds, packages)
    print("\n| asked for | in float32 | neighbours | of unseen lines | moved | MB | speed, batches of 8, of 64 |")
    print("|-|-|-|-|-|-|-|")
    for name, mix in mixes.items():
        size = sum(file.stat().st_size for file in (packages[name] / "onnx").iterdir()) / 1e6
        speed = ", ".join(f"{ratio:.2f}" for ratio in fast[name])
        kept = f"{moved[name].neighbours:.2%} | {unseen[name].neighbours:.2%} | {moved[name].distance:.4f}"
        print(f"| {name} | {len(mix)} of {len(matrices)} | {kept} | {size:.1f} | {speed} |")


if __name__ == "__main__":
    main()
