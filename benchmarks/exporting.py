"""Export of a random model beside Optimum, torch.onnx and CTranslate2: seconds, peak memory, bytes, nodes.

    python benchmarks/exporting.py [--preset base] [--vocab-size 37000] [--exports cpu:float32 cpu:int8] [--rounds 3]
    python benchmarks/exporting.py --peers-python .venv-peers/bin/python --vocab-size 8000 >> benchmarks/RESULTS.md

Every export runs in a process of its own, as a user's would, and its peak is that process's whole resident set (VmHWM
on Linux), interpreter and imports included. Ours must stay below 1.5 times the float32 weights; the exit status is 1 if
one does not, or fails. The peers export the same weights as a Marian model, if `--peers-python` names an interpreter
that has transformers, optimum-onnx, ctranslate2, torch and onnxscript; those that fail there are named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import numpy as np
import onnx
from engines.process import BENCHMARKS, last_line

from mlx_transformer.convert import to_huggingface
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_count, parameter_shapes
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import usable_cores, versions

LIMIT = 1.5  # of the weights in float32: what an export of ours may hold at most
TORCH = ("encoder", "decoder", "step")


def main() -> int:
    chosen = arguments()
    config = TransformerConfig.preset(chosen.preset, chosen.vocab_size)
    weights = 4 * parameter_count(config)
    print(f"\n## Export to ONNX\n\n{described(chosen, config)}\n")
    print("| export | seconds | CPU s | peak MB | x weights | written MB | x weights |\n" + "|-" * 7 + "|")
    graphs: list[str] = []
    within = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_checkpoint(folder / "model", config, random_weights(config))
        for name, command in exports(folder, chosen):
            out = Path(command[-1])
            try:
                rounds = [
                    measured([part.replace("OUT", str(out)) for part in command[:-1]], out)
                    for _ in range(chosen.rounds)
                ]
            except subprocess.CalledProcessError as error:
                graphs.append(f"Not measured: {name}: {last_line(error.stderr)}")
                within &= not name.startswith("ours")
                continue
            written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            print(row(name, rounds, written, weights), flush=True)
            within &= allowed(name, rounds, weights)
            graphs += [f"| {name} | {path.stem} | {nodes(path)} |" for path in sorted(out.rglob("*.onnx"))]
    print("\n| export | graph | nodes | after ONNX Runtime's optimiser |\n|-|-|-|-|")
    print("\n".join(sorted(graphs, key=lambda line: line.startswith("Not"))))
    return 0 if within else 1


def row(name: str, rounds: list[dict[str, float]], written: int, weights: int) -> str:
    """Medians of the rounds' times and the largest peak; bytes also in multiples of the float32 weights."""
    seconds, cpu = (statistics.median(r[key] for r in rounds) for key in ("seconds", "cpu"))
    sizes = [f"{value / 1e6:.0f} | {value / weights:.2f}" for value in (max(r["peak"] for r in rounds), written)]
    return f"| {name} | {seconds:.1f} | {cpu:.1f} | {' | '.join(sizes)} |"


def allowed(name: str, rounds: list[dict[str, float]], weights: int) -> bool:
    """Whether an export of ours stayed below its limit in every round; a peer has none."""
    return not name.startswith("ours") or max(r["peak"] for r in rounds) <= LIMIT * weights


def exports(folder: Path, chosen: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """(name, command with OUT where the output belongs, and last the output's folder)."""

    def command(python: str, *arguments: object) -> list[str]:
        return [python, "-W", "ignore", "-m", "engines.exporters", *map(str, arguments)]

    for text in chosen.exports:
        target, precision = text.split(":")
        out = str(folder / f"ours-{target}-{precision}")
        yield f"ours:{text}", [*command(sys.executable, "ours", folder / "model", "OUT", target, precision), out]
    if not chosen.peers_python:
        return
    try:
        to_huggingface(folder / "model", folder / "marian")
    except UserError as error:
        print(f"no peers: {error}", file=sys.stderr)
        return
    marian, peers = folder / "marian", chosen.peers_python
    yield "Optimum, four graphs", [*command(peers, "optimum", marian, "OUT"), str(folder / "optimum")]
    for graph in TORCH:
        name = f"torch.onnx (dynamo), {graph}"
        yield name, [*command(peers, "torch", marian, "OUT", graph), str(folder / f"torch-{graph}")]
    for precision in ("float32", "int8"):
        name = f"CTranslate2 {precision}"
        yield name, [*command(peers, "ct2", marian, "OUT", precision), str(folder / f"ct2-{precision}")]


def random_weights(config: TransformerConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in parameter_shapes(config).items()}


def measured(command: list[str], out: Path) -> dict[str, float]:
    """What the process says of itself in its last line. Raises `CalledProcessError`."""
    if out.exists() and "ours" not in command:  # ours replaces an earlier export
        for path in sorted(out.rglob("*"), reverse=True):
            path.unlink()
        out.rmdir()
    paths = os.pathsep.join(filter(None, [str(BENCHMARKS.parent), str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=BENCHMARKS.parent, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def nodes(path: Path) -> str:
    """Nodes as written and, after the optimisations of a session of ours on a CPU, as run; branches included."""
    with tempfile.TemporaryDirectory() as folder:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        options.log_severity_level = 3
        try:
            ort.InferenceSession(
                path, options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
            )
        except Exception as error:  # onnxruntime's exceptions have no common base of their own
            return f"{count(path)} | not loaded: {' '.join(str(error).split())[:120]}"
        return f"{count(path)} | {count(Path(options.optimized_model_filepath))}"


def count(path: Path) -> int:
    def within(graph: onnx.GraphProto) -> int:
        inner = (attribute for node in graph.node for attribute in node.attribute)
        branches = [branch for a in inner for branch in ([a.g] if a.HasField("g") else a.graphs)]
        return len(graph.node) + sum(map(within, branches))

    return within(onnx.load(path, load_external_data=False).graph)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="base")
    parser.add_argument("--vocab-size", type=int, default=37000)
    parser.add_argument("--exports", nargs="+", default=["portable:float32"], metavar="TARGET:PRECISION")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers-python", help="interpreter that has the peers")
    chosen = parser.parse_args()
    for text in chosen.exports:
        if text.count(":") != 1:
            parser.error(f"--exports {text}: expected TARGET:PRECISION, like cpu:int8")
    return chosen


def described(chosen: argparse.Namespace, config: TransformerConfig) -> str:
    parameters = parameter_count(config)
    cores = usable_cores()
    wanted = ("python", "numpy", "onnx", "onnx-ir", "onnxscript", "onnxruntime")
    found = ", ".join(f"{name} {version}" for name, version in versions().items() if name in wanted)
    return (
        f"`python benchmarks/exporting.py`, {date.today()};"
        f" {platform.system()} {platform.machine()}, {cores} cores; {found}."
        f" Model: `{chosen.preset}`, vocabulary {chosen.vocab_size:,}, {parameters / 1e6:.1f} M parameters,"
        f" {4 * parameters / 1e6:.0f} MB in float32. Medians of {chosen.rounds}; peaks are the largest."
    )


if __name__ == "__main__":
    raise SystemExit(main())
