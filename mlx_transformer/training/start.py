"""What a run starts from: a config with fresh weights and a vocabulary of the text, or a checkpoint with its own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from mlx_transformer.core.adapter import AdapterConfig
from mlx_transformer.core.checkpoint import digests, open_checkpoint, resolve
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer import MIN_VOCAB_SIZE, Tokenizer
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.errors import UserError

from .adapter import adapted_model, chosen_adapter
from .boards import check_wandb
from .data import RunData, train_tokenizer
from .objectives import OBJECTIVES
from .plan import check_fits
from .recipe import Recipe


@dataclass(frozen=True)
class Start:
    config: TransformerConfig
    tokenizer: Tokenizer
    checkpoint: Path | None = None
    """Whose weights the run starts from; None: fresh ones."""
    adapter: AdapterConfig | None = None
    """What is trained of it; None: the weights themselves."""

    @property
    def record(self) -> dict[str, Any]:
        """For run.json: the digest of the weights that it starts from."""
        if self.checkpoint is None:
            return {}
        weights, *adapter = digests(open_checkpoint(self.checkpoint, verify=False)).values()
        return {"start": {"weights": weights, **({"adapter": adapter[0]} if adapter else {})}}

    def model(self) -> Transformer:
        """With its first weights, in float32 (but integers under an adapter); MLX's random state decides fresh ones."""
        if self.checkpoint is not None and self.adapter is not None:
            model = adapted_model(open_checkpoint(self.checkpoint), self.config, self.adapter)
            model.tokenizer = self.tokenizer
            return model
        model = Transformer(self.config)
        model.tokenizer = self.tokenizer
        if self.checkpoint is not None:
            weights = open_checkpoint(self.checkpoint).tensors()
            arrays: Any = tree_unflatten([(name, mx.array(array).astype(mx.float32)) for name, array in weights])
            model.update(arrays)
        mx.eval(model.parameters())
        return model


def check_start(recipe: Recipe) -> None:
    """What can be known before the text is read."""
    check_wandb(recipe.training.wandb)
    if recipe.training.start_from is None:
        check_fits(recipe.config(MIN_VOCAB_SIZE))
    else:
        chosen_adapter(recipe.training, open_checkpoint(recipe.training.start_from))


def start(recipe: Recipe, data: RunData, known: Tokenizer | None) -> Start:
    """`known`: of the run, where it is resumed. `UserError` if the checkpoint can't be trained or has no vocabulary."""
    if recipe.training.start_from is None:
        tokenizer = known or train_tokenizer(data, recipe)
        config = recipe.config(tokenizer.vocab_size, tokenizer.source.vocab_size if tokenizer.separate else None)
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
        fitting = [name for name, of in OBJECTIVES.items() if of.architecture == config.architecture]
        raise UserError(
            f"{path}: architecture={config.architecture!r} doesn't learn {objective}: choose objective "
            f"{' or '.join(fitting)}, or another checkpoint"
        )
    text = checkpoint.tokenizer_json()
    if text is None:
        raise UserError(f"{checkpoint.folder}: has no tokenizer.json, without which no text can be trained on")
    tokenizer = Tokenizer(text, str(path))
    if recipe.objective.masks and tokenizer.mask_id is None:
        raise UserError(f"{path}: its vocabulary has no <mask>, which {objective} needs: choose another checkpoint")
    config = dataclasses.replace(config, **recipe.model)
    return Start(config, tokenizer, resolve(path), chosen_adapter(recipe.training, checkpoint))
