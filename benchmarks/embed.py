"""Texts to vectors a second: ours beside others, of which each computes the same lines in the same batches, in turns.

    python benchmarks/embed.py CHECKPOINT --text FILE --folder FOLDER
    python benchmarks/embed.py CHECKPOINT --text FILE --calibrate FILE --folder FOLDER --peers PYTHON --published MODEL
    python benchmarks/embed.py CHECKPOINT --text FILE --folder FOLDER --peers PYTHON --published MODEL --browser MODULES

CHECKPOINT: an imported folder of sentence-transformers. Ours is the package of target cpu, a row for each token; plain
is ONNX Runtime as it is, which is how fastembed runs a model: it pads each batch to its longest text, runs target
portable's graph, and pools what comes out. With --calibrate our int8 takes the scales of attention from other texts;
the portable graph's are a token's. With --peers, an interpreter with torch, sentence-transformers, optimum-onnx and
ctranslate2, there are those too, made of MODEL, the published folder (`engines/vectors.py`). With --browser, the
node_modules of `make test-browser`, both run on wasm in headless Chromium (`engines/vectors.mjs`): our package of
target cpu, opened by transformers.js, beside its own pipeline with Optimum's export of MODEL.

A ratio is of median times, to the best of the others: the one whose median is the shortest. Behind it is that to
whichever of them was the fastest in a round, the median of the rounds: of several that are as fast, one always has
luck. Each round begins with another engine, and each engine when the threads of the last one rest: ONNX Runtime's stay
awake for up to fifty milliseconds. With one thread the time is the processor's, which other programs take
less of; in the browser it is the wall's. Tokenizing counts for all. In float32 the vectors are compared first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
import onnxruntime as ort
import tokenizers
from numpy.typing import NDArray

from export import OnnxTransformer, export_onnx
from export.precision.table import PRECISIONS
from mlx_transformer.data.corpus import read_lines

Engine = Callable[[Sequence[str]], NDArray]
BATCHES, THREADS = (1, 8, 64), (1, 2)
REST = 0.1
"""Seconds between two engines."""
Clock = Callable[[], float]
PEERS = (
    "optimum:float32",
    "sentence-transformers:float32",
    "ctranslate2:float32",
    "optimum:int8",
    "ctranslate2:int8",
)


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


class Peer:
    """An engine in a process of its own."""

    def __init__(self, *command: object):
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        self.process = subprocess.Popen(
            [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def vectors(self, texts: Sequence[str]) -> NDArray:
        return np.array(self._ask(texts=list(texts), vectors=True)["vectors"])

    def seconds(self, texts: Sequence[str], batch: int, clock: Clock) -> float:
        return self._ask(texts=list(texts), batch=batch)["cpu" if clock is time.process_time else "wall"]

    def close(self) -> None:
        self.process.communicate()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        if not (line := self.process.stdout.readline()):
            raise SystemExit("a peer's process ended: see above")
        return json.loads(line)


class Here:
    """An engine in this process."""

    def __init__(self, embed: Engine):
        self.vectors = embed

    def seconds(self, texts: Sequence[str], batch: int, clock: Clock) -> float:
        began = clock()
        for i in range(0, len(texts), batch):
            self.vectors(texts[i : i + batch])
        return clock() - began

    def close(self) -> None:
        pass


def seconds(engine: Here | Peer, texts: Sequence[str], batch: int, clock: Clock) -> float:
    """Return what the texts take, the mean of as many times as it needs for the clock to move: that of a process goes
    on in steps of up to a hundredth of a second."""
    taken, times = 0.0, 0
    while not taken:
        taken, times = taken + engine.seconds(texts, batch, clock), times + 1
    return taken / times


def measure(
    engines: Mapping[str, Here | Peer], texts: Sequence[str], batch: int, rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Return the seconds of each round of each engine. They take turns, and in who begins."""
    for engine in engines.values():
        engine.seconds(texts[:batch], batch, clock)
    found: dict[str, list[float]] = {name: [] for name in engines}
    names = [*engines]
    for first in range(rounds):
        for i in range(len(names)):
            name = names[(first + i) % len(names)]
            time.sleep(REST)
            found[name].append(seconds(engines[name], texts, batch, clock))
    return found


def row(
    precision: str, batch: int, threads: int, texts: int, found: dict[str, list[float]]
) -> tuple[str, tuple[float, float]]:
    """Return a line of the table, and how many times as fast as the best of the others ours is: by medians, and than
    each round's fastest."""
    ours, *others = (median(times) for times in found.values())
    lucky = median(min(round_[1:]) / round_[0] for round_ in zip(*found.values(), strict=True))
    ratio = min(others) / ours
    speeds = [f"{speed:,.{2 if speed < 10 else int(speed < 100)}f}" for speed in (texts / t for t in (ours, *others))]
    return f"| {precision} | {batch} | {threads} | {' | '.join(speeds)} | {ratio:.2f} | {lucky:.2f} |", (ratio, lucky)


