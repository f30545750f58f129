"""A step that fits the memory it may take.

Batches are cut in parts whose gradients are summed (accumulation, nearly for nothing), and where these would be too
small, layers are checkpointed too (for about a third more time). The loss is taken in smaller chunks where there is
little memory. A part takes more the more tokens it has: this is measured on two small batches of the longest text, as
MLX counts its arrays; the rest of the process (Python, the text) is not counted.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from mlx_transformer.data.epochs import BatchesByEpoch
from mlx_transformer.device import cpu_streams
from mlx_transformer.system.errors import UserError

from .data import EncodedText
from .group import Group
from .loss import BYTES_PER_LOGIT, bytes_per_logit, logits_within
from .options import TrainingOptions
from .recipe import Recipe
from .setup import Start, model_and_step

SMALLEST_PART = 1024  # tokens: below, products are too small to be fast
MEASURED = 512  # tokens at least, of the smaller batch
SPARE = 0.1  # share of the memory: other shapes come, and freed arrays are kept

MakeBatches = Callable[[Recipe], BatchesByEpoch]


@dataclass(frozen=True)
class Need:
    """The bytes that a part of a step takes, by its tokens; none has fewer than `least`."""

    fixed: float
    per_token: float
    vocabulary: int
    chunk: int
    """The logits of the loss's largest chunk, if each takes `BYTES_PER_LOGIT`."""
    per_logit: int
    least: int

    def __call__(self, tokens: float) -> float:
        logits = min(BYTES_PER_LOGIT * self.chunk, self.per_logit * tokens * self.vocabulary)
        return self.fixed + self.per_token * tokens + logits

    def parts(self, tokens: int, room: float, smallest: int) -> int:
        """Return the number of parts of which none takes more than `room` bytes; 0: they would be too small."""
        most = max(1, tokens // max(self.least, smallest))
        return next((parts for parts in range(1, most + 1) if self(tokens / parts) <= room), 0)


def fit_memory(recipe: Recipe, start: Start, text: EncodedText, group: Group) -> tuple[Recipe, str]:
    """Return the recipe with `accumulate`, `gradient_checkpointing` and `batch_tokens` that fit its `memory`.

    With it goes a line that says so. A step has as many tokens as before. `UserError` if nothing fits.
    """
    options, limit = recipe.training, float(recipe.training.memory or 0) * 1e9
    make = partial(text.batches, seed=options.seed, grow=True)
    tokens = make(recipe).batch_tokens
    parts, checkpointing, needed = 0, False, 0.0
    if group.leads:
        for checkpointing in (True,) if options.gradient_checkpointing else (False, True):
            need = _measured(recipe, start, make, checkpointing)
            parts = need.parts(tokens, (1 - SPARE) * limit, 1 if checkpointing else SMALLEST_PART)
            needed = need(tokens / parts if parts else need.least)
            if parts:
                break
    parts, checked, needed = group.broadcast([parts, checkpointing, needed])
    if not parts:
        raise UserError(
            "memory = {} GB: the smallest part of a step needs {} GB; raise it, or lower {max_length}, "
            "{vocab_size} or the model's size",
            f"{options.memory:g}",
            f"{needed / (1 - SPARE) / 1e9:.2g}",
        )
    part = math.ceil(tokens / parts)
    training = replace(options, accumulate=options.accumulate * int(parts), gradient_checkpointing=bool(checked))
    line = f"memory: {int(parts)} x {part:,} target tokens a step" + (", layers checkpointed" if checked else "")
    line += f"; about {needed / 1e9:.2g} of {options.memory:g} GB"
    return replace(recipe, training=training, data=replace(recipe.data, batch_tokens=part)), line


def cache_limit(options: TrainingOptions) -> float | None:
    """Return the bytes of freed arrays that may be kept, so that with those in use they fit `memory`."""
    return None if options.memory is None else SPARE * options.memory * 1e9


def _measured(recipe: Recipe, start: Start, make: MakeBatches, checkpointing: bool) -> Need:
    options = replace(recipe.training, gradient_checkpointing=checkpointing)
    gc.collect()  # else what was left over might go while this is measured
    others = mx.get_active_memory()
    few_logits = 64 * start.config.vocab_size  # a few rows at a time; the largest chunk is added below
    _, step = model_and_step(start, options, streams=cpu_streams(), max_logits=few_logits)

    def batches_of(tokens: int) -> BatchesByEpoch:
        return make(replace(recipe, data=replace(recipe.data, batch_tokens=tokens)))

    def peak(batches: BatchesByEpoch) -> int:
        batch = max(batches.batches(0), key=lambda each: sum(a.size for a in each.arrays(0) if a is not None))
        for _ in range(2):  # the first makes the optimizer's moments
            mx.clear_cache()
            mx.reset_peak_memory()
            step.evaluate(*step([batch, batch], 1e-9))  # with the sum of two parts' gradients
        return mx.get_peak_memory() - others

    least = batches_of(1).batch_tokens
    few, many = (batches_of(times * max(least, MEASURED)) for times in (1, 2))
    low, high = peak(few), peak(many)
    per_token = max(1.0, (high - low) / (many.batch_tokens - few.batch_tokens))
    fixed = low - per_token * few.batch_tokens
    per_logit = bytes_per_logit(step.model.classifier().after)
    return Need(fixed, per_token, start.config.vocab_size, logits_within(options.memory), per_logit, least)
