"""Translation speed beside CTranslate2, Optimum and PyTorch, on the same weights and sentences, in one run.

    python benchmarks/translate.py --peers-python .venv-peers/bin/python >> benchmarks/RESULTS.md
    python benchmarks/translate.py --engines ct2:int8 ours:cpu:int8 --sizes base --cells b1 b8x4
    python benchmarks/translate.py --trained runs/multi30k/model --text test.en --reference test.de
    python benchmarks/translate.py --peers-python PEERS --sizes bart-base t5-base nllb-600m --cells b1 b8 b1x4 b8x4 \\
        --rounds 2 --engines ct2:float32 ct2:float32:2x1 ct2:int8 ct2:int8:2x1 optimum:float32 optimum:int8 \\
        ours:cpu:float32 ours:cpu:int8

Each engine is a process of its own, stopped while another one works; they take turns cell by cell and round by round,
and ratios are medians over rounds of the ratio within a round. Without `--trained`: models with random weights, those
of Marian or in the published sizes of BART, T5 and NLLB, 64 sources of 8 to 30 tokens, outputs forced to 32 tokens, of
which a cell of small batches translates fewer. With it: a trained checkpoint on real text, which ends its outputs
itself. The peers (ctranslate2, torch, transformers, optimum-onnx, onnxruntime) are in an interpreter of their own. An
engine that can't be run is named, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np
from engines import DEFAULTS, EngineName, parse, tables
from engines.floor import BYTES, Shape
from engines.measure import Cell, Measured, Task, measure, teach
from engines.models import Preparation, PreparationError
from engines.prepare import PUBLISHED
from engines.process import EngineError, Worker

SENTENCES = {1: 12, 8: 32, 32: 64}
OF_PUBLISHED = {1: 2, 8: 8, 32: 32}
"""How many sentences a cell translates, by the size of its batches; of models in published sizes, which are larger."""
LENGTH = 32


def main() -> int:
    options = arguments()
    try:
        engine_names = {text: parse(text) for text in options.engines}
        cells = [Cell.parse(text) for text in options.cells]
    except ValueError as error:
        print(f"translate.py: {error}", file=sys.stderr)
        return 2
    print(f"\n## Translation\n\n{described(options)}\n")
    complete = True
    for name in ["trained"] if options.trained else options.sizes:
        complete &= compare(name, engine_names, cells, options)
    return 0 if complete else 1


def compare(size: str, engine_names: dict[str, EngineName], cells: list[Cell], options: argparse.Namespace) -> bool:
    """Measure and print one model; false if an engine could not be."""
    preparation = Preparation(options.models / size, options.peers_python)
    text = None
    if options.trained:
        preparation.from_checkpoint(options.trained)
        text = Text(options.trained, options.text, options.reference, options.sentences)
        task = Task(text.sources, None, {1: min(100, len(text.sources))})
    else:
        preparation.random(size)
        task = Task(random_sources(preparation.published), LENGTH, OF_PUBLISHED if size in PUBLISHED else SENTENCES)
    workers: dict[str, Worker] = {}
    failed: dict[str, str] = {}
    try:
        for name, engine_name in engine_names.items():
            try:
                folder = preparation.folder(engine_name)
                python = options.peers_python if engine_name.is_peer else sys.executable
                workers[name] = Worker(engine_name, python, folder, options.threads, options.clock)
            except (EngineError, PreparationError) as error:
                failed[name] = str(error)
        results, broken = measure(workers, task, cells, options.rounds)
        failed |= broken
        reference = next((n for n in ["torch:float32", "ct2:float32", *engine_names] if n in results), None)
        if reference and task.length:
            inexact = [name for name in results if engine_names[name].precision != "float32"]
            for name, share in teach(workers, reference, inexact, task).items():
                results[name].taught = share
    finally:
        for worker in workers.values():
            worker.close()
    print(f"### {size}\n")
    if reference:
        report(results, reference, cells, engine_names, preparation, task, text, options)
    for name, reason in failed.items():
        print(f"Not measured: {name}: {reason}\n")
    if options.json:
        with options.json.open("a") as file:
            print(json.dumps({"model": size, **as_json(results)}), file=file)
    return not failed


def report(results, reference, cells, engine_names, preparation, task, text, options) -> None:  # type: ignore[no-untyped-def]
    shape = Shape.of(preparation.published)
    precisions = sorted({engine_names[name].precision for name in results} & set(BYTES))
    rates = {precision: floor_rates(preparation.published, options.threads, precision) for precision in precisions}
    bleu = (
        {name: text.bleu(result, cells, task) for name, result in results.items()} if text and text.references else None
    )
    parts = [
        tables.speeds(results, cells, task),
        tables.ratios(results, cells, engine_names),
        tables.properties(results, cells, reference, bleu),
        tables.floors(results, cells, engine_names, shape, rates, task),
    ]
    print("\n\n".join("\n".join(part) for part in parts if part), end="\n\n")
    for precision, rate in rates.items():
        gemm, bandwidth = rate["gemm"] / 1e9, rate["bandwidth"] / 1e9
        print(f"{precision}: GEMM {gemm:.0f} G operations/s, reading a step's weights {bandwidth:.0f} GB/s.")
    print()


def floor_rates(published: Path, threads: int, precision: str) -> dict[str, float]:
    command = [sys.executable, "-m", "engines.floor", str(published), str(threads), precision]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


class Text:
    """Sentences of a file, shortest first, as ids of a checkpoint's tokenizer."""

    def __init__(self, checkpoint: Path, file: Path, references: Path | None, most: int):
        from mlx_transformer.text.tokenizer import Tokenizer

        self.tokenizer = Tokenizer.load(checkpoint / "tokenizer.json")
        lines = file.read_text(encoding="utf-8").splitlines()[:most]
        encoded = self.tokenizer.encode_batch(lines)
        order = sorted(range(len(lines)), key=lambda i: len(encoded[i]))
        self.sources = [encoded[i] for i in order]
        self.references = []
        if references:
            written = references.read_text(encoding="utf-8").splitlines()
            self.references = [written[i] for i in order]

    def bleu(self, result: Measured, cells: list[Cell], task: Task) -> dict[int, float]:
        """By beam: of the outputs in the largest batches."""
        from mlx_transformer.generation.evaluate import score

        found = {}
        for cell in sorted(cells, key=lambda cell: cell.batch):
            lines = self.tokenizer.decode_batch(result.outputs[cell])
            found[cell.beam] = score(lines, [self.references[i] for i in task.chosen(cell)])["bleu"]
        return found


