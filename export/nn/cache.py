"""The cache of decoding: keys and values of each layer, or the state of its SSRU. A step computes new positions only.

Shapes: R rows (sentences x beams), B sentences, K key-value heads, L new positions, P past positions, d one head.

In a graph the cache is inputs and outputs: `past_key_values.*` come in, `present.*`, extended by the new positions, go
out. The runtime repeats, reorders and drops rows between two runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from mlx_transformer.core.config import TransformerConfig

from .masks import Mask, causal_mask, causal_padding_mask, padding_mask
from .positions import PositionIds, positions_after
from .primitives import Op, size
from .ssru import LayerState

KeyValues = tuple[ir.Value, ir.Value]
"""Keys (rows, K, length, d_k) and values (rows, K, length, d_v)."""


class LayerCache:
    """Self-attention keys and values of a layer."""

    def __init__(self, keys: ir.Value | None = None, values: ir.Value | None = None) -> None:
        self.keys = keys
        self.values = values

    def extend(self, op: Op, k: ir.Value, v: ir.Value) -> KeyValues:
        """Append keys and values (R, K, L, d); return all of them so far, (R, K, P+L, d)."""
        if self.keys is None or self.values is None:
            self.keys, self.values = k, v
        else:
            self.keys = op.Concat(self.keys, k, axis=2)  # (R, K, P+L, d_k)
            self.values = op.Concat(self.values, v, axis=2)  # (R, K, P+L, d_v)
        return self.keys, self.values

    def contents(self) -> KeyValues:
        """All keys and values so far; ValueError if there are none yet."""
        if self.keys is None or self.values is None:
            raise ValueError("an empty layer cache holds nothing")
        return self.keys, self.values


class Cache:
    """Caches of all layers for one batch; made from a graph's inputs, extended by `Transformer.step`."""

    def __init__(
        self,
        op: Op,
        layers: Sequence[LayerCache | LayerState],
        cross: Sequence[KeyValues] | None = None,
        source_tokens: ir.Value | None = None,
        tokens: ir.Value | None = None,
        index: ir.Value | None = None,
    ):
        keys = layers[0].keys if isinstance(layers[0], LayerCache) else None
        self.offset = None if keys is None else size(op, keys, 2)
        """Positions decoded so far, padding included (scalar); None without past keys to count."""
        self.layers = layers
        self.tokens = tokens
        """Decoder-only: past and new tokens (R, P+L), 0 on padding."""
        self.index = index
        """Positions of the new tokens (R, L), if they can't be counted from the past: padding in a decoder-only model
        takes no position, and an SSRU's state has no length."""
        self.cross = cross
        self.cross_mask: Mask = None
        if source_tokens is not None:
            self.cross_mask = padding_mask(op, source_tokens)

    def position_ids(self, op: Op, ids: ir.Value) -> PositionIds:
        """Positions of the new tokens `ids` (R, L)."""
        return positions_after(op, self.offset, size(op, ids, 1), self.index)

    def self_mask(self, op: Op, position_ids: PositionIds) -> Mask:
        """Self-attention mask of the new positions over cached and new positions; the same in every layer."""
        if self.tokens is not None:
            return causal_padding_mask(op, self.tokens, position_ids.distances)
        return causal_mask(op, position_ids.distances)


def empty_layers(config: TransformerConfig) -> list[LayerCache | LayerState]:
    """Empty caches, one for each decoder layer."""
    return [LayerState() if config.recurrent else LayerCache() for _ in range(config.decoder_layers)]
