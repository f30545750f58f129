"""The optional output `cross_attention` of a decoder's graph: how much each position reads of each source token.

Shapes: R rows, B sentences that they share, H heads, T positions of this run, S source.

The results of the head of an encoder alone, as outputs of a graph.
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
    """Check which layer's weights are returned: by default that which aligns best; None without `attention`.
    `UserError` for a model without cross-attention, and for a layer that it hasn't."""
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
    """The weights of one layer's cross-attention, of a step that is built with `tap`; none without a layer."""

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
        """Return the mean over the heads, in rows as the ids (R, T) or (R,) have them: (R, T, S) or (R, S)."""
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
    """Return the outputs by value, of the last layer (B, S, D) and, where the head gives one vector of each row, the
    `weights` (B, 1, S) of its positions. placed: puts what is given for tokens (N, ...) in their places (B, S, ...)."""
    kind = model.config.head.kind
    logits = placed(model.logits(op, model.transformed(op, memory, weights, tap=tap), tap=tap))
    if kind == "spans":
        return {value: op.Gather(logits, i, axis=2) for i, value in enumerate(SPANS)}
    return {} if kind == "hidden" else {"pooled" if kind == "pooled" else "logits": logits}
