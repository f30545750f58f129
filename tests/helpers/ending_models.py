"""Random models whose outputs end at different lengths, for tests of searches: as MLX has them, and as checkpoints."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig

SIZES = dict(vocab_size=40, d_model=32, heads=4, d_ff=48, encoder_layers=2, decoder_layers=2, max_positions=70)
POST_NORM = dict(tie_embeddings="none", output_bias=True)
PRE_NORM = dict(
    norm_placement="pre",
    norm="rmsnorm",
    positions="rotary",
    key_value_heads=2,
    gated=True,
    activation="silu",
    tie_embeddings="target-output",
    output_bias=True,
)


def made(folder: Path, tokenizer: str | None = None, **changes) -> tuple[Transformer, Path]:
    """A bias makes eos likely. -> the model, its checkpoint FOLDER/model"""
    mx.random.seed(3)
    model = Transformer(TransformerConfig(**{**SIZES, **changes})).eval()
    if model.config.output_bias:
        bias = np.zeros(model.config.vocab_size, np.float32)
        bias[model.config.eos_id] = 2.0
        model.output_proj.bias = mx.array(bias)
    save_checkpoint(folder / "model", model.config, model.weights(), tokenizer, force=True)
    return model, folder / "model"


def rows(count: int = 14, vocab_size: int = 40, seed: int = 0) -> list[list[int]]:
    """Sources of 0 to 11 random tokens, with eos."""
    rng = np.random.default_rng(seed)
    return [[*rng.integers(3, vocab_size, rng.integers(0, 12)).tolist(), 2] for _ in range(count)]
