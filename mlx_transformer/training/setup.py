"""The start of a run: the weights, config and vocabulary that it begins with, its model, optimizer and step.

A run starts from a config with fresh weights and a vocabulary of its text, or from a checkpoint that has its own. Under
an adapter the checkpoint stays as it is stored, integers included: gradients and the optimizer's state are those of the
adapter's arrays alone.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from mlx_transformer.core.adapter import AdapterConfig, linear_maps
from mlx_transformer.core.checkpoint import Checkpoint, digests, open_checkpoint, resolve, weights_digest
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.core.tokenizer import MIN_VOCAB_SIZE, Tokenizer
from mlx_transformer.nn.checkpointing import checkpoint_layers
from mlx_transformer.nn.lora import add_adapter
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.durable import is_within, previous
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import check_memory

from .boards import check_wandb
from .data import RunData, train_tokenizer
from .group import ALONE, Group
from .loss import logits_within
from .objectives import OBJECTIVES
from .optimizers import Optimizer, freeze, matching
from .options import TrainingOptions
from .recipe import PATHS, Recipe
from .run_folder import PARTS
from .step import Arithmetic, TrainStep

MOST_EPOCHS_PER_STEP = 100
ADAPTER_TARGETS = "*.query_proj, *.value_proj"  # as in section 4.2 of LoRA's paper


@dataclass(frozen=True)
class Start:
    config: TransformerConfig
    tokenizer: Tokenizer
    checkpoint: Path | None = None
    """The checkpoint with the first weights; None: fresh ones."""
    adapter: AdapterConfig | None = None
    """The adapter that is trained; None: the weights themselves are."""

    @property
    def folder(self) -> Path | None:
        """The folder of the first weights; None: they are fresh."""
        return None if self.checkpoint is None else open_checkpoint(self.checkpoint, verify=False).folder

    @property
    def record(self) -> dict[str, Any]:
        """The digest of the first weights, for run.json; empty if they are fresh."""
        if self.checkpoint is None:
            return {}
        weights, *adapter = digests(open_checkpoint(self.checkpoint, verify=False)).values()
        return {"start": {"weights": weights, **({"adapter": adapter[0]} if adapter else {})}}

    def model(self) -> Transformer:
        """Make the model with its first weights, in float32 (but integers under an adapter); MLX's random state decides
        fresh ones, and an adapter's A."""
        if self.checkpoint is not None and self.adapter is not None:
            base = open_checkpoint(self.checkpoint)
            stored = {n: a if a.dtype.kind == "u" else a.astype(np.float32, copy=False) for n, a in base.stored()}
            model = Transformer.from_weights(self.config, stored, base.quantization)
            add_adapter(model, self.adapter)
        else:
            model = Transformer(self.config)
            if self.checkpoint is not None:
                weights = open_checkpoint(self.checkpoint).tensors()
                arrays: Any = tree_unflatten([(name, mx.array(array).astype(mx.float32)) for name, array in weights])
                model.update(arrays)
        model.tokenizer = self.tokenizer
        mx.eval(model.parameters())
        return model


def check_apart(recipe: Recipe, out: Path) -> None:
    """Raise `UserError` if the run reads what a run in `out` replaces, such as an earlier run's trained model."""
    parts = [out / name for name in PARTS]
    parts += [previous(part) for part in parts]
    for path in _read_by(recipe):
        if any(is_within(path, part) for part in parts):
            raise UserError(f"{out}: holds {path}, which is read and would be lost; choose another --out")


def _read_by(recipe: Recipe) -> Iterator[Path]:
    """List the files and folders that a run of the recipe reads."""
    start_from = recipe.training.start_from
    if start_from is not None:
        yield resolve(start_from)
    for options in (recipe.data, *recipe.data.corpora):
        for name in PATHS:
            if (place := getattr(options, name, None)) is None:
                continue
            is_pattern = glob.has_magic(place) and not Path(place).exists()
            yield from map(Path, glob.glob(place, recursive=True) if is_pattern else [place])


def check_start(recipe: Recipe) -> None:
    """Check what can be known before the text is read."""
    check_wandb(recipe.training.wandb)
    if recipe.training.start_from is None:
        check_fits(recipe.config(MIN_VOCAB_SIZE))
    else:
        chosen_adapter(recipe.training, open_checkpoint(recipe.training.start_from))


