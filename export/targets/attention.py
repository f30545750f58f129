"""The optional output `cross_attention` of a decoder's graph: how much each position reads of each source token.

Shapes: R rows, B sentences that they share, H heads, T positions of this run, S source.
"""

from __future__ import annotations

from typing import cast

import onnx_ir as ir

from export.interface import CROSS_ATTENTION
from export.nn.layers import DecoderLayer
from export.nn.model import Transformer
from export.nn.primitives import Op, scope
from export.nn.taps import Tap
from mlx_transformer.core.config import TransformerConfig
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
