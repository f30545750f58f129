"""What a run starts from: a config with fresh weights and a vocabulary of the text, or a checkpoint with its own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from mlx_transformer.nn import Transformer
from mlx_transformer.spec.checkpoint import open_checkpoint, resolve, weights_digest
from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.tokenizer import MIN_VOCAB_SIZE, Tokenizer

from .data import RunData, train_tokenizer
from .plan import check_fits
from .recipe import Recipe


@dataclass(frozen=True)
class Start:
    config: TransformerConfig
    tokenizer: Tokenizer
    checkpoint: Path | None = None
    """Whose weights the run starts from; None: fresh ones."""

    @property
    def record(self) -> dict[str, Any]:
        """For run.json: the digest of the weights that it starts from."""
        return {} if self.checkpoint is None else {"start": {"weights": weights_digest(self.checkpoint)}}

    def model(self) -> Transformer:
        """With its first weights, in float32; MLX's random state decides fresh ones."""
        model = Transformer(self.config)
        if self.checkpoint is not None:
            weights = open_checkpoint(self.checkpoint).tensors()
            arrays: Any = tree_unflatten([(name, mx.array(array).astype(mx.float32)) for name, array in weights])
            model.update(arrays)
        mx.eval(model.parameters())
        return model


def check_start(recipe: Recipe) -> None:
    """What can be known before the text is read."""
    if recipe.training.start_from is None:
        check_fits(TransformerConfig.preset(recipe.preset, MIN_VOCAB_SIZE, **recipe.model))
    else:
        open_checkpoint(recipe.training.start_from)


def start(recipe: Recipe, data: RunData, known: Tokenizer | None) -> Start:
    """`known`: of the run, where it is resumed. `UserError` if the checkpoint can't be trained or has no vocabulary."""
    if recipe.training.start_from is None:
        tokenizer = known or train_tokenizer(data, recipe.data)
        made = Start(TransformerConfig.preset(recipe.preset, tokenizer.vocab_size, **recipe.model), tokenizer)
    else:
        made = _from_checkpoint(Path(recipe.training.start_from), recipe.model)
    check_fits(made.config)
    return made


def _from_checkpoint(path: Path, changes: dict[str, Any]) -> Start:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if config.architecture != "encoder-decoder":
        raise UserError(f"{path}: architecture={config.architecture!r}; training takes an encoder-decoder")
    text = checkpoint.tokenizer_json()
    if text is None:
        raise UserError(f"{checkpoint.folder}: has no tokenizer.json, without which no text can be trained on")
    return Start(dataclasses.replace(config, **changes), Tokenizer(text, str(path)), resolve(path))
