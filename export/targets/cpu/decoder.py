"""The network of a decoder alone in target `cpu`: texts of any lengths, whose keys and values never move.

GroupQueryAttention turns queries and keys, writes the new keys and values into buffers, and attends; heads that share
keys aren't repeated. What the operator can't do is done by the operators of `network.py` around it:

    heads of another width than a multiple of 8          padded with zeros
    keys and values of unequal widths                    padded too
    norms of queries and keys                            before the operator
    rotary positions of a part of a head (unless whole   turned before the operator
      registers), of padded heads, or under a norm

It has no relative positions, and a longrope's frequencies would depend on the length: `lacks` names such models, for
which the portable graph is written.

Shapes: R texts, S new tokens of each (R or S is 1), N = R*S rows, W wanted rows, L positions of a buffer, D model,
H heads, K key-value heads, d width of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import onnx_ir as ir

from export.interface import grouped_shape
from export.nn.cache import Cache, LayerCache
from export.nn.layers import DecoderLayer
from export.nn.marks import FEW_ROWS
from export.nn.masks import Mask
from export.nn.model import Transformer
from export.nn.positions import PositionIds, Positions, Rotation, distances, rotary_table
from export.nn.primitives import Op, name_parameters
from mlx_transformer.core.config import RELATIVE, TransformerConfig
from mlx_transformer.core.positions import borders

from .network import DOMAIN, CpuAttention, as_operand


def lacks(config: TransformerConfig) -> str | None:
    """The kind of model, if target cpu has no graphs for it; they are decoders alone."""
    if config.architecture != "decoder":
        return None
    if config.positions in RELATIVE:
        return f"decoders alone with positions={config.positions!r}, which its attention lacks"
    if config.recurrent or not config.decoder_layers:
        return "decoders alone without attention"
    return "longrope, whose frequencies depend on the length of a text" if borders(config) else None


def turns_inside(layer: TransformerConfig) -> bool:
    """Whether the operator itself turns queries and keys of this layer, by the tables of all positions."""
    normed_after = layer.query_key_norm and layer.query_key_norm_place == "after"
    whole = grouped_shape(layer).key_width == layer.d_k and layer.d_k % 16 == 0 and layer.turned % 16 == 0
    return layer.positions == "rotary" and whole and not normed_after


class Buffers(LayerCache):
    """A layer's keys and values (R, K, L, d), to which the operator itself writes."""

    def __init__(self, keys: ir.Value, values: ir.Value, last: ir.Value, total: ir.Value, ids: ir.Value):
        """last (R,): position of each text's last new token. total (): positions of the longest. ids (R, S)."""
        super().__init__(keys, values)
        self.last, self.total, self.ids = last, total, ids

    def attend(self, op: Op, q: ir.Value, k: ir.Value, v: ir.Value, tables: Rotation, **settings: Any) -> ir.Value:
        """Attend from rows (N, H, d) to their text's past and themselves -> (R, S, H*d)."""
        by_text = op.Concat(op.Shape(self.ids), [-1], axis=0)
        y, self.keys, self.values = op.GroupQueryAttention(
            *(op.Reshape(x, by_text) for x in (q, k, v)),
            *(self.keys, self.values, self.last, self.total, *(tables or ())),
            do_rotary=int(tables is not None),
            _outputs=3,
            _domain=DOMAIN,
            **settings,
        )
        return y


class TextsCache(Cache):
    """The cache of texts of any lengths; the attention operator writes it."""

    def __init__(self, op: Op, layers: Sequence[LayerCache], last: ir.Value, ids: ir.Value):
        self.layers, self.cross, self.cross_mask = layers, None, None
        before = op.Range(op.Sub(1, op.Squeeze(op.Shape(ids, start=1), [0])), 1, 1)  # (S,), e.g. -2 -1 0
        last = op.Unsqueeze(op.Cast(last, to=ir.DataType.INT64), [1])
        self.index = op.Reshape(op.Add(last, before), [-1])
        """The position of each row (N,)."""

    def position_ids(self, op: Op, ids: ir.Value) -> PositionIds:
        return PositionIds(self.index, distances(op, self.index, self.index))

    def self_mask(self, op: Op, position_ids: PositionIds) -> Mask:
        """None: the operator knows each text's positions, and its window."""
        return None


class GroupedAttention(CpuAttention):
    """Multi-head attention of rows to the positions of their text; heads are (N, H, d)."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.shape, self.turns_inside = grouped_shape(config), turns_inside(config)
        self.window = config.window
        self.tables: Rotation = None

    def turned(self, op: Op, norm: str, x: ir.Value, rotation: Rotation) -> ir.Value:
        """As the twin, or leave the rotation to the operator: `rotation` then is cos and sin of all positions."""
        if self.turns_inside:
            self.tables, rotation = rotation, None
        return super().turned(op, norm, x, rotation)

    def kernel(self, op: Op, q: ir.Value, k: ir.Value, v: ir.Value, mask: Mask, past: LayerCache | None) -> ir.Value:
        """Attend from q (N, H, d_k) to the past and to k (N, K, d_k), v (N, K, d_v); returns (N, H, d_v)."""
        heads = (self.heads, self.key_value_heads, self.key_value_heads)
        q, k, v = (as_operand(op, x, self.shape._replace(heads=n)) for x, n in zip((q, k, v), heads, strict=True))
        limits = {"local_window_size": self.window, "softcap": self.score_cap}
        limits = {name: value for name, value in limits.items() if value is not None}
        sizes = {"num_heads": self.heads, "kv_num_heads": self.key_value_heads, "scale": self.scale}
        return self.from_operand(op, cast(Buffers, past).attend(op, q, k, v, self.tables, **sizes, **limits))


class TextsPositions(Positions):
    """Positions with the whole tables for layers whose operator turns queries and keys."""

    def turned(self, op: Op, position_ids: PositionIds) -> list[Rotation]:
        layers = self.config.layers(self.stack)
        return [
            rotary_table(op, layer, self.tables_of(layer)) if turns_inside(layer) else rotation
            for layer, rotation in zip(layers, super().turned(op, position_ids), strict=True)
        ]


class LastLayer(DecoderLayer):
    """The last layer, which leaves out the rows that nobody wants once it has their keys and values."""

    places: ir.Value | None
    """The wanted rows (W,); None: none."""

    def around(self, op: Op, name: str, x: ir.Value, sublayer: Callable[[ir.Value], ir.Value]) -> ir.Value:
        x = op.Gather(x, self.places, axis=0) if name == "feed_forward" and self.places is not None else x
        return super().around(op, name, x, sublayer)


class TextsTransformer(Transformer):
    """The decoder over rows, with the same parameters and names. places (W,): the rows whose logits are wanted."""

    def __init__(self, config: TransformerConfig, places: ir.Value | None):
        super().__init__(config, GroupedAttention)
        self.decoder.positions = TextsPositions(config, "decoder")
        last = self.decoder.layers[len(self.decoder.layers) - 1]
        last.__class__ = LastLayer
        cast(LastLayer, last).places = places
        for parameter in (*cast(LastLayer, last).feed_forward.parameters(), self.output_weight):
            parameter.meta[FEW_ROWS] = True
        name_parameters(self)
