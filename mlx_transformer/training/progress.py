"""A run's progress: its counters, clock, speed, stop signals and printed lines.

OUT/clock.txt has one line per step, "DONE SECONDS", e.g. "41 12.5": after 41 steps, the next began at second 12.5. In a
run limited by minutes the learning rate depends on these times. A resumed run repeats the steps after its checkpoint
with the recorded times, and so computes the same weights again.

The run prints opening lines, a forecast, a status updated with each step, and closing lines. On a terminal a second
status line has the loss curve and the share of the device's peak speed.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import mlx.core as mx
import numpy as np

from mlx_transformer.core.adapter import AdapterConfig, linear_maps
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.data.epochs import BatchesByEpoch, TrainingBatch
from mlx_transformer.system.early import HANGUP, drop_hung_up, restore_handlers
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_bytes
from mlx_transformer.system.progress import Reporter, duration

from .cost import Work, peak_speed
from .data import RunData, noun
from .group import Group
from .optimizers import MOST_WARMUP_STEPS, WARMUP_SHARE, peak, warm_up
from .options import ENDLESS, TrainingOptions
from .recipe import Recipe
from .step import TrainStep

CLOCK = "clock.txt"
LOWER_IS_BETTER = ("loss", "perplexity")


@dataclass
class State:
    """A run's counters, stored in every checkpoint. `seconds`: training time, also from before a --resume."""

    step: int = 0
    epoch: float = 0.0
    seconds: float = 0.0
    target_tokens: int = 0
    skipped_steps: int = 0
    validated_step: int = 0
    """Step of the last validation."""
    best_score: float | None = None
    """Score of the best validation; loss and perplexity are negated, so that higher is better. None before the first
    validation, or if the recipe sets no `best`."""
    best_step: int = 0
    validations_since_best: int = 0

    def progress(self, options: TrainingOptions) -> float:
        """The finished share of the run, by the first limit to be reached (steps, epochs or minutes)."""
        ends = [(self.step, options.steps), (self.epoch, options.epochs), (self.seconds / 60, options.minutes)]
        return max(done / limit for done, limit in ends if limit is not None)

    def note_scores(self, options: TrainingOptions, scores: Mapping[str, float]) -> bool:
        """Count a validation at this step; return whether it is the best so far (False without `best`)."""
        if options.best is None or options.best not in scores:
            return False
        value = -scores[options.best] if options.best in LOWER_IS_BETTER else scores[options.best]
        if self.best_score is not None and value <= self.best_score:
            self.validations_since_best += 1
            return False
        self.best_score, self.best_step, self.validations_since_best = value, self.step, 0
        return True

    def should_stop_early(self, options: TrainingOptions) -> bool:
        """Whether `patience` validations in a row were no better than the best one before."""
        return 0 < options.patience <= self.validations_since_best


class Clock:
    """Counts a run's training seconds: `with Clock(path, seconds) as clock`.

    seconds: the time spent before a --resume. path: clock.txt; None: record nothing.
    """

    def __init__(self, path: Path | None, seconds: float):
        self.path = path
        self._file: BinaryIO | None = None
        self._recorded = _read_clock(path) if path is not None else {}
        self._set(seconds)

    def seconds(self) -> float:
        return self._seconds + time.monotonic() - self._since

    def begin(self, done: int) -> float:
        """Begin the step after `done` steps; return its starting time, as recorded if it is."""
        if done in self._recorded:
            self._set(self._recorded[done])
            return self._seconds
        seconds = self.seconds()
        if self.path is not None:
            try:
                self._file = self._file or self.path.open("ab", buffering=0)
                self._file.write(f"{done} {seconds!r}\n".encode())
            except OSError as error:
                message = f"{self.path}: could not be written ({error}); fix that and continue with --resume"
                raise UserError(message) from error
        return seconds

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _set(self, seconds: float) -> None:
        self._seconds, self._since = seconds, time.monotonic()