def random_sources(published: Path) -> list[list[int]]:
    config = json.loads((published / "config.json").read_text())
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 31, max(SENTENCES.values()))
    return [[*rng.integers(3, config["vocab_size"] - 1, n - 1).tolist(), config["eos_token_id"]] for n in lengths]


def as_json(results: dict[str, Measured]) -> dict[str, object]:
    return {
        name: {
            "seconds": {str(cell): values for cell, values in result.seconds.items()},
            "median": {str(cell): median(values) for cell, values in result.seconds.items()},
            **{key: getattr(result, key) for key in ("load", "resident", "peak", "first", "taught")},
        }
        for name, result in results.items()
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=DEFAULTS, help=f"default: {' '.join(DEFAULTS)}")
    parser.add_argument("--sizes", nargs="+", choices=("small", "base", *PUBLISHED), default=["small", "base"])
    cells = ["b1", "b8", "b32", "b1x4", "b8x4", "b32x4"]
    parser.add_argument("--cells", nargs="+", default=cells, help="b8: batches of 8; b8x4: with 4 beams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock",
        choices=("perf_counter", "process_time"),
        default="perf_counter",
        help="process_time: of an engine's own threads, which other work on the machine changes less (--threads 1)",
    )
    parser.add_argument("--trained", type=Path, metavar="CHECKPOINT", help="a trained checkpoint of ours")
    parser.add_argument("--text", type=Path, help="with --trained: sentences to translate")
    parser.add_argument("--reference", type=Path, help="their translations, for BLEU")
    parser.add_argument("--sentences", type=int, default=320, help="of the text (batches of 1: 100 of them)")
    parser.add_argument(
        "--peers-python",
        default=os.environ.get("PEERS_PYTHON", sys.executable),
        help="interpreter that has the peers (default: $PEERS_PYTHON, else this one)",
    )
    parser.add_argument("--models", type=Path, default=Path(".benchmarks"), help="where models are kept between runs")
    parser.add_argument("--json", type=Path, help="append the measurements to this file, one line a model")
    options = parser.parse_args()
    if bool(options.trained) != bool(options.text):
        parser.error("--trained and --text go together")
    return options


def described(options: argparse.Namespace) -> str:
    from mlx_transformer.system.machine import usable_cores, versions

    packages = ("ctranslate2", "torch", "transformers", "optimum-onnx", "onnxruntime")
    code = f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in {packages}), sep=', ')"
    peers = subprocess.run([options.peers_python, "-c", code], capture_output=True, text=True).stdout.strip()
    cores = usable_cores()
    machine = f"{platform.system()} {platform.machine()}, {cores} cores, {options.threads} threads used"
    ours = f"onnxruntime {versions().get('onnxruntime')}"
    command = shlex.join(["python", "benchmarks/translate.py", *sys.argv[1:]])
    return f"`{command}`, {date.today()}; {machine}; {ours}; peers: {peers or 'none'}."


if __name__ == "__main__":
    raise SystemExit(main())
