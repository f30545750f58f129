"""What is seen of a run while it goes on: its status, and on a terminal the loss's curve and how the device is used."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.data.epochs import TrainingBatch
from mlx_transformer.system.progress import Reporter

from .arithmetic_work import Work, fastest
from .follower import Silent
from .options import TrainingOptions
from .speed import Speed
from .state import State
from .step import TrainStep

BLOCKS = "▁▂▃▄▅▆▇█"
BESIDE = 60  # columns that the rest of the line takes at most
KEPT = 1024  # losses; of more, neighbours become their mean


class Live:
    """Shown by `reporter` after each step."""

    def __init__(
        self, reporter: Reporter | Silent, options: TrainingOptions, config: TransformerConfig, taken: TrainStep
    ):
        """`taken`: what takes the steps."""
        self.reporter, self.options, self.taken, self.curve = reporter, options, taken, Curve()
        # A log does without, and so without the products that are timed for it.
        self._fastest = fastest(taken.arithmetic) if reporter.columns else 0.0
        self._work, self._operations = Work(config), 0.0
        mx.reset_peak_memory()

    def step(self, state: State, loss: float, rate: float, speed: Speed, batches: Sequence[TrainingBatch]) -> None:
        """A step of these batches ended; `rate`: its learning rate."""
        self.curve.add(loss)
        steps = f"/{self.options.steps:,}" if self.options.steps is not None else ""
        status = f"step {state.step:,}{steps}  loss {loss:.3f}  {speed.recent:,.0f} tokens/s"
        if not self.reporter.columns:  # a terminal says it in the line below
            status += f"  {_peak()}"
        self.reporter.update(state.progress(self.options), status, self._below(rate, speed, batches))

    def _below(self, rate: float, speed: Speed, batches: Sequence[TrainingBatch]) -> str:
        if not self.reporter.columns:
            return ""
        self._operations = 0.95 * self._operations + sum(map(self._work, batches))
        share = self._operations / max(speed.recent_seconds, 1e-9) / self._fastest
        parts = f"rate {rate:.2e}  {_peak()}  {share:.0%} of peak FLOP/s"
        compiled = f"  {self.taken.compilations} compiled" if self.taken.compilations else ""
        return f"loss {self.curve.drawn(max(8, self.reporter.columns - BESIDE - len(compiled)))}  {parts}{compiled}"


def _peak() -> str:
    return f"peak {mx.get_peak_memory() / 1e6:,.0f} MB"


def memory_of_log() -> dict[str, int]:
    """MB that MLX's arrays took at most since this was asked last, and that it keeps of freed ones."""
    values = {"peak_memory_mb": mx.get_peak_memory(), "cache_memory_mb": mx.get_cache_memory()}
    mx.reset_peak_memory()
    return {name: round(value / 1e6) for name, value in values.items()}


def compilations_of_log(step: TrainStep) -> dict[str, int]:
    """How often `step` was compiled in this process, where it is at all."""
    return {"compilations": step.compilations} if step.compilations else {}


class Curve:
    """A run's losses in one line of blocks."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._each, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float) -> None:
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._each:
            return
        self._values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._values) == KEPT:
            self._values = [(a + b) / 2 for a, b in zip(self._values[::2], self._values[1::2], strict=True)]
            self._each *= 2

    def drawn(self, width: int) -> str:
        """At most `width` blocks, the first of the run's begin; a value that is not finite is a space."""
        values, columns = self._values, min(width, len(self._values))
        cuts = [len(values) * i // columns for i in range(columns + 1)] if columns else []
        means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
        finite = [mean for mean in means if abs(mean) < float("inf")]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
        return "".join(BLOCKS[round((m - low) * scale)] if abs(m) < float("inf") else " " for m in means)
