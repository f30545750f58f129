"""Texts to vectors a second: ours beside ONNX Runtime as it is, which is how fastembed runs a model.

    python benchmarks/embed.py CHECKPOINT --text FILE --folder FOLDER

CHECKPOINT: an imported folder of sentence-transformers. Each engine computes the same lines in the same batches, in
turns, so that a busy machine slows all of them; a ratio is the median of those of the rounds. Of one thread the time is
the processor's, which other programs take less of. Ours is the package of target cpu, a row for each token; the other
pads each batch to its longest text, runs target portable's graph, and pools what comes out. Tokenizing counts for both.
The vectors of both are compared first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np
import onnxruntime as ort
import tokenizers
from numpy.typing import NDArray

from export import OnnxTransformer, export_onnx
from export.precision.table import PRECISIONS
from mlx_transformer.data.corpus import read_lines

Engine = Callable[[Sequence[str]], NDArray]
BATCHES, THREADS = (1, 8, 64), (1, 2)
Clock = Callable[[], float]


def plain(folder: Path, precision: str, threads: int) -> Engine:
    """ONNX Runtime with its own settings: a batch padded to its longest text, the mean of the tokens at length 1."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    graph = folder / "onnx" / f"model{PRECISIONS[precision].suffix}.onnx"
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    longest = OnnxTransformer(folder, precision=precision).embedder().most
    tokenizer.enable_truncation(longest)
    tokenizer.enable_padding()
    wanted = {entry.name for entry in session.get_inputs()}

    def embed(texts: Sequence[str]) -> NDArray:
        encodings = tokenizer.encode_batch(list(texts))
        given = {
            "input_ids": np.array([each.ids for each in encodings], np.int64),
            "attention_mask": np.array([each.attention_mask for each in encodings], np.int64),
            "token_type_ids": np.array([each.type_ids for each in encodings], np.int64),
        }
        inputs = {name: array for name, array in given.items() if name in wanted}
        memory = np.asarray(session.run(["last_hidden_state"], inputs)[0])
        mask = given["attention_mask"][:, :, None].astype(np.float32)
        vectors = (memory * mask).sum(axis=1) / mask.sum(axis=1)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return embed


def seconds(engine: Engine, texts: Sequence[str], batch: int, clock: Clock) -> float:
    """Return how long an engine takes for the texts, so many at a time."""
    began = clock()
    for i in range(0, len(texts), batch):
        engine(texts[i : i + batch])
    return clock() - began


def measure(
    engines: dict[str, Engine], texts: Sequence[str], batch: int, rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Return the seconds of each round of each engine, which take turns."""
    for engine in engines.values():
        engine(texts[:batch])
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            found[name].append(seconds(engine, texts, batch, clock))
    return found


def row(name: str, batch: int, threads: int, texts: int, found: dict[str, list[float]]) -> tuple[str, float]:
    """Return a line of the table, and how many times as fast ours is."""
    ratio = median(theirs / ours for theirs, ours in zip(found["plain"], found["ours"], strict=True))
    speeds = [f"{texts / median(found[engine]):,.0f}" for engine in ("ours", "plain")]
    return f"| {name} | {batch} | {threads} | {speeds[0]} | {speeds[1]} | {ratio:.2f} |", ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="one text a line")
    parser.add_argument("--folder", type=Path, required=True, help="new or empty, for the package")
    parser.add_argument("--lines", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", nargs="+", default=["float32", "int8"])
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    options = parser.parse_args()
    texts = [line for line in read_lines(options.text) if line.strip()][: options.lines]
    precisions = list(dict.fromkeys(["float32", *options.precision]))
    scales = "token" if "int8" in precisions else None
    wanted = {"precision": precisions, "int8_scales": scales}
    folder = export_onnx(options.checkpoint, options.folder / "portable", **wanted)
    by_token = export_onnx(options.checkpoint, options.folder / "cpu", target="cpu", **wanted)
    ratios = []
    print("| precision | batch | threads | ours, texts/s | ONNX Runtime as it is | ratio |\n|-|-|-|-|-|-|")
    for precision in options.precision:
        for threads in options.threads:
            clock = time.process_time if threads == 1 else time.perf_counter
            ours = OnnxTransformer(by_token, precision=precision, threads=threads)
            engines: dict[str, Engine] = {"ours": ours.embed, "plain": plain(folder, precision, threads)}
            if precision == "float32":
                np.testing.assert_allclose(engines["ours"](texts[:16]), engines["plain"](texts[:16]), atol=1e-5)
            for batch in BATCHES:
                found = measure(engines, texts, batch, options.rounds, clock)
                line, ratio = row(precision, batch, threads, len(texts), found)
                print(line, flush=True)
                ratios.append(ratio)
    print(f"\nGeometric mean of the ratios: {geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
