"""What a run says of itself: the lines it begins with, and after some steps how long it will take."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transformer.core.adapter import AdapterConfig
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.data.epochs import BatchesByEpoch
from mlx_transformer.system.progress import duration

from .adapter import announced
from .data import RunData, noun
from .options import TrainingOptions
from .plan import ends_inside_warm_up, plan_lines
from .recipe import Recipe
from .state import State

FORECAST_AFTER = 20  # steps: enough to tell how fast the rest will be


def announcement(
    recipe: Recipe,
    config: TransformerConfig,
    data: RunData,
    batches: BatchesByEpoch,
    a_step: int,
    adapter: AdapterConfig | None,
) -> Iterator[str]:
    """What is trained, on what, for how long. `a_step`: batches of a step, of all processes."""
    kind = noun(data.train)
    text = f"{len(data.train) - batches.dropped:,} {kind}, {len(data.valid):,}"
    yield from plan_lines(recipe.training, config, text, batches.batch_tokens * a_step, max(1, len(batches) // a_step))
    if adapter is not None:
        yield announced(adapter, config)
    if batches.dropped or data.dropped:
        long, empty = ("pairs", "with an empty side") if kind == "pairs" else ("prompts", "empty documents")
        note = f"{batches.dropped:,} {long} longer than {recipe.data.max_length} tokens"
        yield f"left out: {note}, {data.dropped:,} {empty}"


def rehearsed(state: State, peak: int) -> str:
    """After a run's first steps: `peak` bytes of memory held arrays."""
    speed = state.target_tokens / max(state.seconds, 1e-9)
    return (
        f"{state.step} steps took {state.seconds:.1f} s, {speed:,.0f} target tokens/s; arrays took up to "
        f"{peak / 1e6:,.0f} MB; nothing was written"
    )


class Forecast:
    """How long the rest of a run takes, from its first steps since step `begun_at`."""

    def __init__(self, options: TrainingOptions, begun_at: int):
        self.options, self.begun_at = options, begun_at
        self._first = (0.0, 0.0)

    def lines(self, state: State, share: float) -> Iterator[str]:
        """After each step; `share` of the run is done."""
        if state.step == self.begun_at + 1:
            self._first = (state.seconds, share)
        elif state.step == self.begun_at + FORECAST_AFTER:
            seconds, before = self._first
            if before < share < 1:
                remaining = (1 - share) / (share - before)
                steps = state.step + remaining * (FORECAST_AFTER - 1)
                left = duration(remaining * (state.seconds - seconds))
                yield f"at this speed: {steps:,.0f} steps in all, {left} from now"
                if self.options.minutes is not None:
                    yield from ends_inside_warm_up(self.options, round(steps))