def check_fits(config: TransformerConfig) -> None:
    """Raise `UserError` if the machine hasn't even the memory for weights, gradients and Adam's two means of them."""
    count = parameter_count(config)
    check_memory(16 * count, f"training {count:,} parameters", "choose a smaller preset, d_model, d_ff or vocab_size")


def start(recipe: Recipe, data: RunData, known: Tokenizer | None) -> Start:
    """Decide what the run starts from; `known` is the vocabulary of a run that is resumed.

    `UserError` if the checkpoint can't be trained or has no vocabulary.
    """
    if recipe.training.start_from is None:
        tokenizer = known or train_tokenizer(data, recipe)
        config = recipe.config(tokenizer.vocab_size, tokenizer.source.vocab_size if tokenizer.separate else None)
        ids = dict(pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id)
        config = dataclasses.replace(config, **ids)
        tokenizer.check_fits(config, "recipe")
        made = Start(config, tokenizer)
    else:
        made = _from_checkpoint(Path(recipe.training.start_from), recipe)
    if made.tokenizer.separate and recipe.objective.reads == "documents":
        raise UserError(f"{recipe.training.objective}: needs one vocabulary; this one has two, source and target")
    if made.adapter is None:  # which needs little more than the weights
        check_fits(made.config)
    return made


def _from_checkpoint(path: Path, recipe: Recipe) -> Start:
    checkpoint = open_checkpoint(path)
    config, objective = checkpoint.config, recipe.training.objective
    if config.architecture != recipe.objective.architecture:
        fitting = [name for name, each in OBJECTIVES.items() if each.architecture == config.architecture]
        raise UserError(
            f"{path}: architecture={config.architecture!r} doesn't learn {objective}: choose objective "
            f"{' or '.join(fitting)}, or another checkpoint"
        )
    if config.head.kind != "vocabulary":
        raise UserError(
            f"{path}: a head of kind {config.head.kind!r} doesn't learn {objective}, which needs logits of words"
        )
    text = checkpoint.tokenizer_json()
    if text is None:
        raise UserError(f"{checkpoint.folder}: has no tokenizer.json, without which no text can be trained on")
    tokenizer = Tokenizer(text, str(path))
    if recipe.objective.masks and tokenizer.mask_id is None:
        raise UserError(f"{path}: its vocabulary has no <mask>, which {objective} needs: choose another checkpoint")
    config = dataclasses.replace(config, **recipe.model)
    return Start(config, tokenizer, resolve(path), chosen_adapter(recipe.training, checkpoint))


def chosen_adapter(options: TrainingOptions, base: Checkpoint) -> AdapterConfig | None:
    """Return the adapter that the recipe asks for, if it does.

    `UserError` if a pattern fits no linear map, or the rank is too large for one.
    """
    if options.adapter is None:
        return None
    if base.adapter is not None:
        raise UserError(
            f"{base.folder}: has an adapter beside its weights already; train another one of the checkpoint that "
            "it was made from, or merge this one first"
        )
    maps = linear_maps(base.config)
    fitting = matching(
        maps, options.adapter_targets or ADAPTER_TARGETS, "adapter_targets", what="linear map of a layer"
    )
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


def model_and_step(
    start: Start,
    options: TrainingOptions,
    group: Group = ALONE,
    streams: Sequence[mx.Stream] | None = None,
    max_logits: int | None = None,
) -> tuple[Transformer, TrainStep]:
    """Make the model and the step that trains it; MLX's random state decides fresh weights.

    `streams`: as for `Optimizer`. `max_logits`: as for `TrainStep`; None: as the recipe's `memory` says.
    """
    model = start.model()
    if options.freeze is not None:
        freeze(model, options.freeze)
    if options.gradient_checkpointing:
        checkpoint_layers(model)
    optimizer, arithmetic = Optimizer(model, options, streams), Arithmetic(options.precision)
    max_logits = logits_within(options.memory) if max_logits is None else max_logits
    return model, TrainStep(model, optimizer, options.smoothing, options.clip_norm, arithmetic, group, max_logits)


def batches_per_step(options: TrainingOptions, group: Group, epoch: Sized) -> int:
    """Count the batches that all processes take in a step.

    `UserError` if a step would take the text over and over: its gradient stays the same, and a first line of progress
    may be hours away.
    """
    count = options.accumulate * group.size
    if count > MOST_EPOCHS_PER_STEP * len(epoch):
        raise UserError(
            f"accumulate = {options.accumulate}: a step would take the text {count // len(epoch):,} times, which has "
            f"{len(epoch):,} batches: lower it"
        )
    return count
