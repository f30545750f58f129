"""The floating-point operations of a step, and those that the device could do: their share is how well it is used.

A step that fits the memory it may take.

Batches are cut in parts whose gradients are summed (accumulation, nearly for nothing), and where these would be too
small, layers are checkpointed too (for about a third more time). The loss is taken in smaller chunks where there is
little memory. A part takes more the more tokens it has: this is measured on two small batches of the longest text, as
MLX counts its arrays; the rest of the process (Python, the text) is not counted.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import output_weight_name, parameter_shapes
from mlx_transformer.data.epochs import BatchesByEpoch, TrainingBatch
from mlx_transformer.device import cpu_streams, device_kind
from mlx_transformer.system.errors import UserError

from .data import EncodedText
from .group import Group
from .loss import BYTES_PER_LOGIT, bytes_per_logit, logits_within
from .options import TrainingOptions
from .recipe import Recipe
from .setup import Start, model_and_step
from .step import Arithmetic

GRADIENT = 3  # times the forward pass: each product has two more in its gradient
READ_SOURCE = (".cross_attention.key_proj.", ".cross_attention.value_proj.")  # of a decoder's maps


class Work:
    """Counts the floating-point operations of a model's steps.

    They are two for each weight that meets a token (Kaplan et al. 2020, section 2.1), and the products of queries, keys
    and values. A layer that is checkpointed counts once.
    """

    def __init__(self, config: TransformerConfig):
        self.config = config
        self.by_side = {"source": 0, "target": 0}
        for name, shape in parameter_shapes(config).items():
            side = name.partition(".")[0]
            if len(shape) == 2 and side in ("encoder", "decoder"):
                source = side == "encoder" or any(part in name for part in READ_SOURCE)
                self.by_side["source" if source else "target"] += shape[0] * shape[1]
        rows, columns = parameter_shapes(config)[output_weight_name(config)] if config.head.classifies else (0, 0)
        self.classifier = rows * columns

    def __call__(self, batch: TrainingBatch) -> float:
        """Count the operations for one batch, padding included, forward and backward."""
        targets, _, *inputs = batch.arrays(self.config.pad_id)
        stacks = {"source": self.config.has_encoder, "target": self.config.has_decoder}
        sides = [side for side, exists in stacks.items() if exists]
        sizes = dict(zip(sides, (ids.shape for ids in inputs if ids is not None), strict=False))
        assert targets is not None
        products = self.classifier * targets.size
        for side, (rows, length) in sizes.items():
            products += self.by_side[side] * rows * length
        return 2.0 * GRADIENT * (products + sum(self._attention(sizes)))

    def _attention(self, sizes: dict[str, tuple[int, ...]]) -> Iterator[int]:
        """Count the multiplications for the scores and weighted sums of all heads, stack by stack."""
        c = self.config
        stacks = {"source": c.layers("encoder"), "target": c.layers("decoder")}
        widths = {side: sum(c.heads * (c.d_k + c.d_v) for c in layers) for side, layers in stacks.items()}
        for side, width in widths.items():
            if side in sizes and not (side == "target" and c.recurrent):
                rows, length = sizes[side]
                yield width * rows * length * length
        if len(sizes) == 2:
            (rows, length), (_, target_length) = sizes["source"], sizes["target"]
            yield widths["target"] * rows * length * target_length


def peak_speed(arithmetic: Arithmetic) -> float:
    """Measure the operations a second that the device can do: the best of a few products of large square matrices."""
    size = 512 if device_kind() == "cpu" else 4096
    streams = cpu_streams()
    best = 0.0
    for _ in range(4):
        factors = [mx.ones((size, size), arithmetic.dtype) for _ in streams]
        mx.eval(factors)
        begin = time.perf_counter()
        mx.eval([mx.matmul(a, a, stream=stream) for a, stream in zip(factors, streams, strict=True)])
        best = max(best, 2 * size**3 * len(streams) / (time.perf_counter() - begin))
    return best


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
