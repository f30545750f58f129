"""Numbers of the rows about embeddings, norms, residual connections, stacks, classifier and decoding."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import mlx.optimizers
import numpy as np
from mlx import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.feedforward import FeedForward
from mlx_transformer.nn.taps import no_tap
from mlx_transformer.runtime.transformer import Transformer

from .measure import how_many, largest, number
from .row import Found

DEPTHS = (1, 2, 4, 8, 16, 24)
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


def residuals() -> Found:
    _, kept, lost = gradients_by_depth()
    return {
        "gradient at depth 24 / at depth 2, with the residual": kept[-1] / kept[1],
        "the same without it": lost[-1] / lost[1],
        "largest |LayerNorm(x + Sublayer(x)) - output| of a layer": sublayer_error(),
    }


@lru_cache
def gradients_by_depth() -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Norm of the gradient of a random projection of the stack's output by its input, at `DEPTHS`, with residual
    connections and norms, and of the bare sub-layers; geometric mean over four seeds."""
    found = [[_gradient(depth, residual) for depth in DEPTHS] for residual in (True, False)]
    return DEPTHS, np.array(found[0]), np.array(found[1])


def _gradient(depth: int, residual: bool) -> float:
    norms = []
    for seed in range(4):
        model = tiny(seed, architecture="encoder", encoder_layers=depth, decoder_layers=0, dropout=0.0)
        x, direction = mx.random.normal((1, 16, 32)), mx.random.normal((1, 16, 32))

        def output(x: mx.array, layers: list = model.encoder.layers, direction: mx.array = direction) -> mx.array:
            for layer in layers:
                x = layer(x) if residual else layer.transform(layer.attend_self(x, None, None, no_tap), no_tap)
            return mx.sum(x * direction)

        norms.append(number(mx.linalg.norm(mx.grad(output)(x))))
    return float(np.exp(np.mean(np.log(norms))))


def sublayer_error() -> float:
    model = tiny()
    seen: dict[str, mx.array] = {}
    ids = mx.array([[5, 6, 7, 2]])
    model(ids, ids, tap=seen.__setitem__)
    layer, x = model.decoder.layers[0], seen["decoder.embedding"]
    for sub_layer in ("self_attention", "cross_attention", "feed_forward"):
        x = layer[f"{sub_layer}_norm"](x + seen[f"decoder.layers.0.{sub_layer}"])
    return largest(x - seen["decoder.layers.0"])


def feed_forward() -> Found:
    mx.random.seed(0)
    network = FeedForward(TransformerConfig(vocab_size=8, d_model=32, heads=4, d_ff=64))
    x = mx.random.normal((2, 7, 32))
    order = mx.array([6, 2, 0, 5, 1, 3, 4])
    changed = mx.abs(network(x.at[:, 3].add(1.0)) - network(x)).max(axis=(0, 2))
    return {
        "largest |FFN(P x) - P FFN(x)|": largest(network(x[:, order]) - network(x)[:, order]),
        "change of the other positions, one moved by 1": largest(changed[mx.array([0, 1, 2, 4, 5, 6])]),
        "of itself": number(changed[3]),
    }


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
    """Loss in nats a word at the first and after the last of 150 steps of Adam as in the paper."""
    model = tiny(dropout=0.0)
    optimizer = mlx.optimizers.Adam(3e-3, betas=[0.9, 0.98], eps=1e-9, bias_correction=True)

    def loss(model: Transformer, source: mx.array, target: mx.array) -> mx.array:
        return mx.mean(nn.losses.cross_entropy(model(source, target[:, :-1]), target[:, 1:]))

    step, losses = nn.value_and_grad(model, loss), []
    for _ in range(150):
        words = mx.random.randint(3, 12, (32, 5))
        target = mx.concatenate([mx.full((32, 1), 1), words, mx.full((32, 1), 2)], axis=1)
        value, gradients = step(model, words, target)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state)
        losses.append(number(value))
    return losses[0], losses[-1]


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
