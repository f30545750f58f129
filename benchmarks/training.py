"""Training speed of one step, target tokens a second: ours, ours with the BLAS of MLX's Linux wheel, MLX's own module,
PyTorch as written and compiled.

    python benchmarks/training.py --torch-python .venv-consumers/bin/python >> benchmarks/RESULTS.md
    python benchmarks/training.py --presets small base --variants plain checkpointing parts bfloat16 decoder --no-wheel
    python benchmarks/training.py --variants plain mlx.nn --no-wheel --torch-python PYTHON --torch-compiled

The same work for all: post-norm encoder-decoder of a preset, tied embeddings, dropout, label smoothing 0.1, Adam,
gradient clipping, full batches of random ids of one length. Each engine is a process of its own; they take turns,
round by round, and ratios are medians over rounds of the ratio within a round. PyTorch is measured if `--torch-python`
names an interpreter that has it. Memory is the peak of MLX's arrays, of PyTorch that of the process less what it has
before its model is made.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date

SHAPES = {"tiny": (2000, 64, 16), "small": (8000, 64, 20), "base": (8000, 64, 20)}  # preset: (vocabulary, rows, length)
SIZES = {
    "tiny": (2, 128, 2, 512),
    "small": (3, 256, 4, 1024),
    "base": (6, 512, 8, 2048),
}  # layers, d_model, heads, d_ff
PARTS = 4
VARIANTS = {
    "plain": "mlx-transformer",
    "checkpointing": "mlx-transformer, layers checkpointed",
    "parts": f"mlx-transformer, {PARTS} batches a step, each of a quarter",
    "bfloat16": "mlx-transformer, bfloat16",
    "decoder": "mlx-transformer, a decoder alone, packed documents",
    "mlx.nn": "mlx.nn.Transformer",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="steps a round")
    parser.add_argument("--presets", nargs="+", default=["tiny", "small"], choices=list(SHAPES))
    parser.add_argument("--variants", nargs="+", default=["plain"], choices=list(VARIANTS))
    parser.add_argument("--no-wheel", action="store_true", help="leave out the BLAS of MLX's wheel")
    parser.add_argument("--torch-python", help="interpreter of an environment with PyTorch")
    parser.add_argument(
        "--torch-compiled", action="store_true", help="PyTorch's compiled step as well (a C++ compiler)"
    )
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "PRESET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    print(f"\n## Training: one step\n\n{described()}\n")
    print("| preset | engine | target tokens/s | x PyTorch | peak MB |\n|-|-|-|-|-|")
    for preset in options.presets:
        print(*rows(preset, *measure(preset, options)), sep="\n", flush=True)


def rows(preset: str, speeds: dict[str, list[float]], peaks: dict[str, float]) -> list[str]:
    """Medians of the rounds' tokens/s, and of the rounds' ratios to PyTorch's; the highest peak."""
    lines = []
    for engine, values in speeds.items():
        pairs = zip(values, speeds.get("PyTorch", []), strict=False)
        ratios = [ours / theirs for ours, theirs in pairs]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
        lines.append(f"| {preset} | {engine} | {statistics.median(values):,.0f} | {ratio} | {peaks[engine]:,.0f} |")
    return lines


