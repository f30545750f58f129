"""Encoder and decoder layers, and the stacks of N layers (section 3.1, figure 1).

Shapes: B batch, S source, T target, L either, D model.

    post, as in the paper    x = Norm(x + Sublayer(x))
    pre                      x = x + Sublayer(Norm(x)), and one more Norm after the stack, as in the next two
    sandwich                 x = x + Norm(Sublayer(Norm(x)))
    after                    x = x + Norm(Sublayer(x))

With residual_scale s every + is + s *.

A tap observes tensors at named points of a forward pass. The ONNX graphs and the reference use the same names:

encoder.embedding   encoder.layers.0.self_attention   encoder.layers.0.feed_forward   encoder.layers.0   encoder.norm
decoder.embedding   decoder.layers.0.cross_attention  ...                             decoder.norm       logits
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from mlx_transformer.core.config import TransformerConfig

from .attention import Attention, MakeAttention
from .cache import KeyValues, LayerCache
from .dropout import Dropout
from .feedforward import FeedForward
from .masks import Mask
from .norms import make_norm
from .positions import PositionIds, Positions, Rotation
from .ssru import SSRU, LayerState

Tap = Callable[[str, mx.array], None]
"""Called with the name of a point and its tensor, e.g. tap("encoder.norm", x)."""


def no_tap(name: str, value: mx.array) -> None:
    """The default tap: does nothing."""


def within(tap: Tap, scope: str) -> Tap:
    """A tap that puts `scope` before every name: "norm" becomes "encoder.norm", "" becomes "encoder"."""
    if tap is no_tap:
        return no_tap
    return lambda name, value: tap(f"{scope}.{name}" if name else scope, value)


class Layer(nn.Module):
    """What the layers of both stacks share: norms, dropout and a residual connection around each sub-layer."""

    feed_forward: FeedForward
    self_attention_norm: Any
    """None in a layer without a norm there, as `cross_attention_norm` and `feed_forward_norm`."""
    cross_attention_norm: Any
    feed_forward_norm: Any

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.scale = config.residual_scale
        self.pre_norm = config.norm_placement in ("pre", "sandwich")
        self.dropout = Dropout(config.dropout)

    def add_norms(self, config: TransformerConfig, name: str, bare: bool = False) -> None:
        """Make the norms of the sub-layer `name`. bare: without a norm before it."""
        behind = config.norm_placement in ("sandwich", "after")
        setattr(self, f"{name}_norm", None if bare or config.norm_placement == "after" else make_norm(config))
        setattr(self, f"{name}_post_norm", make_norm(config) if behind else None)

    def around(self, name: str, x: mx.array, sublayer: Callable[[mx.array], mx.array]) -> mx.array:
        """x (B, L, D) after the sub-layer `name`, its norms and the residual connection."""
        norm, post_norm = getattr(self, f"{name}_norm"), getattr(self, f"{name}_post_norm")
        y = sublayer(norm(x) if norm is not None and self.pre_norm else x)
        y = y if post_norm is None else post_norm(y)
        y = y if self.scale is None else y * self.scale
        x = x + self.dropout(y)
        return x if norm is None or self.pre_norm else norm(x)

    def transform(self, x: mx.array, tap: Tap) -> mx.array:
        y = self.feed_forward(x)
        tap("feed_forward", y)
        return y


class EncoderLayer(Layer):
    """Self-attention, then feed-forward; each with dropout, a residual connection and a norm."""

    def __init__(self, config: TransformerConfig, attention: MakeAttention = Attention, first: bool = False):
        super().__init__(config)
        self.self_attention = attention(config)
        self.add_norms(config, "self_attention", bare=first and not config.first_norm)
        self.feed_forward = FeedForward(config)
        self.add_norms(config, "feed_forward")

    def __call__(self, x: mx.array, mask: Mask = None, rotation: Rotation = None, tap: Tap = no_tap) -> mx.array:
        x = self.around("self_attention", x, lambda y: self.attend_self(y, mask, rotation, tap))
        x = self.around("feed_forward", x, lambda y: self.transform(y, tap))
        tap("", x)
        return x

    def attend_self(self, x: mx.array, mask: Mask, rotation: Rotation, tap: Tap) -> mx.array:
        k, v = self.self_attention.keys_values(x, rotation)
        y = self.self_attention.attend(x, k, v, mask, rotation)
        tap("self_attention", y)
        return y


class DecoderLayer(Layer):
    """Causal self-attention (or SSRU), cross-attention to the encoder's output (unless decoder-only), feed-forward."""

    def __init__(self, config: TransformerConfig, attention: MakeAttention = Attention):
        super().__init__(config)
        self.self_attention = SSRU(config) if config.recurrent else attention(config)
        self.add_norms(config, "self_attention")
        self.has_cross = config.has_encoder
        if self.has_cross:
            self.cross_attention = attention(config)
            self.add_norms(config, "cross_attention")
        self.feed_forward = FeedForward(config)
        self.add_norms(config, "feed_forward")

    def __call__(
        self,
        x: mx.array,
        mask: Mask = None,
        rotation: Rotation = None,
        cross: KeyValues | None = None,
        cross_mask: Mask = None,
        past: LayerCache | LayerState | None = None,
        tap: Tap = no_tap,
    ) -> mx.array:
        """(B, T, D) -> (B, T, D). cross: keys and values of the encoder's output; past: cache of earlier positions."""
        x = self.around("self_attention", x, lambda y: self.attend_self(y, mask, rotation, past, tap))
        if cross is not None:
            x = self.around("cross_attention", x, lambda y: self.attend_cross(y, cross, cross_mask, tap))
        x = self.around("feed_forward", x, lambda y: self.transform(y, tap))
        tap("", x)
        return x

    def attend_self(
        self, x: mx.array, mask: Mask, rotation: Rotation, past: LayerCache | LayerState | None, tap: Tap
    ) -> mx.array:
        if isinstance(self.self_attention, SSRU):
            y = self.self_attention(x, cast(LayerState | None, past))
        else:
            k, v = self.self_attention.keys_values(x, rotation)
            y = self.self_attention.attend(x, k, v, mask, rotation, cast(LayerCache | None, past))
        tap("self_attention", y)
        return y

    def attend_cross(self, x: mx.array, cross: KeyValues, mask: Mask, tap: Tap) -> mx.array:
        k, v = cross
        y = self.cross_attention.attend(x, k, v, mask, rows=k.shape[0])
        tap("cross_attention", y)
        return y


