"""What a run is going to do, in the lines that it begins with."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.system.machine import check_memory

from .options import ENDLESS, TrainingOptions
from .schedule import MOST_WARMUP_STEPS, WARMUP_SHARE, peak, warmup_steps


def check_fits(config: TransformerConfig) -> None:
    """`UserError` if the machine has not even the memory for weights, gradients and Adam's two means of them."""
    count = parameter_count(config)
    check_memory(16 * count, f"training {count:,} parameters", "choose a smaller preset, d_model, d_ff or vocab_size")


def plan_lines(
    options: TrainingOptions,
    config: TransformerConfig,
    text: str,
    batch_tokens: int,
    batches: int,
) -> Iterator[str]:
    """What is trained, for how long and how; `batches` are the steps of an epoch, each of `batch_tokens`."""
    vocabularies = f"vocabulary {config.vocab_size:,}"
    if config.has_encoder and config.has_decoder and not config.one_embedding:
        vocabularies = f"vocabularies {config.source_vocab_size:,} and {config.vocab_size:,}"
    sizes = f"{vocabularies}, {parameter_count(config):,} parameters"
    yield f"training on {text} for validation; {sizes}"
    steps = planned_steps(options, batches)
    lengths = [] if steps is None else [f"{steps:,} steps ({steps / batches:,.1f} epochs)"]
    lengths += [] if options.minutes is None else [f"{options.minutes:g} minutes"]
    rate = f"learning rate {_warm_up(options, config.d_model, steps)}"
    if options.schedule in ("linear", "cosine"):
        rate += f", {options.schedule} down to 0"
    elif options.schedule not in ENDLESS and options.cooldown > 0:
        rate += f", down to 0 over the last {options.cooldown:.0%}"
    yield f"{' or '.join(lengths)}, {batches:,} steps an epoch, {batch_tokens:,} target tokens a step; {rate}"
    if steps is not None:
        yield from ends_inside_warm_up(options, steps)


def planned_steps(options: TrainingOptions, batches: int) -> int | None:
    """The last step of a run with so many batches an epoch; None if the clock alone ends it."""
    ends = [] if options.steps is None else [options.steps]
    ends += [] if options.epochs is None else [math.ceil(options.epochs * batches)]
    return min(ends, default=None)


def ends_inside_warm_up(options: TrainingOptions, steps: int) -> Iterator[str]:
    """A line that says so, if a run of `steps` steps does."""
    if options.warmup_steps is not None and steps <= options.warmup_steps:
        yield (
            f"warning: the run ends at step {steps:,}, inside its warm-up of {options.warmup_steps:,} steps, and will "
            "be poor: lower warmup_steps (--warmup), or leave it out and it follows from the run's length"
        )


def _warm_up(options: TrainingOptions, d_model: int, steps: int | None) -> str:
    warmup = options.warmup_steps
    if warmup is None and steps is not None and options.minutes is None:
        warmup = max(1, round(warmup_steps(steps, 1.0)))
    if warmup is not None:
        return f"up to {peak(options, d_model, warmup):.2g} over {warmup:,} steps"
    return f"up over the first {WARMUP_SHARE:.0%}, at most {MOST_WARMUP_STEPS:,} steps"
