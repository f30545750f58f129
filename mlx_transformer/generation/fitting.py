"""Whether a model and its tokenizer are for what they are asked to do."""

from __future__ import annotations

from mlx_transformer.core.config import Architecture, TransformerConfig
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.system.errors import UserError

USES = {"encoder-decoder": "translate", "decoder": "generate", "encoder": "fill"}
"""The command that a model of each architecture is for."""


def fitting_tokenizer(
    config: TransformerConfig, tokenizer: Tokenizer | None, where: str, needed: Architecture, what: str
) -> Tokenizer:
    """The tokenizer. `UserError`, which names the model by `where`, unless its architecture is `needed` for `what`, and
    its tokenizer is there and fits it."""
    if config.architecture != needed:
        article = "a" if needed == "decoder" else "an"
        use = f"architecture={config.architecture!r} is for {USES[config.architecture]}"
        raise UserError(f"{where}: {what} needs {article} {needed}; {use}")
    if tokenizer is None:
        raise UserError(f"{where}: has no tokenizer.json, so it takes ids alone: put the tokenizer in its folder")
    tokenizer.check_fits(config, where)
    return tokenizer
