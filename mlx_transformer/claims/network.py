"""Numbers of the rows about embeddings, norms, residual connections, stacks, classifier and decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx
import mlx.optimizers
import numpy as np
from mlx import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.feedforward import FeedForward
from mlx_transformer.nn.parameters import named_parameters

from .measure import how_many, largest, number
from .row import Found

SENTENCES = ("she sat on the river bank", "he owes the city bank")


def tiny(seed: int = 0, **changes: object) -> Transformer:
    """2+2 layers of width 32 with fresh weights, in evaluation mode."""
    mx.random.seed(seed)
    model = Transformer(TransformerConfig.preset("tiny", 24, **{"d_model": 32, "d_ff": 64, **changes}))
    model.eval()
    return model


def one_hot() -> Found:
    model = tiny(scale_embeddings=False)
    ids = mx.array([[5, 0, 23, 5]])
    product = (ids[..., None] == mx.arange(24)).astype(mx.float32) @ model.embedding.weight
    return {"largest |one-hot @ W - lookup|": largest(model.embed_source(ids) - product)}


def feed_forward() -> Found:
    network, x = base_feed_forward()
    found, weights = np.array(network(x), dtype=np.float64), _float64(network)
    inner = np.array(x, dtype=np.float64) @ weights["up_proj.weight"].T + weights["up_proj.bias"]
    order = mx.array([6, 2, 0, 5, 1, 3, 4])
    changed = mx.abs(network(x.at[:, 3].add(1.0)) - network(x)).max(axis=(0, 2))
    missed = {
        "an identity in place of max": formula_of_feed_forward(weights, x, activation=lambda z: z),
        "b_1 left out": formula_of_feed_forward(weights | {"up_proj.bias": np.zeros(1)}, x),
        "b_2 left out": formula_of_feed_forward(weights | {"down_proj.bias": np.zeros(1)}, x),
    }
    return {
        "parameters of the base model's, 512 to 2048 to 512": sum(weight.size for weight in weights.values()),
        "largest |FFN(x) - the formula in float64|": np.abs(found - formula_of_feed_forward(weights, x)).max(),
        **{f"the same, {name}": np.abs(found - wrong).max() for name, wrong in missed.items()},
        "share of the inner units that max sets to 0": float(np.mean(inner <= 0)),
        "largest |FFN(P x) - P FFN(x)|": largest(network(x[:, order]) - network(x)[:, order]),
        "change of the other positions, one moved by 1": largest(changed[mx.array([0, 1, 2, 4, 5, 6])]),
        "of itself": number(changed[3]),
    }


def base_feed_forward() -> tuple[FeedForward, mx.array]:
    """The net of the paper's base model, and seven positions of two sentences."""
    mx.random.seed(0)
    return FeedForward(TransformerConfig.preset("base", 8, dropout=0.0)), mx.random.normal((2, 7, 512))


def formula_of_feed_forward(
    weights: dict[str, np.ndarray], x: mx.array, activation: Callable[[np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """max(0, x W_1 + b_1) W_2 + b_2 in float64; weights by their names in `FeedForward`, which stores W^T."""
    inner = np.array(x, dtype=np.float64) @ weights["up_proj.weight"].T + weights["up_proj.bias"]
    inner = np.maximum(0, inner) if activation is None else activation(inner)
    return inner @ weights["down_proj.weight"].T + weights["down_proj.bias"]


def _float64(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: np.array(value, dtype=np.float64) for name, value in named_parameters(module)}


def stacks() -> Found:
    first, last = copying_losses()
    return {
        "change of a result by padding": padding_change(),
        "loss of a 2+2 stack that copies five words of nine, first step": first,
        "after 150 steps": last,
    }


def padding_change() -> float:
    model = tiny()
    source, target = [5, 6, 7, 8, 2], [1, 9, 10, 11]
    alone = model([source], [target])
    mask = [[True] * 5 + [False] * 3, [True] * 8]
    padded = model([[*source, 0, 0, 0], [7] * 8], [[*target, 0, 0], [1] * 6], mask)
    return largest(padded[:1, :4] - alone)


@lru_cache
def copying_losses() -> tuple[float, float]:
    """The first and the last loss of 150 steps."""
    losses = copying(tiny(dropout=0.0), 150)
    return losses[0], losses[-1]


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


def classifier() -> Found:
    logits = tiny()([[5, 6, 7, 2]], [[1, 9, 10]])
    probabilities = mx.softmax(logits, axis=-1)
    moved = how_many(mx.argmax(probabilities, -1) != mx.argmax(logits, -1))
    return {
        "sums of the probabilities of 24 words": probabilities.sum(-1)[0].tolist(),
        "positions where the most probable word is not that of the largest logit": moved,
    }


def greedy() -> Found:
    """Steps with a cache beside the teacher-forced pass over what they chose."""
    model = tiny()
    source = [[5, 6, 7, 8, 2], [9, 10, 11, 12, 2]]
    memory = model.encode(source)
    cache = model.start(memory)
    tokens, stepped = mx.array([[1], [1]]), []
    for _ in range(9):
        logits = model.step(tokens[:, -1:], cache)
        stepped.append(logits)
        tokens = mx.concatenate([tokens, mx.argmax(logits, axis=-1)], axis=1)
    forced = model.decode(tokens[:, :-1], memory)
    return {
        "largest |logit of a cached step - teacher-forced|": largest(mx.concatenate(stepped, 1) - forced),
        "words that both choose differently, of 18": how_many(mx.argmax(forced, -1) != tokens[:, 1:]),
    }


def contextual() -> Found:
    embedded, encoded = (float(np.abs(rows[0] - rows[1]).max()) for rows in bank())
    return {
        "largest change of the embedding of bank between two sentences": embedded,
        "of the encoder's output": encoded,
    }


def bank() -> tuple[np.ndarray, np.ndarray]:
    """The last word of both sentences, at the same place, before the encoder and after it: (2, 32) each."""
    vocabulary = sorted({word for text in SENTENCES for word in text.split()})
    rows = [[3 + vocabulary.index(word) for word in text.split()[-5:]] for text in SENTENCES]
    seen: dict[str, mx.array] = {}
    memory = tiny(architecture="encoder", decoder_layers=0).encode(rows, tap=seen.__setitem__)
    return np.array(seen["encoder.embedding"][:, -1]), np.array(memory[:, -1])