def engines_of(precision: str, threads: int, options: argparse.Namespace) -> dict[str, Here | Peer]:
    """Ours first. Peers have no int8 with torch."""
    portable, by_token = (options.folder / name for name in ("portable", "cpu"))
    ours = OnnxTransformer(by_token, precision=precision, threads=threads)
    engines: dict[str, Here | Peer] = {"ours": Here(ours.embed), "plain": Here(plain(portable, precision, threads))}
    names = [name for name in PEERS if name.endswith(f":{precision}")] if options.peers else []
    return engines | {name: peer(name, threads, options) for name in names}


def peer(name: str, threads: int, options: argparse.Namespace) -> Peer:
    place = options.folder / name.replace(":", "-")
    return Peer(options.peers, "-m", "engines.vectors", name, options.published, place, threads)


def in_browser(precision: str, threads: int, options: argparse.Namespace) -> dict[str, Here | Peer]:
    """Both on wasm. transformers.js is told the published limit of lengths; the files of its tokenizer have another."""
    peer(f"optimum:{precision}", threads, options).close()
    made, theirs = options.folder / f"optimum-{precision}", options.folder / "transformers.js"
    (theirs / "onnx").mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(made / name, theirs / name)
    limit = json.loads((options.published / "sentence_bert_config.json").read_text())["max_seq_length"]
    settings = json.loads((made / "tokenizer_config.json").read_text()) | {"model_max_length": limit}
    (theirs / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(made / "model.onnx", theirs / "onnx" / f"model{PRECISIONS[precision].suffix}.onnx")
    page = "node", Path(__file__).parent / "engines" / "vectors.mjs"
    asked = PRECISIONS[precision].dtype, threads, options.browser.resolve()
    return {
        "ours": Peer(*page, "output", options.folder / "cpu", *asked),
        "transformers.js": Peer(*page, "pipeline", theirs, *asked),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="one text a line")
    parser.add_argument("--calibrate", type=Path, help="other texts, for int8's fixed scales in our package")
    parser.add_argument("--folder", type=Path, required=True, help="new or empty, for what engines load")
    parser.add_argument("--lines", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", nargs="+", default=["float32", "int8"])
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    parser.add_argument("--batch", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--peers", help="a Python with the others")
    parser.add_argument("--published", type=Path, help="the model's folder as it was published, for them")
    parser.add_argument("--browser", type=Path, help="node_modules with playwright-core and transformers.js")
    options = parser.parse_args()
    if options.browser and options.peers is None:
        parser.error("--browser: needs --peers and --published too")
    if (options.peers is None) != (options.published is None):
        parser.error("--peers and --published: give both or none")
    texts = [line for line in read_lines(options.text) if line.strip()][: options.lines]
    precisions = list(dict.fromkeys(["float32", *options.precision]))
    scales: dict[str, Any] = {"int8_scales": "token"} if "int8" in precisions else {}
    export_onnx(options.checkpoint, options.folder / "portable", precision=precisions, **scales)
    scales = {"calibrate": options.calibrate} if scales and options.calibrate else scales
    export_onnx(options.checkpoint, options.folder / "cpu", target="cpu", precision=precisions, log=print, **scales)
    embedder = OnnxTransformer(options.folder / "cpu").embedder()
    # transformers.js cuts off a long text's end, [SEP] too
    same = [
        x for x, ids in zip(texts, embedder.rows(texts), strict=True) if not options.browser or len(ids) < embedder.most
    ]
    ratios: list[tuple[float, float]] = []
    for precision in options.precision:
        for threads in options.threads:
            clock = time.process_time if threads == 1 and not options.browser else time.perf_counter
            engines = (in_browser if options.browser else engines_of)(precision, threads, options)
            columns = ["precision", "batch", "threads", *engines, "ratio", "to each round's fastest"]
            print(f"\n| {' | '.join(columns)} |\n|{'-|' * len(columns)}")
            for engine in list(engines.values())[1:] if precision == "float32" else []:
                np.testing.assert_allclose(engine.vectors(same[:16]), engines["ours"].vectors(same[:16]), atol=1e-5)
            for batch in options.batch:
                line, ratio = row(
                    precision, batch, threads, len(texts), measure(engines, texts, batch, options.rounds, clock)
                )
                print(line, flush=True)
                ratios.append(ratio)
            for engine in engines.values():
                engine.close()
    for what, values in zip(("the ratios", "those to each round's fastest"), zip(*ratios, strict=True), strict=True):
        print(f"\nGeometric mean of {what}: {geometric_mean(values):.2f}, the smallest {min(values):.2f}")


if __name__ == "__main__":
    main()
