"""A model and the step that trains it, put together as a recipe says."""

from __future__ import annotations

from collections.abc import Sized

from mlx_transformer.nn.checkpointing import checkpoint_layers
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.errors import UserError

from .arithmetic import Arithmetic
from .group import ALONE, Group
from .loss import chunk_within
from .optimizers import Optimizer, freeze
from .options import TrainingOptions
from .start import Start
from .step import TrainStep

MOST_EPOCHS_A_STEP = 100


def assembled(
    start: Start, options: TrainingOptions, group: Group = ALONE, compiled: bool | None = None
) -> tuple[Transformer, TrainStep]:
    """MLX's random state decides fresh weights. compiled: as for `TrainStep`."""
    model = start.model()
    if options.freeze is not None:
        freeze(model, options.freeze)
    if options.gradient_checkpointing:
        checkpoint_layers(model)
    optimizer, arithmetic = Optimizer(model, options), Arithmetic(options.precision)
    step = TrainStep(model, optimizer, options.smoothing, options.clip_norm, arithmetic, compiled, group)
    step.logits = chunk_within(options.memory)
    return model, step


def batches_a_step(options: TrainingOptions, group: Group, epoch: Sized) -> int:
    """Of all processes. `UserError` if a step would take the text over and over: its gradient stays the same, and a
    first line of progress may be hours away."""
    count = options.accumulate * group.size
    if count > MOST_EPOCHS_A_STEP * len(epoch):
        raise UserError(
            f"accumulate = {options.accumulate}: a step would take the text {count // len(epoch):,} times, which has "
            f"{len(epoch):,} batches: lower it"
        )
    return count
