"""The random networks that the rows look at: small, always of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.optimizers
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.attention import Attention, MakeAttention
from mlx_transformer.nn.masks import as_array, as_numbers
from mlx_transformer.runtime.transformer import Transformer

from .measure import number


def tiny(seed: int = 0, **changes: object) -> Transformer:
    """2+2 layers of width 32 with fresh weights, in evaluation mode."""
    mx.random.seed(seed)
    model = Transformer(TransformerConfig.preset("tiny", 24, **{"d_model": 32, "d_ff": 64, **changes}))
    model.eval()
    return model


def encoder(make: MakeAttention = Attention, **changes: object) -> Transformer:
    """One layer of 8 heads with fresh weights, always the same ones. make: its attention."""
    mx.random.seed(3)
    options = dict(architecture="encoder", decoder_layers=0, encoder_layers=1, vocab_size=24, dropout=0.0)
    sizes = dict(d_model=512, heads=8, d_ff=64)
    model = Transformer(TransformerConfig.from_dict({**options, **sizes, **changes}), make)
    model.eval()
    return model


def all_scores(ids: list[int], positions: str) -> np.ndarray:
    """Return the scores that the softmax of each head is given, (heads, n, n), over one sentence."""
    seen: list[mx.array] = []

    class Watched(Attention):
        def kernel(self, q: mx.array, k: mx.array, v: mx.array, mask: Any, past: Any) -> mx.array:
            scores = (q * self.scale) @ k.swapaxes(-1, -2)
            array = as_array(mask, *scores.shape[-2:])
            seen.append(scores if array is None else scores + as_numbers(array, scores.dtype))
            return super().kernel(q, k, v, mask, past)

    encoder(Watched, positions=positions).encode([ids])
    return np.array(seen[0], dtype=np.float64)[0]


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


FIRST, WORDS = 3, 9
"""Id of the first word that is copied, and how many there are."""

START, END = 1, 2

Batch = tuple[mx.array, mx.array]


def trained(
    model: Any, loss: Callable[..., mx.array], batch: Callable[[int], tuple[Any, ...]], steps: int
) -> list[float]:
    """Loss at each step of training on batches by their number; Adam as in the paper, which takes all parameters as one
    vector: one by one, so many small ones took a third of the time."""
    optimizer = mlx.optimizers.Adam(3e-3, betas=[0.9, 0.98], eps=1e-9, bias_correction=True)
    step, losses = nn.value_and_grad(model, loss), []
    named: Any = tree_flatten(model.trainable_parameters())
    ends = np.cumsum([array.size for _, array in named])[:-1].tolist()
    for i in range(steps):
        value, gradients = step(model, *batch(i))
        changed = optimizer.apply_gradients(_vector(gradients), _vector(model.trainable_parameters()))["all"]
        parts = zip(named, mx.split(changed, ends), strict=True)
        model.update(tree_unflatten([(name, part.reshape(array.shape)) for (name, array), part in parts]))
        mx.eval(model.state, optimizer.state)
        losses.append(number(value))
    return losses


def _vector(tree: Any) -> dict[str, mx.array]:
    """Return all arrays of a tree in one, in the form that an optimizer takes."""
    named: Any = tree_flatten(tree)
    return {"all": mx.concatenate([array.reshape(-1) for _, array in named])}


def copied(first: int, last: int) -> Callable[[int], Batch]:
    """Batches of one length each, from `first` to `last` words: sources, and targets from start to end."""

    def batch(i: int) -> Batch:
        words = mx.random.randint(FIRST, FIRST + WORDS, (32, first + i % (last - first + 1)))
        edge = mx.ones((32, 1), mx.int32)
        return words, mx.concatenate([START * edge, words, END * edge], axis=1)

    return batch


def copying_loss(model: Transformer, source: mx.array, target: mx.array) -> mx.array:
    return mx.mean(nn.losses.cross_entropy(model(source, target[:, :-1]), target[:, 1:]))


def copying(model: Transformer, steps: int) -> list[float]:
    """Loss in nats a word at each step of learning to copy five words of nine."""
    return trained(model, copying_loss, copied(5, 5), steps)