def measure(preset: str, options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    engines: dict[str, tuple[str, str, dict[str, str]]] = {}
    for variant in options.variants:
        engines[VARIANTS[variant]] = (sys.executable, variant, {})
    if sys.platform == "linux" and not options.no_wheel:
        engines["mlx-transformer, BLAS of the wheel"] = (sys.executable, "plain", {"MLX_TRANSFORMER_BLAS": "wheel"})
    if options.torch_python:
        engines["PyTorch"] = (options.torch_python, "torch", {})
        if options.torch_compiled:
            engines["PyTorch, compiled"] = (options.torch_python, "torch-compiled", {})
    workers = {}
    for name, (python, engine, extra) in engines.items():
        command = [python, __file__, "--worker", engine, preset]
        environment = {**os.environ, **extra}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers[name] = subprocess.Popen(command, env=environment, **pipes)
    speeds: dict[str, list[float]] = {name: [] for name in workers}
    peaks = dict.fromkeys(workers, 0.0)
    for _ in range(options.rounds):
        for name, worker in workers.items():
            answer = json.loads(ask(worker, str(1 if "wheel" in name else options.steps)))
            speeds[name].append(answer["tokens_per_second"])
            peaks[name] = max(peaks[name], answer["peak_mb"])
    for worker in workers.values():
        worker.communicate()
    return speeds, peaks


def ask(worker: subprocess.Popen[str], line: str) -> str:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    return worker.stdout.readline()


def work(engine: str, preset: str) -> None:
    """Answer each line "number of steps" with the speed."""
    if engine.startswith("torch"):
        step, tokens, peak = torch_step(preset, compiled=engine == "torch-compiled")
    else:
        step, tokens, peak = mlx_nn_step(preset) if engine == "mlx.nn" else mlx_step(preset, engine)
    step()  # warm
    for line in sys.stdin:
        begin = time.perf_counter()
        for _ in range(int(line)):
            step()
        speed = int(line) * tokens / (time.perf_counter() - begin)
        print(json.dumps({"tokens_per_second": speed, "peak_mb": peak()}), flush=True)


def mlx_step(preset: str, variant: str) -> tuple[Callable[[], None], int, Callable[[], float]]:
    import mlx.core as mx
    import numpy as np

    from mlx_transformer.core.config import TransformerConfig
    from mlx_transformer.data.batches import Batch
    from mlx_transformer.data.documents import PackedBatches
    from mlx_transformer.nn import Transformer
    from mlx_transformer.nn.checkpointing import checkpoint_layers
    from mlx_transformer.training.optimizers import Optimizer
    from mlx_transformer.training.options import TrainingOptions
    from mlx_transformer.training.step import Arithmetic, TrainStep

    vocab_size, rows, length = SHAPES[preset]
    ids = [np.random.default_rng(i).integers(3, vocab_size, (rows, length), np.int32) for i in range(3)]
    alone = {"architecture": "decoder", "encoder_layers": 0, "tie_embeddings": "target-output"}
    model = Transformer(TransformerConfig.preset(preset, vocab_size, **(alone if variant == "decoder" else {})))
    model.train()
    mx.eval(model.parameters())
    if variant == "checkpointing":
        checkpoint_layers(model)
    arithmetic = Arithmetic("bfloat16" if variant == "bfloat16" else "float32")
    step = TrainStep(model, Optimizer(model, TrainingOptions(optimizer="adam")), 0.1, 1.0, arithmetic)
    if variant == "decoder":
        documents = [[1, *row, 2] for row in ids[0][:, 1:].tolist()]
        batches = [PackedBatches(documents, batch_tokens=rows * length, row_length=8 * length).batches(0)[0]]
    else:
        cut = rows // PARTS if variant == "parts" else rows
        batches = [Batch(*(a[i : i + cut] for a in ids), cut * length) for i in range(0, rows, cut)]
    tokens = sum(batch.tokens for batch in batches)
    return lambda: step.evaluate(*step(batches, 1e-4)), tokens, lambda: mx.get_peak_memory() / 1e6


def mlx_nn_step(preset: str) -> tuple[Callable[[], None], int, Callable[[], float]]:
    """MLX's own module and optimizer, with the same BLAS on all cores: MLX runs it on one stream."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim

    from mlx_transformer.device import set_blas_threads, use_fast_blas
    from mlx_transformer.system.machine import usable_cores

    use_fast_blas()
    set_blas_threads(usable_cores())
    vocab_size, rows, length = SHAPES[preset]
    layers, d_model, heads, d_ff = SIZES[preset]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, d_model)
            self.network = nn.Transformer(d_model, heads, layers, layers, d_ff, 0.1, norm_first=False)

        def loss(self, source: mx.array, target_in: mx.array, target_out: mx.array) -> mx.array:
            causal = nn.MultiHeadAttention.create_additive_causal_mask(length)
            x, y = (self.embedding(ids) * d_model**0.5 for ids in (source, target_in))
            logits = self.embedding.as_linear(self.network(x, y, None, causal, None))
            return nn.losses.cross_entropy(logits, target_out, label_smoothing=0.1, reduction="mean")

    model, adam = Model(), optim.Adam(1e-4, [0.9, 0.98], 1e-9)
    model.train()
    batch = [mx.random.randint(3, vocab_size, (rows, length)) for _ in range(3)]
    loss_and_gradients = nn.value_and_grad(model, model.loss)

    def step() -> None:
        loss, gradients = loss_and_gradients(*batch)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        adam.update(model, gradients)
        mx.eval(loss, model.parameters(), adam.state)

    return step, rows * length, lambda: mx.get_peak_memory() / 1e6


def torch_step(preset: str, compiled: bool = False) -> tuple[Callable[[], None], int, Callable[[], float]]:
    import resource

    import torch  # type: ignore[import-not-found]
    from torch import nn

    vocab_size, rows, length = SHAPES[preset]
    layers, d_model, heads, d_ff = SIZES[preset]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    embedding = nn.Embedding(vocab_size, d_model)
    network = nn.Transformer(d_model, heads, layers, layers, d_ff, 0.1, batch_first=True)
    network.encoder.norm = network.decoder.norm = None  # the paper's post-norm stacks end without one
    parameters = [*embedding.parameters(), *network.parameters()]
    adam = torch.optim.Adam(parameters, 1e-4, (0.9, 0.98), 1e-9)
    source, target_in, target_out = (torch.randint(3, vocab_size, (rows, length)) for _ in range(3))
    causal = nn.Transformer.generate_square_subsequent_mask(length)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss_of_batch() -> torch.Tensor:
        x, y = (embedding(ids) * d_model**0.5 for ids in (source, target_in))
        hidden = network(x, y, tgt_mask=causal, tgt_is_causal=True)
        return criterion((hidden @ embedding.weight.T).flatten(0, 1), target_out.flatten())

    forward = torch.compile(loss_of_batch) if compiled else loss_of_batch

    def step() -> None:
        loss = forward()
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()

    def peak() -> float:
        unit = 1 if sys.platform == "darwin" else 1024
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit / 1e6

    return step, rows * length, peak


def described() -> str:
    from mlx_transformer.device import use_fast_blas
    from mlx_transformer.system.machine import usable_cores, versions

    found = versions()
    blas = use_fast_blas()
    cores = usable_cores()
    machine = f"{platform.system()} {platform.machine()}, {cores} cores"
    return f"`python benchmarks/training.py`, {date.today()}; {machine}; mlx {found.get('mlx')}, {blas}."


if __name__ == "__main__":
    main()
