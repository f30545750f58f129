"""The random networks that the rows look at: small, always of the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.optimizers
import numpy as np
from mlx import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.runtime.transformer import Transformer

from .measure import number


def tiny(seed: int = 0, **changes: object) -> Transformer:
    """2+2 layers of width 32 with fresh weights, in evaluation mode."""
    mx.random.seed(seed)
    model = Transformer(TransformerConfig.preset("tiny", 24, **{"d_model": 32, "d_ff": 64, **changes}))
    model.eval()
    return model


def encoder(**changes: object) -> Transformer:
    """One layer of 8 heads with fresh weights, always the same ones."""
    mx.random.seed(3)
    options = dict(architecture="encoder", decoder_layers=0, encoder_layers=1, vocab_size=24, dropout=0.0)
    sizes = dict(d_model=512, heads=8, d_ff=64)
    model = Transformer(TransformerConfig.from_dict({**options, **sizes, **changes}))
    model.eval()
    return model


def ids_of(*sentences: Sequence[str]) -> list[list[int]]:
    """Rows of ids, the same word the same id in all of them."""
    vocabulary = sorted({word for words in sentences for word in words})
    return [[3 + vocabulary.index(word) for word in words] for words in sentences]


def sentence_weights(words: Sequence[str], positions: str) -> tuple[np.ndarray, np.ndarray]:
    """First head's weights (n, n) over a sentence with or without positions, and the layer's input (n, 512)."""
    model = encoder(positions=positions)
    return head_weights(model, ids_of(words))


def head_weights(model: Transformer, ids: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    seen: dict[str, mx.array] = {}
    model.encode(ids, tap=seen.__setitem__)
    x = seen["encoder.embedding"]
    heads = model.encoder.layers[0].self_attention
    return np.array(heads.weights(x, heads.keys_values(x)[0]))[0, 0], np.array(x)[0]


def copying(model: Transformer, steps: int) -> list[float]:
    """Loss in nats a word at each step of learning to copy five words of nine; Adam as in the paper."""
    optimizer = mlx.optimizers.Adam(3e-3, betas=[0.9, 0.98], eps=1e-9, bias_correction=True)

    def loss(model: Transformer, source: mx.array, target: mx.array) -> mx.array:
        return mx.mean(nn.losses.cross_entropy(model(source, target[:, :-1]), target[:, 1:]))

    step, losses = nn.value_and_grad(model, loss), []
    for _ in range(steps):
        words = mx.random.randint(3, 12, (32, 5))
        target = mx.concatenate([mx.full((32, 1), 1), words, mx.full((32, 1), 2)], axis=1)
        value, gradients = step(model, words, target)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state)
        losses.append(number(value))
    return losses