def _read_clock(path: Path) -> dict[int, float]:
    """Read {steps done: seconds}. A last line that a full disk or a crash cut short is removed from the file."""
    data = read_bytes(path) if path.exists() else b""
    complete_lines = data[: data.rfind(b"\n") + 1]
    if len(complete_lines) < len(data):
        os.truncate(path, len(complete_lines))
    seconds_at: dict[int, float] = {}
    for line in complete_lines.splitlines():
        with suppress(ValueError):
            done, seconds = line.split()
            seconds_at[int(done)] = float(seconds)
    return {done: seconds for done, seconds in seconds_at.items() if math.isfinite(seconds)}


class Speed:
    """Measures target tokens per second, without the time for validation and saving.

    `recent_seconds`: the time of the last steps, where each weighs 0.95 times as much as the next.
    """

    def __init__(self) -> None:
        self._mark = time.monotonic()
        self._tokens = self._seconds = self._recent_tokens = self.recent_seconds = 0.0

    def add(self, tokens: int) -> None:
        """Count a step's tokens; the step ends now and began at the last `pause`."""
        seconds = time.monotonic() - self._mark
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        self._recent_tokens = 0.95 * self._recent_tokens + tokens
        self.recent_seconds = 0.95 * self.recent_seconds + seconds

    def pause(self) -> None:
        self._mark = time.monotonic()

    @property
    def recent(self) -> float:
        """Tokens per second over about the last 20 steps."""
        return self._recent_tokens / max(self.recent_seconds, 1e-9)

    def since_last(self) -> float:
        """Tokens per second since the last call."""
        tokens, seconds = self._tokens, self._seconds
        self._tokens = self._seconds = 0.0
        return tokens / max(seconds, 1e-9)


class StopSignal:
    """Catches the signals that ask a run to stop.

    Ctrl-C, SIGTERM and a closed terminal (SIGHUP) end the run after the current step; a second Ctrl-C or SIGTERM ends
    it at once. A second SIGHUP doesn't, since SIGHUP often comes twice, from the system and from the shell.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._stop_requested = self._hung_up = False
        self._before: dict[int, Callable | int | None] = {}

    def requested(self) -> bool:
        return self.received is not None

    def agree(self, group: Group) -> int | None:
        """Return a signal received by any process of the group, the same in all processes; None if there is none.

        A signal during the call counts at the next call.
        """
        agreed = group.largest(self.received or 0) or None
        self.received = agreed or self.received
        return agreed

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM, *([HANGUP] if HANGUP else [])):
            if number == HANGUP and signal.getsignal(number) is signal.SIG_IGN:  # nohup
                continue
            try:
                self._before[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread: the caller deals with signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._before, self._hung_up)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        if number == HANGUP:
            self._hung_up = True
            drop_hung_up()
        elif not self._stop_requested:
            self._stop_requested = True
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)


FORECAST_AFTER = 20  # steps: enough to estimate the speed of the rest
BLOCKS = "▁▂▃▄▅▆▇█"
OTHER_COLUMNS = 60  # room for everything but the curve in its line
MAX_LOSSES = 1024  # in a curve; a full curve is halved, each two neighbours becoming their mean


def opening_lines(
    recipe: Recipe,
    config: TransformerConfig,
    data: RunData,
    batches: BatchesByEpoch,
    batches_per_step: int,
    adapter: AdapterConfig | None,
) -> Iterator[str]:
    """The opening lines: model, text and length of the run.

    batches_per_step: batches of all processes together.
    """
    kind = noun(data.train)
    text = f"{len(data.train) - batches.dropped:,} {kind}, {len(data.valid):,}"
    step_tokens, steps_per_epoch = batches.batch_tokens * batches_per_step, max(1, len(batches) // batches_per_step)
    yield from plan_lines(recipe.training, config, text, step_tokens, steps_per_epoch, batches.unit)
    if adapter is not None:
        count = sum(int(np.prod(shape)) for shape in adapter.shapes(config).values())
        maps = f"{len(adapter.targets)} of {len(linear_maps(config))} linear maps"
        yield f"{adapter.kind} of rank {adapter.rank} on {maps}: {count:,} parameters are trained"
    if batches.dropped or data.dropped:
        long, empty = ("pairs", "with an empty side") if kind == "pairs" else ("prompts", f"empty {kind}")
        note = f"{batches.dropped:,} {long} longer than {recipe.data.max_length} tokens"
        yield f"left out: {note}, {data.dropped:,} {empty}"


def plan_lines(
    options: TrainingOptions,
    config: TransformerConfig,
    text: str,
    step_tokens: int,
    steps_per_epoch: int,
    unit: str = "target tokens",
) -> Iterator[str]:
    """Lines about sizes, length and learning rate. step_tokens: target tokens per step (or pairs, texts: see `unit`).

    E.g. "1,000 steps (2.0 epochs), 500 steps an epoch, 2,000 target tokens a step; learning rate ...".
    """
    vocabularies = f"vocabulary {config.vocab_size:,}"
    if config.has_encoder and config.has_decoder and not config.one_embedding:
        vocabularies = f"vocabularies {config.source_vocab_size:,} and {config.vocab_size:,}"
    sizes = f"{vocabularies}, {parameter_count(config):,} parameters"
    yield f"training on {text} for validation; {sizes}"
    steps = planned_steps(options, steps_per_epoch)
    lengths = [] if steps is None else [f"{steps:,} steps ({steps / steps_per_epoch:,.1f} epochs)"]
    lengths += [] if options.minutes is None else [f"{options.minutes:g} minutes"]
    rate = f"learning rate {_warm_up(options, config.d_model, steps)}"
    if options.schedule in ("linear", "cosine"):
        rate += f", {options.schedule} down to 0"
    elif options.schedule not in ENDLESS and options.cooldown > 0:
        rate += f", down to 0 over the last {options.cooldown:.0%}"
    yield f"{' or '.join(lengths)}, {steps_per_epoch:,} steps an epoch, {step_tokens:,} {unit} a step; {rate}"
    if steps is not None:
        yield from short_for_warm_up(options, steps)


def planned_steps(options: TrainingOptions, steps_per_epoch: int) -> int | None:
    """The run's last step; None if only `minutes` limits it."""
    ends = [] if options.steps is None else [options.steps]
    ends += [] if options.epochs is None else [math.ceil(options.epochs * steps_per_epoch)]
    return min(ends, default=None)


