"""Training an adapter: which linear maps get one, and the model that has it, all else frozen.

What it starts from stays as it is stored, integers included; gradients and the optimizer's state are those of the
adapter's arrays alone.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_transformer.core.adapter import AdapterConfig, linear_maps
from mlx_transformer.core.checkpoint import Checkpoint, weights_digest
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.lora import add_adapter
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.errors import UserError

from .optimizers import matching
from .options import TrainingOptions

TARGETS = "*.query_proj, *.value_proj"  # as in section 4.2 of LoRA's paper


def chosen_adapter(options: TrainingOptions, base: Checkpoint) -> AdapterConfig | None:
    """What the recipe asks for. `UserError` if a pattern fits no linear map, or the rank is too large for one."""
    if options.adapter is None:
        return None
    if base.adapter is not None:
        raise UserError(
            f"{base.folder}: has an adapter beside its weights already; train another one of the checkpoint that "
            "it was made from, or merge this one first"
        )
    maps = linear_maps(base.config)
    fitting = matching(maps, options.adapter_targets or TARGETS, "adapter_targets", what="linear map of a layer")
    config = AdapterConfig(
        kind=options.adapter,
        rank=options.adapter_rank,
        alpha=options.adapter_alpha,
        dropout=options.adapter_dropout,
        base=weights_digest(base.folder),
        targets=tuple(path for path in maps if path in fitting),
    )
    try:
        config.shapes(base.config)
    except UserError as error:
        raise UserError(f"adapter_rank={config.rank}: {error}; lower it, or choose other adapter_targets") from error
    return config


def adapted_model(base: Checkpoint, config: TransformerConfig, adapter: AdapterConfig) -> Transformer:
    """The base with a new adapter, whose A MLX's random state decides; numbers in float32, integers as they are."""
    stored = {n: a if a.dtype.kind == "u" else a.astype(np.float32, copy=False) for n, a in base.stored()}
    model = Transformer.from_weights(config, stored, base.quantization)
    add_adapter(model, adapter)
    mx.eval(model.parameters())
    return model


def announced(adapter: AdapterConfig, config: TransformerConfig) -> str:
    """A line that says what of the model is trained."""
    count = sum(int(np.prod(shape)) for shape in adapter.shapes(config).values())
    maps = f"{len(adapter.targets)} of {len(linear_maps(config))} linear maps"
    return f"{adapter.kind} of rank {adapter.rank} on {maps}: {count:,} parameters are trained"
