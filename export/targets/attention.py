"""Outputs beside the logits: cross-attention weights of a decoder, and the results of an encoder-only model's head.

`cross_attention` is optional: how much each target position reads of each source token.

Shapes: R rows, B sentences (R/B rows each), N tokens, H heads, T positions of this run, S source, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import onnx_ir as ir

from export.interface import CROSS_ATTENTION
from export.nn.layers import DecoderLayer, Tap
from export.nn.model import Transformer
from export.nn.primitives import Op, scope
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import SPANS
from mlx_transformer.generation.alignment import alignment_layer
from mlx_transformer.system.errors import UserError


def requested_layer(config: TransformerConfig, attention: bool, layer: int | None) -> int | None:
    """The layer whose weights a graph returns: `layer`, by default the layer for alignments; None without attention.

    Raises `UserError` if the model has no cross-attention, or not this layer.
    """
    if not attention and layer is None:
        return None
    if config.architecture != "encoder-decoder":
        raise UserError(f"attention: architecture={config.architecture!r} has no source to attend to; leave it out")
    if layer is not None and not 0 <= layer < config.decoder_layers:
        raise UserError(
            "{attention_layer}: the decoder has layers 0 to {}", config.decoder_layers - 1, attention_layer=layer
        )
    return alignment_layer(config) if layer is None else layer


class AttentionTap:
    """Catches one layer's cross-attention weights while a step is built with `tap`; nothing if `layer` is None."""

    def __init__(self, model: Transformer, layer: int | None, tap: Tap):
        self._tap, self._name = tap, f"decoder.layers.{layer}.cross_attention.weights"
        self._weights: ir.Value | None = None
        if layer is not None:
            cast(DecoderLayer, model.decoder.layers[layer]).tap_weights()

    def tap(self, name: str, value: ir.Value) -> None:
        if name == self._name:
            self._weights = value
        else:
            self._tap(name, value)

    def mean(self, op: Op, ids: ir.Value) -> ir.Value | None:
        """The mean over the heads: (R, T, S) for ids (R, T), (R, S) for ids (R,); None without a layer."""
        if self._weights is None:
            return None
        with scope(op, CROSS_ATTENTION, "Mean"):
            mean = op.ReduceMean(self._weights, [1], keepdims=0)  # (B, R/B*T, S)
            return op.Reshape(mean, op.Concat(op.Shape(ids), [-1], axis=0))


def head_outputs(
    op: Op,
    model: Transformer,
    memory: ir.Value,
    weights: ir.Value | None,
    tap: Tap,
    placed: Callable[[ir.Value], ir.Value] = lambda y: y,
) -> dict[str, ir.Value]:
    """The head's outputs {value: output}, e.g. "logits", computed from the last layer's `memory` (B, S, D).

    weights (B, 1, S): of the positions, if the head gives one vector per row. placed: moves results of tokens (N, ...)
    to their places (B, S, ...), if `memory` has one row per token.
    """
    kind = model.config.head.kind
    logits = placed(model.logits(op, model.transformed(op, memory, weights, tap=tap), tap=tap))
    if kind == "spans":
        return {value: op.Gather(logits, i, axis=2) for i, value in enumerate(SPANS)}
    return {} if kind == "hidden" else {"pooled" if kind == "pooled" else "logits": logits}
