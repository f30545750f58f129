"""A step that fits the memory it may take.

Batches are cut in parts whose gradients are summed (accumulation, nearly for nothing), and where these would be too
small, layers are checkpointed too (for about a third more time). The loss is taken in smaller chunks where there is
little. What a part takes grows with its tokens: it is measured on two small batches of the longest text, as MLX counts
its arrays; what the process has beside them (Python, the text) is not in it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from mlx_transformer.data.epochs import BatchesByEpoch
from mlx_transformer.system.errors import UserError

from .assembly import assembled
from .data import EncodedText
from .group import Group
from .loss import BYTES_A_LOGIT, chunk_within
from .options import TrainingOptions
from .recipe import Recipe
from .start import Start

SMALLEST_PART = 1024  # tokens: below, products are too small to be fast
MEASURED = 512  # tokens at least, of the smaller batch
SPARE = 0.1  # of the memory: other shapes come, and freed arrays are kept

MakeBatches = Callable[[Recipe], BatchesByEpoch]


@dataclass(frozen=True)
class Need:
    """Bytes that a part of so many tokens takes; none has fewer than `least` tokens."""

    fixed: float
    per_token: float
    vocabulary: int
    chunk: int
    """Logits of the loss's largest chunk."""
    least: int

    def __call__(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens + BYTES_A_LOGIT * min(self.chunk, tokens * self.vocabulary)

    def parts(self, tokens: int, room: float, smallest: int) -> int:
        """In how many a step is cut so that none takes more than `room`; 0: they would be too small."""
        most = max(1, tokens // max(self.least, smallest))
        return next((parts for parts in range(1, most + 1) if self(tokens / parts) <= room), 0)


def within_memory(recipe: Recipe, start: Start, text: EncodedText, group: Group) -> tuple[Recipe, str]:
    """The recipe with `accumulate`, `gradient_checkpointing` and `batch_tokens` that fit its `memory`, and a line that
    says what they are. The tokens of a step stay what they were. `UserError` if nothing fits."""
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
    parts, checked, needed = group.told([parts, checkpointing, needed])
    if not parts:
        raise UserError(
            f"memory = {options.memory:g} GB: the smallest part of a step needs {needed / (1 - SPARE) / 1e9:.2g} GB; "
            "raise it, or lower max_length, vocab_size or the model's size"
        )
    part = math.ceil(tokens / parts)
    training = replace(options, accumulate=options.accumulate * int(parts), gradient_checkpointing=bool(checked))
    said = f"memory: {int(parts)} x {part:,} target tokens a step" + (", layers checkpointed" if checked else "")
    said += f"; about {needed / 1e9:.2g} of {options.memory:g} GB"
    return replace(recipe, training=training, data=replace(recipe.data, batch_tokens=part)), said


def cache_limit(options: TrainingOptions) -> float | None:
    """Bytes of freed arrays that may be kept, so that with those in use they fit `memory`."""
    return None if options.memory is None else SPARE * options.memory * 1e9


def _measured(recipe: Recipe, start: Start, make: MakeBatches, checkpointing: bool) -> Need:
    options = replace(recipe.training, gradient_checkpointing=checkpointing)
    gc.collect()  # else what was left over might go while this is measured
    others = mx.get_active_memory()
    _, step = assembled(start, options, compiled=False)
    step.logits = 64 * start.config.vocab_size  # a few rows at a time; the largest chunk is added below

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
    return Need(fixed, per_token, start.config.vocab_size, chunk_within(options.memory), least)