class Encoder(nn.Module):
    """Adds positions, applies dropout, then N encoder layers."""

    def __init__(self, config: TransformerConfig, attention: MakeAttention = Attention):
        super().__init__()
        self.config = config
        self.positions = Positions(config, "encoder")
        if config.embedding_norm:
            self.embedding_norm = make_norm(config)
        self.dropout = Dropout(config.dropout)
        layers = enumerate(config.layers("encoder"))
        self.layers = [EncoderLayer(layer, attention, first=i == 0) for i, layer in layers]
        if config.norm_placement != "post":
            self.norm = make_norm(config)

    def __call__(self, x: mx.array, position_ids: PositionIds, mask: Mask = None, tap: Tap = no_tap) -> mx.array:
        """Encode scaled embeddings (B, S, D) to the memory (B, S, D)."""
        x, rotations, masks = self.positions(x, position_ids, mask)
        tap("embedding", x)
        if self.config.embedding_norm:
            x = self.embedding_norm(x)
            tap("embedding_norm", x)
        x = self.dropout(x)
        for i, (layer, rotation, mask) in enumerate(zip(self.layers, rotations, masks, strict=True)):
            x = layer(x, mask, rotation, within(tap, f"layers.{i}"))
        if self.config.norm_placement != "post":
            x = self.norm(x)
            tap("norm", x)
        return x


class Decoder(nn.Module):
    """Adds positions, applies dropout, then N decoder layers."""

    def __init__(self, config: TransformerConfig, attention: MakeAttention = Attention):
        super().__init__()
        self.config = config
        self.positions = Positions(config, "decoder")
        if config.embedding_norm:
            self.embedding_norm = make_norm(config)
        self.dropout = Dropout(config.dropout)
        self.layers = [DecoderLayer(layer, attention) for layer in config.layers("decoder")]
        if config.norm_placement != "post":
            self.norm = make_norm(config)

    def __call__(
        self,
        x: mx.array,
        position_ids: PositionIds,
        mask: Mask = None,
        cross: Sequence[KeyValues] | None = None,
        cross_mask: Mask = None,
        past: Sequence[LayerCache | LayerState] | None = None,
        tap: Tap = no_tap,
    ) -> mx.array:
        """Decode scaled embeddings (B, T, D) to the classifier's input (B, T, D)."""
        x, rotations, masks = self.positions(x, position_ids, mask)
        tap("embedding", x)
        if self.config.embedding_norm:
            x = self.embedding_norm(x)
            tap("embedding_norm", x)
        x = self.dropout(x)
        for i, (layer, rotation, mask) in enumerate(zip(self.layers, rotations, masks, strict=True)):
            layer_cross = None if cross is None else cross[i]
            layer_past = None if past is None else past[i]
            x = layer(x, mask, rotation, layer_cross, cross_mask, layer_past, within(tap, f"layers.{i}"))
        if self.config.norm_placement != "post":
            x = self.norm(x)
            tap("norm", x)
        return x

    def cross_keys_values(self, memory: mx.array) -> list[KeyValues]:
        """Keys and values of the encoder's output (B, S, D) for each layer; computed once for all decoding steps."""
        return [layer.cross_attention.keys_values(memory) for layer in self.layers]