def short_for_warm_up(options: TrainingOptions, steps: int, ended: bool = False) -> Iterator[str]:
    """Yield a warning if a run of `steps` steps is too short for the recipe's warm-up."""
    asked, warmup = options.warmup_steps, warm_up(options, steps, 1.0)
    if asked is not None and (warmup < asked or steps <= asked):
        where = "inside its" if steps <= asked else "too soon after its"
        shortened = f", which {'was' if ended else 'is'} shortened to {_whole(warmup):,}" if warmup < asked else ""
        yield (
            f"warning: the run {'ended' if ended else 'ends'} at step {steps:,}, {where} warm-up of {asked:,} steps"
            f"{shortened}: train longer, or lower warmup_steps"
        )


def closing_lines(options: TrainingOptions, state: State) -> Iterator[str]:
    """The closing lines of a run, if it stopped early or was too short for its warm-up."""
    share = min(1.0, state.progress(options))
    if share < 1:
        yield (
            f"ended early, at step {state.step:,} of about {state.step / share:,.0f}: no better {options.best} in "
            f"{state.validations_since_best} validations"
        )
        if state.step <= warm_up(options, state.step, share):
            yield "warning: it ended inside its warm-up: raise patience, or lower warmup_steps"
        return
    yield from short_for_warm_up(options, state.step, ended=True)


def _whole(warmup: float) -> int:
    return max(1, round(warmup))


def _warm_up(options: TrainingOptions, d_model: int, steps: int | None) -> str:
    if steps is not None and options.minutes is None:
        warmup = warm_up(options, steps, 1.0)
    elif options.warmup_steps is not None:
        warmup = options.warmup_steps
    else:
        return f"up over the first {WARMUP_SHARE:.0%}, at most {MOST_WARMUP_STEPS:,} steps"
    return f"up to {peak(options, d_model, warmup):.2g} over {_whole(warmup):,} steps"


