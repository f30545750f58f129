"""Fine-tuning: what a model of five kinds of phrases gains on five others, all of it or an adapter, beside a new model.

    python benchmarks/fine_tuning.py --folder /tmp/fine-tuning

The kinds of the built-in corpus are cut in two halves. A model of the first half goes on with the second: all weights,
LoRA or DoRA, as many steps as a model that knows nothing gets. Each (with its adapter merged, as `train` leaves it) is
exported, proven by `validate`, and judged by exact match on held-out phrases of both halves, decoded greedily by the
ONNX graphs.

    python benchmarks/fine_tuning.py --folder FOLDER --models LLM LLM-4BIT --peers PYTHON

An adapter of decoders in mlx-lm's format, by this project and by mlx-lm (in an interpreter that has it): the same text
(the topics of Python's help, in documents of --length tokens), the same batches in the same order, the same rank,
scale, maps, optimiser and rate. Ours runs before and after mlx-lm's. Figures are of all steps but the first, in which
mlx-lm compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from mlx_transformer.data.built_in import build
from mlx_transformer.system.machine import usable_cores
from mlx_transformer.system.tensors import read_tensors
from mlx_transformer.text.tokenizer import Tokenizer
from mlx_transformer.training.options import tables_of
from mlx_transformer.training.recipe import load_recipe
from mlx_transformer.training.trainer import Trainer

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
    parser.add_argument(
        "--models", nargs="+", type=Path, help="decoders in mlx-lm's format, for adapters beside mlx-lm"
    )
    parser.add_argument("--peers", help="a Python with mlx-lm")
    parser.add_argument("--rows", type=int, default=2, help="documents in a batch of --models")
    parser.add_argument("--length", type=int, default=64, help="tokens of a document of --models")
    options = parser.parse_args()
    if (options.models is None) != (options.peers is None):
        parser.error("--models and --peers: give both or none")
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"--folder {options.folder}: holds files already; name a new folder")
    if options.models:
        beside_mlx_lm(options)
        return
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


def beside_mlx_lm(options: argparse.Namespace) -> None:
    print("| model | engine | tokens a second of the processor | of the clock | MB of arrays | MB resident | loss |")
    print("|-|-|-|-|-|-|-|")
    for model in options.models:
        folder = options.folder / model.name
        (folder / "text").mkdir(parents=True)
        base = folder / "ours"
        call("import", str(model), str(base))
        documents = documents_of(base, options.length)
        random.Random(options.seed).shuffle(documents)
        count = options.rows * options.steps
        if len(documents) < count + options.rows:
            sys.exit(f"only {len(documents)} documents of {options.length} tokens: lower --steps, --rows or --length")
        train, valid = documents[:count], documents[count : count + options.rows]
        write_lines(folder / "train.jsonl", train)
        for text in (folder / "valid.jsonl", folder / "text" / "valid.jsonl"):
            write_lines(text, valid)
        rate, betas, epsilon = 2e-4, (0.9, 0.98), 1e-9
        text = {"text": str(folder / "train.jsonl"), "valid_text": str(folder / "valid.jsonl")}
        text |= {"max_length": options.length - 1, "batch_tokens": options.rows * (options.length - 1)}
        recipe = {"objective": "language-model", "start_from": str(base), "adapter": "lora", "adapter_targets": "*"}
        recipe |= {"adapter_rank": 8, "adapter_alpha": 16.0, "optimizer": "adam", "clip_norm": 0.0, "epsilon": epsilon}
        recipe |= {"beta1": betas[0], "beta2": betas[1], "learning_rate": rate, "schedule": "constant"}
        recipe |= {"warmup_steps": 1, "steps": options.steps, "seed": options.seed, "log_every": 1}
        recipe |= {"out": str(folder / "run"), **text}
        theirs = {"model": str(model), "train": True, "data": str(folder / "text"), "seed": options.seed}
        theirs |= {"num_layers": -1, "batch_size": options.rows, "iters": options.steps, "val_batches": 0}
        theirs |= {"steps_per_report": 1, "steps_per_eval": options.steps, "save_every": options.steps}
        theirs |= {"max_seq_length": options.length, "learning_rate": rate, "optimizer": "adam"}
        theirs |= {"optimizer_config": {"adam": {"betas": betas, "eps": epsilon, "bias_correction": True}}}
        theirs |= {"lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 2.0}, "adapter_path": str(folder / "theirs")}
        write_lines(folder / "text" / "train.jsonl", [train[i] for i in order_of(recipe, train)])
        for engine, python, keys in (
            ("ours", sys.executable, recipe),
            ("mlx-lm", options.peers, theirs),
            ("ours", sys.executable, recipe),
        ):
            print(f"| {model.name} | {engine} | {' | '.join(tuned(folder, engine, python, keys))} |", flush=True)


def documents_of(checkpoint: Path, length: int) -> list[str]:
    """Pieces of Python's help topics that have so many tokens, with the end token."""
    tokenizer = Tokenizer.load(checkpoint)
    texts: list[str] = []
    for topic in topics.values():
        [ids] = tokenizer.prompts([topic.strip()])
        own = ids[len(tokenizer.start) :]
        room = length - 1 - len(tokenizer.start)
        pieces = [own[at : at + room] for at in range(0, len(own) - room, room)]
        each = [tokenizer.decode(piece) for piece in pieces]
        again = tokenizer.documents(each) if each else []
        texts += [t for t, piece, ids in zip(each, pieces, again, strict=True) if ids[:-1] == piece]
    return [*dict.fromkeys(texts)]


def order_of(recipe: dict[str, Any], texts: list[str]) -> list[int]:
    """The numbers of the texts in the order in which a run of the recipe reads them, a row each."""
    chosen = load_recipe(None, tables_of({key: value for key, value in recipe.items() if key != "out"}))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(chosen, Path(folder) / "run")
        trainer.files.close()
        start, documents = trainer.tokenizer.start, trainer.tokenizer.documents(texts)
        places = {(*start, *ids[:-1]): i for i, ids in enumerate(documents)}
        batches = islice(trainer.batches.from_step(0), recipe["steps"])
        return [places[tuple(row.tolist())] for batch in batches for row in batch.ids]


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def tuned(folder: Path, engine: str, python: str, keys: dict[str, Any]) -> list[str]:
    """A row of the table: one run, of all steps but the first."""
    (folder / f"{engine}.json").write_text(json.dumps(keys))
    command = [python, "-m", "engines.tuning", engine, str(folder / f"{engine}.json")]
    paths = [str(Path(__file__).parent), *([str(Path(__file__).parents[1])] if engine == "ours" else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = [line for line in lines if line["kind"] == "train"]
    first, last = steps[0], steps[-1]
    tokens = last["tokens"] - first["tokens"]
    speeds = [f"{tokens / (last[clock] - first[clock]):.1f}" for clock in ("cpu", "wall")]
    memory = [f"{max(line[kind] for line in at) / 1e6:.0f}" for kind, at in (("peak", steps), ("resident", lines))]
    return [*speeds, *memory, " ".join(f"{step['loss']:.3f}" for step in steps)]


def call(*arguments: str) -> str:
    done = subprocess.run([*PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"mlx-transformer {' '.join(arguments)}: exit status {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
