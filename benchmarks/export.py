"""Export of a random model: seconds, peak memory against the weights, bytes, nodes.

    python benchmarks/export.py [--preset base] [--vocab-size 37000] [--rounds 3]

The export runs in a process of its own, as `python -m export build` does, and its peak is that process's whole resident
set (VmHWM on Linux), interpreter and imports included. It must stay below twice the size of the weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx

from mlx_transformer.spec.checkpoint import save_checkpoint
from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.parameters import parameter_count, parameter_shapes
from mlx_transformer.spec.versions import versions

EXPORT = """
import json, resource, sys, time
start = time.perf_counter()
from export import export_onnx
export_onnx(sys.argv[1], sys.argv[2])
if sys.platform == "darwin":
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
else:  # there, ru_maxrss would begin with the parent's size
    peak = 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
print(json.dumps({"seconds": time.perf_counter() - start, "cpu": time.process_time(), "peak": peak}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="base")
    parser.add_argument("--vocab-size", type=int, default=37000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    config = TransformerConfig.preset(chosen.preset, chosen.vocab_size)
    weights = 4 * parameter_count(config)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, out = Path(folder) / "model", Path(folder) / "onnx"
        save_checkpoint(checkpoint, config, random_weights(config))
        rounds = [measured(checkpoint, out) for _ in range(chosen.rounds)]
        files = {str(path.relative_to(out)): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
        nodes = {path.stem: count(path) for path in sorted((out / "onnx").glob("*.onnx"))}
    result = {
        "model": f"{chosen.preset}, vocabulary {chosen.vocab_size}, {parameter_count(config):,} parameters",
        "seconds": {key: round(statistics.median(r[key] for r in rounds), 2) for key in ("seconds", "cpu")},
        "peak MB": round(max(r["peak"] for r in rounds) / 1e6),
        "weights MB": round(weights / 1e6),
        "peak / weights": round(max(r["peak"] for r in rounds) / weights, 2),
        "written MB": round(sum(files.values()) / 1e6),
        "files": files,
        "nodes (of them transposed weights, folded when loaded)": nodes,
        "versions": versions(),
    }
    print(json.dumps(result, indent=2))
    return 0 if result["peak / weights"] <= 2 else 1


def random_weights(config: TransformerConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in parameter_shapes(config).items()}


def measured(checkpoint: Path, out: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, str(checkpoint), str(out)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def count(path: Path) -> str:
    graph = onnx.load(path, load_external_data=False).graph
    branches = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    weights = {tensor.name for tensor in graph.initializer}
    transposed = sum(node.op_type == "Transpose" and node.input[0] in weights for node in graph.node)
    return f"{len(graph.node) + sum(len(branch.node) for branch in branches)} ({transposed})"


if __name__ == "__main__":
    raise SystemExit(main())
