"""How attention's cost grows with the length, and whether sizes that are powers of two run faster. Prints Markdown.

    python benchmarks/attention.py >> benchmarks/RESULTS.md

Attention(Q, K, V) has n x n scores for n positions: time and memory should grow with n^2, slope 2 between logarithms. A
recurrent network would compute the positions one after the other; attention computes all of them in one product, which
the second table measures against the same arithmetic in n steps. On a CPU, times are CPU time of one thread, so that
other work on the machine disturbs little; on a GPU, wall time. Each is the least of several rounds.

Shapes: H heads, n positions, d_k width of a head, D width of a layer.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ[variable] = "1"

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from mlx_transformer.device import set_blas_threads, use_fast_blas  # noqa: E402
from mlx_transformer.nn.attention import attention, attention_weights  # noqa: E402
from mlx_transformer.system.machine import usable_cores, versions  # noqa: E402

HEADS, HEAD_WIDTH = 2, 64
LENGTHS = (256, 512, 1024, 2048, 4096)
TOKENS = 1024
SIZES = ((512, 510), (1024, 1022))
CPU = mx.default_device() == mx.cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measured point, at least two rounds")
    seconds = parser.parse_args().seconds
    mx.random.seed(0)
    if CPU:
        use_fast_blas()
        set_blas_threads(1)
    print(f"\n## Attention: cost over length, and powers of two\n\n{described()}")
    print_growth(seconds)
    print_parallel(seconds)
    print_sizes(seconds)


def print_growth(seconds: float) -> None:
    rows = []
    for n in LENGTHS:
        q, k, v = heads(n), heads(n), heads(n)

        def fused(q: mx.array = q, k: mx.array = k, v: mx.array = v) -> mx.array:
            return attention(q, k, v)

        def stored(q: mx.array = q, k: mx.array = k, v: mx.array = v) -> mx.array:
            return attention_weights(q, k) @ v

        rows.append([n, *fastest([fused, stored], seconds), peak(fused), peak(stored)])
    fitted, last = slopes(np.array(rows))
    sizes = f"{HEADS} heads of {HEAD_WIDTH}, n positions to n positions"
    print(f"\n{sizes}, no mask; time, and peak memory above the inputs:\n")
    print("| n | fused, ms | weights stored, ms | fused, MB | weights stored, MB |\n|-|-|-|-|-|")
    for n, *times, small, large in rows:
        print(f"| {n} | {' | '.join(f'{1e3 * t:.2f}' for t in times)} | {small / 1e6:.3f} | {large / 1e6:.3f} |")
    print("| fitted slope | " + " | ".join(f"{slope:.2f}" for slope in fitted) + " |")
    print(f"| slope of the last doubling | {' | '.join(f'{slope:.2f}' for slope in last)} |")


def slopes(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each column over the first, between logarithms: fitted, and between the last two rows."""
    logarithms = np.log(table)
    first, rest = logarithms[:, 0], logarithms[:, 1:]
    return np.polyfit(first, rest, 1)[0], (rest[-1] - rest[-2]) / (first[-1] - first[-2])


def print_parallel(seconds: float) -> None:
    print("\nThe same products for all positions at once, and position by position:\n")
    print("| n | at once, ms | n steps, ms | times as long |\n|-|-|-|-|")
    for n in LENGTHS[:3]:
        q, k, v = heads(n), heads(n), heads(n)
        steps = [q[:, :, i : i + 1] for i in range(n)]
        mx.eval(steps)

        def stepwise(steps: list[mx.array] = steps, k: mx.array = k, v: mx.array = v) -> mx.array:
            for step in steps:
                mx.eval(attention(step, k, v))  # the next step of a recurrence would need it
            return v

        whole, one_by_one = fastest([lambda q=q, k=k, v=v: attention(q, k, v), stepwise], seconds)
        print(f"| {n} | {1e3 * whole:.2f} | {1e3 * one_by_one:.2f} | {one_by_one / whole:.1f} |")


def print_sizes(seconds: float) -> None:
    print(f"\nLinear layers over {TOKENS} tokens, a size that is a power of two and one that is not, in turns:\n")
    print("| layer | ms | GFLOP/s | layer | ms | GFLOP/s | time per multiplication, second / first |\n|-|-|-|-|-|-|-|")
    for sizes in SIZES:
        for wider in (1, 4):
            shapes = [(width, wider * width) for width in sizes]
            layers = [(mx.random.normal((TOKENS, i)), mx.random.normal((o, i))) for i, o in shapes]
            mx.eval(layers)
            times = fastest([lambda x=x, w=w: x @ w.T for x, w in layers], 2 * seconds)
            rates = [2e-9 * TOKENS * i * o / t for (i, o), t in zip(shapes, times, strict=True)]
            cells = [f"{i} to {o} | {1e3 * t:.2f} | {r:.1f}" for (i, o), t, r in zip(shapes, times, rates, strict=True)]
            print(f"| {' | '.join(cells)} | {rates[0] / rates[1]:.3f} |")


def heads(n: int) -> mx.array:
    """(1, H, n, d_k)"""
    x = mx.random.normal((1, HEADS, n, HEAD_WIDTH))
    mx.eval(x)
    return x


def fastest(functions: list[Callable[[], mx.array]], seconds: float) -> list[float]:
    """Least time of each in seconds; they take turns, so that a busy moment of the machine meets all of them."""
    clock = time.process_time if CPU else time.perf_counter
    for function in functions:
        mx.eval(function())
    best, end, rounds = [float("inf")] * len(functions), time.perf_counter() + seconds, 0
    while rounds < 2 or time.perf_counter() < end:
        for i, function in enumerate(functions):
            begin = clock()
            mx.eval(function())
            best[i] = min(best[i], clock() - begin)
        rounds += 1
    return best


def peak(function: Callable[[], mx.array]) -> int:
    """Most bytes that MLX held while computing, above what it held before; its cache of freed buffers not counted."""
    gc.collect()  # what is left of earlier work must not be freed while this is measured
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function())
    return mx.get_peak_memory() - before


def described() -> str:
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        processor = next((value.strip() for name, _, value in fields if name.strip() == "model name"), processor)
    found = versions()
    parts = [f"`python benchmarks/attention.py`, {date.today().isoformat()}; {platform.system()}, {processor}"]
    parts.append(f"{usable_cores()} cores, one used" if CPU else str(mx.default_device()))
    parts.append(f"Python {found['python']}, mlx {found['mlx']}, {use_fast_blas()}")
    return "; ".join(parts) + "."


if __name__ == "__main__":
    main()
