"""Text that is larger than memory: time to the first batch and peak memory, of a first and a second start.

    python benchmarks/large_text.py --source train.en --target train.de --pairs 10000000 --folder /tmp/large

Makes the text by repeating the pairs of two files, each time with two words exchanged for others of the text. Each
start is a process of its own; the cache is empty at first. It trains the preset tiny for some steps, once in one piece,
once stopped and resumed, which must give the same weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np

from mlx_transformer.system.machine import usable_cores

STEPS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True, help="for text, cache and runs, which are replaced")
    parser.add_argument("--vocab-lines", type=int, default=200_000)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options, *options.worker)))
        return
    for name in ("cache", "first", "second"):
        shutil.rmtree(options.folder / name, ignore_errors=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    make_text(options)
    found = {}
    for label, run, part in (
        ("first start", "first", "whole"),
        ("second start", "second", "begin"),
        ("resumed", "second", "go on"),
    ):
        command = [sys.executable, *sys.argv, "--worker", run, part]
        found[label] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert found["first start"]["weights"] == found["resumed"]["weights"], "resumed otherwise than in one piece"
    size = sum(path.stat().st_size for path in text_files(options)) / 1e6
    print(f"\n{options.pairs:,} pairs, {size:,.0f} MB; {usable_cores()} cores, {platform.machine()}, {date.today()}\n")
    print("| | first batch after, s | peak memory at the first batch, MB | after training, MB |\n|-|-|-|-|")
    for label, one in found.items():
        print(f"| {label} | {one['seconds']:.1f} | {one['begun']:,.0f} | {one['peak']:,.0f} |")


def text_files(options: argparse.Namespace) -> list[Path]:
    return [options.folder / f"{options.pairs}.{side}" for side in ("source", "target")]


def make_text(options: argparse.Namespace) -> None:
    random = np.random.default_rng(1)
    for given, path in zip((options.source, options.target), text_files(options), strict=True):
        lines = [line.split() for line in given.read_text(encoding="utf-8").splitlines()]
        words = [word for line in lines for word in line]
        with path.open("w", encoding="utf-8") as file:
            for begin in range(0, options.pairs, len(lines)):
                chosen = random.integers(0, len(words), (len(lines), 2)).tolist()
                part = []
                for line, (first, second) in zip(lines[: options.pairs - begin], chosen, strict=False):
                    place = first % max(1, len(line) - 1)
                    part.append(" ".join([*line[:place], words[first], words[second], *line[place + 2 :]]))
                file.write("\n".join(part) + "\n")
    time.sleep(2.5)  # digests of files that were just written aren't kept


def work(options: argparse.Namespace, run: str, part: str) -> dict[str, float | str]:
    begin = time.perf_counter()
    from mlx_transformer.training.recipe import Recipe
    from mlx_transformer.training.trainer import Trainer

    source, target = map(str, text_files(options))
    data = {"source": source, "target": target, "cache": str(options.folder / "cache")}
    data |= {"vocab_lines": options.vocab_lines}
    training = {"steps": STEPS // 2 if part == "begin" else STEPS, "valid_sentences": 2, "valid_every": 1_000_000}
    training |= {"warmup_steps": 4, "cooldown": 0.0}
    recipe = Recipe.from_dict({"data": data, "model": {"preset": "tiny"}, "training": training})
    trainer = Trainer(recipe, options.folder / run, resume=part == "go on")
    next(trainer.batches.from_step(0))
    seconds, begun = time.perf_counter() - begin, peak()
    result = trainer.run()
    from mlx_transformer.core.checkpoint import weights_digest

    return {"seconds": seconds, "begun": begun, "peak": peak(), "weights": weights_digest(result.model)}


def peak() -> float:
    """MB of memory that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


if __name__ == "__main__":
    main()
