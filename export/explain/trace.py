"""One pass over a sentence, and what is read off it: weights of every head, predictions, norms, the logit lens.

Shapes: L positions of a stack, S source, T target, D model, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export.validate.opening import Opened
from export.validate.points import inner_names, tap_names
from export.validate.reference.layers import softmax
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

from .sentence import ExplainedSentence

Array = NDArray[np.float32]

KINDS = {
    "encoder": ("encoder", "self_attention"),
    "decoder": ("decoder", "self_attention"),
    "cross": ("decoder", "cross_attention"),
}
"""The place of each kind of attention: its stack, and the sub-layer in each layer."""


@dataclass(frozen=True)
class Trace:
    """`points`: {tap: (L, D)}, without those that the runtime doesn't show. `weights`: {kind: (layers, H, L, S)}.
    `logits` (L, V): of the decoder, or of an encoder alone. `lens`: {tap: logits (L, V)} of each layer, read as if it
    were the last one. An encoder whose head gives no words gives something else in place of logits, and has no lens."""

    points: Mapping[str, Array]
    weights: Mapping[str, Array]
    logits: Array
    lens: Mapping[str, Array]


def trace(model: Opened, sentence: ExplainedSentence) -> Trace:
    """Run the model once. `UserError` if its graphs don't show what is looked for, or it computes no finite numbers."""
    config = model.config
    names = [*tap_names(config), *(name for name in inner_names(config) if name.endswith(".weights"))]
    points_of = model.engine.points(sentence.case(config), names)
    if "logits" not in points_of or any(name not in points_of for name in names if name.endswith(".weights")):
        raise UserError(f"{model.folder}: its graphs don't name what is inside them; export the model again")
    values = {name: np.asarray(value, np.float32)[0] for name, value in points_of.items()}
    if not all(np.isfinite(value).all() for value in values.values()):
        raise UserError(f"{model.folder}: computes numbers that are not finite; check its weights")
    weights = {
        kind: np.stack([values[f"{stack}.layers.{i}.{part}.weights"] for i in range(layers_of(config, stack))])
        for kind, (stack, part) in KINDS.items()
        if f"{stack}.layers.0.{part}.weights" in values
    }
    stacks = [name for name in tap_names(config) if name.startswith(("encoder.", "decoder."))]
    points = {name: values[name] for name in stacks if name in values}
    return Trace(points, weights, values["logits"], _lens(model, points) if gives_words(config) else {})


def layers_of(config: TransformerConfig, stack: str) -> int:
    return config.encoder_layers if stack == "encoder" else config.decoder_layers


def gives_words(config: TransformerConfig) -> bool:
    """Return whether its logits are of the vocabulary."""
    return config.head.kind == "vocabulary"


def written_by(config: TransformerConfig) -> str:
    """Return the stack whose output the classifier reads."""
    return "decoder" if config.has_decoder else "encoder"


def probabilities(logits: Array) -> NDArray[np.float64]:
    """Return the softmax over the vocabulary, in float64."""
    return softmax(logits.astype(np.float64))


def most_likely(probability: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return the ids (L, count) of the likeliest tokens, falling; on ties the lowest id."""
    return np.argsort(-probability, axis=-1, kind="stable")[:, :count]


def norms(points: Mapping[str, Array]) -> dict[str, Array]:
    """Return {tap: (L,) Euclidean norm of the vector at each position}."""
    return {name: np.linalg.norm(value, axis=-1) for name, value in points.items()}


def _lens(model: Opened, points: Mapping[str, Array]) -> dict[str, Array]:
    """Read every layer's output with the norm after the stack, where there is one, the head and the classifier
    (nostalgebraist 2020)."""
    config, stack = model.config, written_by(model.config)
    first = "embedding_norm" if config.embedding_norm else "embedding"
    names = [f"{stack}.{first}", *(f"{stack}.layers.{i}" for i in range(layers_of(config, stack)))]
    reference = model.reference
    read = {}
    for name in names:
        if name in points:
            x = reference.final_norm(stack, points[name][None], None)
            x = reference.head(x, np.ones(x.shape[:2], bool), None) if stack == "encoder" else x
            read[name] = reference.classify(x, None)[0]
    return read
