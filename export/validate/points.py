"""The named points of the network, with the same names in every runtime, and the operation behind each.

Taps, from input to output:

    encoder.embedding  encoder.layers.0.self_attention  encoder.layers.0.feed_forward  encoder.layers.0  encoder.norm
    decoder.embedding  decoder.layers.0.self_attention  decoder.layers.0.cross_attention  ...  decoder.norm  logits

Points inside the sub-layers:

    attention       query_proj key_proj value_proj [query_norm key_norm] queries keys values scores weights context,
                    then the tap itself
    SSRU            input_proj forget_proj states state (the last state, kept for the next step), then the tap itself
    feed-forward    up_proj gate_proj inner, then the tap itself
    around each     X_norm (the norm of sub-layer X), X_post_norm (the norm behind it), X.residual (the sum)
    embedding       rows scaled, then the tap itself, and the tap of its norm, if any

Points of keys and values have names that begin with "key" or "value". In cross-attention their positions are the
source's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import SINUSOIDS, TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes

from .reference import Reference


def tap_names(config: TransformerConfig) -> list[str]:
    """Names of the taps of a full pass."""
    return list(_points(config, inner_points=False))


def inner_names(config: TransformerConfig) -> list[str]:
    """Names of all points, also inside the sub-layers; the source's keys and values come first."""
    return list(_points(config, inner_points=True))


@cache
def _points(config: TransformerConfig, inner_points: bool) -> tuple[str, ...]:
    """Collect the names of the reference's taps, with an empty batch and broadcast weights (no memory)."""
    weights = {name: np.broadcast_to(0.0, shape) for name, shape in parameter_shapes(config).items()}
    ids = np.zeros((0, 1), np.int64)
    names: list[str] = []
    reference = Reference(config, weights, inner_points=inner_points)
    reference(
        ids, ids if config.architecture == "encoder-decoder" else None, tap=lambda name, value: names.append(name)
    )
    return tuple(names)


Array = NDArray

OPERATIONS = {
    "rows": "embedding row",
    "scaled": "embedding scale",
    "query_proj": "query projection",
    "key_proj": "key projection",
    "value_proj": "value projection",
    "query_norm": "RMS norm of each head's queries",
    "key_norm": "RMS norm of each head's keys",
    "queries": "queries: heads split, rotary positions",
    "keys": "keys: heads split, rotary positions, earlier keys from the cache",
    "values": "values: heads split, earlier values from the cache",
    "scores": "scores: Q K^T / sqrt(d_k)",
    "weights": "mask and softmax",
    "context": "weights times values, heads merged",
    "input_proj": "input projection",
    "forget_proj": "forget projection",
    "states": "states: f c + (1 - f) u, f the sigmoid of the forget projection",
    "state": "the state that is kept: that of the last position, before the ReLU",
    "self_attention": "output projection",
    "cross_attention": "output projection",
    "up_proj": "up projection",
    "gate_proj": "gate projection",
    "inner": "activation",
    "feed_forward": "down projection",
    "residual": "residual connection",
    "head_proj": "dense layer of the head",
    "logits": "classifier",
}


HEADS = ("queries", "keys", "values")
"""Inputs of the attention itself (scores, softmax, weighted sum), which isn't a module with parameters."""


def operation(point: str, config: TransformerConfig) -> str:
    """Name the operation behind a point in words, e.g. "query projection"."""
    last = point.rpartition(".")[2]
    if last == "scores":
        scale, cap = config.at(point).attention_scale, config.at(point).score_cap
        scores = OPERATIONS[last] if scale is None else f"scores: Q K^T times {scale:g}"
        return scores if cap is None else f"{scores}, bounded by {cap:g}"
    if last == "self_attention" and point.startswith("decoder.") and config.recurrent:
        return "ReLU of the states"
    if last == "head" and not config.head.norm:
        return OPERATIONS["inner"]
    if last in ("query_norm", "key_norm") and config.at(point).query_key_norm_place == "width":
        return OPERATIONS[last].replace("each head's", "all")
    if last in OPERATIONS:
        return OPERATIONS[last]
    if last == "embedding":
        added = ["token types"] * bool(config.token_types)
        added += ["positions"] * (config.positions in (*SINUSOIDS, "learned"))
        return " and ".join(added) or "embedding"
    norm = "layer norm" if config.norm == "layernorm" else "RMS norm"
    if last.isdigit():  # a layer's output, e.g. encoder.layers.0
        return norm if config.norm_placement == "post" else OPERATIONS["residual"]
    return f"{norm} after the stack" if last == "norm" else norm


def makers(points: Iterable[str], parameters: Iterable[str]) -> dict[str, str]:
    """Return {point: the module with parameters behind it}.

    A module computes the point of its own name, or else its parent's point: an attention's output projection computes
    the attention's output, e.g. {"encoder.layers.0.self_attention": "encoder.layers.0.self_attention.output_proj"}.
    """
    known, modules = set(points), {}
    for module in dict.fromkeys(name.rpartition(".")[0] for name in parameters):
        modules[module if module in known else module.rpartition(".")[0]] = module
    return {point: module for point, module in modules.items() if point in known}


def modules_between(points: Sequence[str], parameters: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (module, point before it, its own point) for each of `makers`, in the order of the points.

    The point before it is "" if a module computes that point. It is named for a sum, an activation or merged heads.
    """
    parameters = list(parameters)
    made = makers(points, parameters)
    modules = {path for name in parameters for path in accumulate(name.split("."), "{}.{}".format)}
    for earlier, point in pairwise(["", *points]):
        if point in made:
            place = made[point].rpartition(".")[0]
            read = earlier.startswith(f"{place}.") and earlier.rpartition(".")[2] not in HEADS
            yield made[point], earlier if read and earlier not in modules else "", point


def positions_first(value: Array) -> Array:
    """Move positions to the second axis: (B,H,L,d) -> (B,L,H,d); an SSRU's state (B,D) -> (B,1,D)."""
    return value.swapaxes(1, 2) if value.ndim == 4 else value[:, None] if value.ndim == 2 else value
