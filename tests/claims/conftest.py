"""A model for the rows that look at a trained one."""

import mlx.core as mx
import pytest
from claims import trained

from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.text.tokenizer import Tokenizer

TEXT = [f" {word} {word}" for words in trained.KINDS.values() for word in words] * 3


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> trained.Trained:
    """Random weights, 2+2 layers of 2 heads, and a tokenizer that has every compared word as one token."""
    tokenizer = Tokenizer.train(TEXT, 600)
    config = TransformerConfig.preset("tiny", tokenizer.vocab_size, d_model=32, d_ff=32)
    mx.random.seed(4)
    folder = tmp_path_factory.mktemp("trained") / "model"
    save_checkpoint(folder, config, Transformer(config).weights(), tokenizer.to_json())
    return trained.open_trained(folder)
