"""A checkpoint of a few bytes, for tests of its files."""

from __future__ import annotations

import numpy as np

from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.system.errors import UserError

CONFIG = TransformerConfig(
    vocab_size=5, d_model=2, heads=1, d_ff=2, encoder_layers=1, decoder_layers=1, feed_forward_bias=False
)
TOKENIZER = '{"any": "text, é"}\n'


def weights(value=1.0, config=CONFIG):
    rng = np.random.default_rng(0)
    return {
        name: (rng.normal(size=shape) + value).astype(np.float32) for name, shape in parameter_shapes(config).items()
    }


def saved(folder, value=1.0):
    extra = {"optimizer.safetensors": {"step": np.array(7, np.uint64), "m": np.ones((2, 3))[:, ::2]}}
    return save_checkpoint(
        folder, CONFIG, weights(value), TOKENIZER, force=True, texts={"state.json": "{}"}, tensors=extra
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def value_of(folder):
    return open_checkpoint(folder).tensor("embedding.weight")[0, 0] - weights(0.0)["embedding.weight"][0, 0]


def refusal(function, *arguments):
    """The message of a `UserError`, or None."""
    try:
        function(*arguments)
    except UserError as error:
        return str(error)
