"""What a training step costs: its floating-point operations, and how to fit it into a given amount of memory.

`Work` counts the operations of a step, `peak_speed` measures how many the device can do; their ratio is the share of
peak FLOP/s on the dashboard.

`fit_memory` makes a step fit the recipe's `memory`. It cuts batches into parts and sums their gradients (accumulation,
which costs almost no time). If the parts would get too small, it also checkpoints layers (about a third more time).
With little memory the loss works in smaller chunks. Memory grows with the tokens of a part: two small batches of the
longest rows are measured, and the rest follows linearly. Only MLX's arrays count, not Python or the text.
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

GRADIENT = 3  # cost of forward and backward over that of forward: a product's gradient takes two more products
READ_SOURCE = (".cross_attention.key_proj.", ".cross_attention.value_proj.")  # decoder maps applied to source tokens


class Work:
    """Counts the floating-point operations of a model's steps.

    Two for each weight that a token meets (Kaplan et al. 2020, section 2.1), plus the products of queries, keys and
    values. Recomputing a checkpointed layer doesn't count.
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
        """Count the operations of a batch, forward and backward, padding included."""
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
        """Multiplications for the scores and weighted sums of all heads, stack by stack."""
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
    """Measure the device's operations per second: the best of a few products of large square matrices."""
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


SMALLEST_PART = 1024  # tokens; products of fewer are too small to be fast
MEASURED = 512  # tokens: the smaller of the two measured batches has at least as many
SPARE = 0.1  # share of the memory that stays free: later batches have other shapes, and MLX keeps freed arrays

MakeBatches = Callable[[Recipe], BatchesByEpoch]


@dataclass(frozen=True)
class Need:
    """`need(tokens)`: bytes for a part of a step with so many tokens. No part has fewer than `least` tokens."""

    fixed: float
    per_token: float
    vocabulary: int
    chunk: int
    """Logits in the largest chunk of the loss, if each takes `BYTES_PER_LOGIT`."""
    per_logit: int
    least: int

    def __call__(self, tokens: float) -> float:
        logits = min(BYTES_PER_LOGIT * self.chunk, self.per_logit * tokens * self.vocabulary)
        return self.fixed + self.per_token * tokens + logits

    def parts(self, tokens: int, room: float, smallest: int) -> int:
        """The smallest number of parts that each fit into `room` bytes; 0 if they would be smaller than `smallest`."""
        most = max(1, tokens // max(self.least, smallest))
        return next((parts for parts in range(1, most + 1) if self(tokens / parts) <= room), 0)


def fit_memory(recipe: Recipe, start: Start, text: EncodedText, group: Group) -> tuple[Recipe, str]:
    """Return the recipe with `accumulate`, `gradient_checkpointing` and `batch_tokens` set to fit its `memory`, and a
    line that tells the user, e.g. "memory: 4 x 2,048 target tokens a step; about 5.1 of 6 GB".

    A step keeps its number of tokens. Raises UserError if nothing fits.
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
    """Bytes of freed arrays that MLX may keep, so that they fit `memory` together with the arrays in use."""
    return None if options.memory is None else SPARE * options.memory * 1e9


def _measured(recipe: Recipe, start: Start, make: MakeBatches, checkpointing: bool) -> Need:
    options = replace(recipe.training, gradient_checkpointing=checkpointing)
    gc.collect()  # or old arrays might be freed during the measurement
    others = mx.get_active_memory()
    few_logits = 64 * start.config.vocab_size  # a few rows at a time; the largest chunk is added below
    _, step = model_and_step(start, options, streams=cpu_streams(), max_logits=few_logits)

    def batches_of(tokens: int) -> BatchesByEpoch:
        return make(replace(recipe, data=replace(recipe.data, batch_tokens=tokens)))

    def peak(batches: BatchesByEpoch) -> int:
        batch = max(batches.batches(0), key=lambda each: sum(a.size for a in each.arrays(0) if a is not None))
        for _ in range(2):  # the first step creates the optimizer's moments
            mx.clear_cache()
            mx.reset_peak_memory()
            step.evaluate(*step([batch, batch], 1e-9))  # two batches, to measure the sum of gradients too
        return mx.get_peak_memory() - others

    least = batches_of(1).batch_tokens
    few, many = (batches_of(times * max(least, MEASURED)) for times in (1, 2))
    low, high = peak(few), peak(many)
    per_token = max(1.0, (high - low) / (many.batch_tokens - few.batch_tokens))
    fixed = low - per_token * few.batch_tokens
    per_logit = bytes_per_logit(step.model.classifier().after)
    return Need(fixed, per_token, start.config.vocab_size, logits_within(options.memory), per_logit, least)