def forecast_line(state: State, peak: int, unit: str = "target tokens") -> str:
    """The result of a rehearsal: the speed of its steps, and `peak`, the peak bytes of MLX's arrays."""
    speed = state.target_tokens / max(state.seconds, 1e-9)
    return (
        f"{state.step} steps took {state.seconds:.1f} s, {speed:,.0f} {unit}/s; arrays took up to "
        f"{peak / 1e6:,.0f} MB; nothing was written"
    )


class Forecast:
    """Estimates how long the rest of a run takes, from the first steps after step `begun_at`."""

    def __init__(self, options: TrainingOptions, begun_at: int):
        self.options, self.begun_at = options, begun_at
        self._first = (0.0, 0.0)

    def lines(self, state: State, share: float) -> Iterator[str]:
        """The lines to print after a step, with `share` of the run done; there are some only once."""
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
                    yield from short_for_warm_up(self.options, round(steps))


class Dashboard:
    """Shows a run's status on `reporter` after each step of `trained`."""

    def __init__(self, reporter: Reporter, recipe: Recipe, config: TransformerConfig, trained: TrainStep):
        self.reporter, self.options, self.trained, self.curve = reporter, recipe.training, trained, Curve()
        self._unit = recipe.objective.unit.removeprefix("target ")
        # Only a terminal shows the share of the device's speed; a log needs no measurement.
        self._peak_speed = peak_speed(trained.arithmetic) if reporter.columns else 0.0
        self._work, self._operations = Work(config), 0.0
        mx.reset_peak_memory()

    def step(self, state: State, loss: float, rate: float, speed: Speed, batches: Sequence[TrainingBatch]) -> None:
        """Show a finished step on these batches; rate: its learning rate."""
        self.curve.add(loss)
        steps = f"/{self.options.steps:,}" if self.options.steps is not None else ""
        status = f"step {state.step:,}{steps}  loss {loss:.3f}  {speed.recent:,.0f} {self._unit}/s"
        if not self.reporter.columns:  # on a terminal the second line has it
            status += f"  {_peak()}"
        self.reporter.update(state.progress(self.options), status, self._below(rate, speed, batches))

    def _below(self, rate: float, speed: Speed, batches: Sequence[TrainingBatch]) -> str:
        if not self.reporter.columns:
            return ""
        self._operations = 0.95 * self._operations + sum(map(self._work, batches))
        share = self._operations / max(speed.recent_seconds, 1e-9) / self._peak_speed
        parts = f"rate {rate:.2e}  {_peak()}  {share:.0%} of peak FLOP/s"
        compiled = f"  {self.trained.compilations} compiled" if self.trained.compilations else ""
        return (
            f"loss {self.curve.drawn(max(8, self.reporter.columns - OTHER_COLUMNS - len(compiled)))}  {parts}{compiled}"
        )

    def log_values(self) -> dict[str, int]:
        """Values for metrics.jsonl, in MB: the peak of MLX's arrays since the last call, and its cache of freed arrays.
        Also how often the step was compiled, if it was."""
        values = {"peak_memory_mb": mx.get_peak_memory(), "cache_memory_mb": mx.get_cache_memory()}
        mx.reset_peak_memory()
        compiled = {"compilations": self.trained.compilations} if self.trained.compilations else {}
        return {name: round(value / 1e6) for name, value in values.items()} | compiled


def _peak() -> str:
    return f"peak {mx.get_peak_memory() / 1e6:,.0f} MB"


class Curve:
    """A run's losses, drawn as one line of blocks."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._each, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float) -> None:
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._each:
            return
        self._values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._values) == MAX_LOSSES:
            self._values = [(a + b) / 2 for a, b in zip(self._values[::2], self._values[1::2], strict=True)]
            self._each *= 2

    def drawn(self, width: int) -> str:
        """Draw all losses in at most `width` blocks, e.g. "█▅▃▂▁"; a loss that isn't finite is a space."""
        values, columns = self._values, min(width, len(self._values))
        cuts = [len(values) * i // columns for i in range(columns + 1)] if columns else []
        means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
        finite = [mean for mean in means if abs(mean) < float("inf")]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
        return "".join(BLOCKS[round((m - low) * scale)] if abs(m) < float("inf") else " " for m in means)
