"""The network of a decoder-only model in target `cpu`: texts of any lengths, whose keys and values never move.

GroupQueryAttention rotates queries and keys, writes the new keys and values into buffers, and attends. Heads that share
keys aren't repeated. Operators around it do the rest, as in `network.py`:

    head widths that aren't a multiple of 8              padded with zeros
    keys and values of unequal widths                    padded too
    norms of queries and keys                            before the operator
    rotary positions of part of a head (unless in whole  rotated before the operator
      registers), of padded heads, or under a norm

The buffers of layers with windows may be short: position p of a text is at p - dropped_positions there.

The operator knows no relative positions. The frequencies of longrope depend on a text's length. `lacks` names such
models; they get the portable graph.

Shapes: R texts, S new tokens of each (R or S is 1, or the texts are new), T positions of the longest text, N = R*S
rows, W rows with logits, L positions of a buffer, D model, H heads, K key-value heads, d width of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graph.edit import Nodes
from export.interface import grouped_shape
from export.nn.cache import Cache, KeyValues, LayerCache
from export.nn.layers import DecoderLayer
from export.nn.marks import FEW_ROWS
from export.nn.masks import Mask
from export.nn.model import Transformer
from export.nn.positions import PositionIds, Positions, Rotation, distances, rotary_table
from export.nn.primitives import Op, name_parameters, size
from mlx_transformer.core.config import RELATIVE, TransformerConfig
from mlx_transformer.core.positions import borders

from .network import DOMAIN, CpuAttention, as_operand


def lacks(config: TransformerConfig) -> str | None:
    """The kind of decoder-only model, in words, for which target cpu has no graphs; None if it has graphs."""
    if config.architecture != "decoder":
        return None
    if config.positions in RELATIVE:
        return f"decoders alone with positions={config.positions!r}, which its attention lacks"
    if config.recurrent or not config.decoder_layers:
        return "decoders alone without attention"
    return "longrope, whose frequencies depend on the length of a text" if borders(config) else None


def turns_inside(layer: TransformerConfig) -> bool:
    """Whether the operator rotates this layer's queries and keys, with the tables of all positions."""
    normed_after = layer.query_key_norm and layer.query_key_norm_place == "after"
    whole = grouped_shape(layer).key_width == layer.d_k and layer.d_k % 16 == 0 and layer.turned % 16 == 0
    return layer.positions == "rotary" and whole and not normed_after


class Buffers(LayerCache):
    """A layer's keys and values (R, K, L, d), written by the operator."""

    def __init__(self, pair: KeyValues, last: ir.Value, total: ir.Value, ids: ir.Value, positions: ir.Value | None):
        """last (R,) int32: place of each text's last new token in the buffers. total () int32: the largest + 1.

        ids (R, S). positions (R, S): of the new tokens, if they differ from the tokens' places in the buffers.
        """
        super().__init__(*pair)
        self.last, self.total, self.ids, self.positions = last, total, ids, positions

    def attend(self, op: Op, q: ir.Value, k: ir.Value, v: ir.Value, tables: Rotation, **settings: Any) -> ir.Value:
        """Attend from rows (N, H, d) to their text's past and themselves -> (R, S, H*d)."""
        by_text = op.Concat(op.Shape(self.ids), [-1], axis=0)
        y, self.keys, self.values = op.GroupQueryAttention(
            *(op.Reshape(x, by_text) for x in (q, k, v)),
            *(self.keys, self.values, self.last, self.total, *((*tables, self.positions) if tables else ())),
            do_rotary=int(tables is not None),
            _outputs=3,
            _domain=DOMAIN,
            **settings,
        )
        return y


class TextsCache(Cache):
    """The cache of texts of any lengths; the attention operator writes it."""

    layers: Sequence[Buffers]

    def __init__(
        self,
        op: Op,
        buffers: Sequence[KeyValues],
        ids: ir.Value,
        mask: ir.Value,
        windows: Sequence[int | None],
        dropped: ir.Value | None,
    ):
        """ids (R, S). mask (R, T): 1 on a text's positions, its new tokens among them, then 0. windows: one per layer.

        dropped (R or 1, 1): how many first positions the buffers of layers with windows lack.
        """
        self.cross, self.cross_mask = None, None
        total, last = size(op, mask, 1), last_of(op, mask)
        after = op.Range(op.Sub(total, size(op, ids, 1)), total, 1)  # (S,)
        positions = op.Min(last, after)  # (R, S)
        self.index = op.Reshape(positions, [-1])
        """The position of each row (N,)."""
        whole = _int32(op, op.Squeeze(last, [1])), _int32(op, total), ids, None
        within = whole
        if dropped is not None:
            place = op.Sub(last, dropped)
            longest = op.Add(op.ReduceMax(place, keepdims=0), 1)
            within = _int32(op, op.Squeeze(place, [1])), _int32(op, longest), ids, positions
        self.layers = [
            Buffers(pair, *(whole if w is None else within)) for w, pair in zip(windows, buffers, strict=True)
        ]

    def position_ids(self, op: Op, ids: ir.Value) -> PositionIds:
        return PositionIds(self.index, distances(op, self.index, self.index))

    def self_mask(self, op: Op, position_ids: PositionIds) -> Mask:
        """None: the operator knows each text's positions and its window."""
        return None


def _int32(op: Op, x: ir.Value) -> ir.Value:
    return op.Cast(x, to=ir.DataType.INT32)


def last_of(op: Op, mask: ir.Value) -> ir.Value:
    """The position (R, 1) of each text's last new token."""
    return op.Sub(op.ReduceSum(mask, [1]), 1)


def places_of_last(op: Op, count: ir.Value, ids: ir.Value, mask: ir.Value) -> ir.Value:
    """The rows (R*count,) of each text's last `count` () new tokens; padding on the right doesn't count."""
    new = size(op, ids, 1)
    last = op.Max(op.Add(op.Sub(last_of(op, mask), size(op, mask, 1)), new), 0)  # (R, 1) among the S new tokens
    begin = op.Unsqueeze(op.Mul(op.Range(0, size(op, ids, 0), 1), new), [1])
    return op.Reshape(op.Add(op.Add(begin, last), op.Range(op.Sub(1, count), 1, 1)), [-1])


class GroupedAttention(CpuAttention):
    """Multi-head attention of rows to the positions of their text; heads are (N, H, d)."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.shape, self.turns_inside = grouped_shape(config), turns_inside(config)
        self.window = config.window
        self.tables: Rotation = None

    def turned(self, op: Op, norm: str, x: ir.Value, rotation: Rotation) -> ir.Value:
        """Norm, and rotate unless the operator does: `rotation` then is cos and sin of all positions."""
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


JOINED = {
    "MatMulNBits": (None, 0, 0, 0),
    "MatMulIntegerToFloat": (None, 1, None, 0, None, None, 0),
    "Gemm": (None, 0, 0),
    "MatMul": (None, 1),
    "Add": (-1, -1),
}
"""{operator: for each input, the axis along which products lie side by side; None for an input that they share}. -1 is
the last axis of other products' results, or of biases."""


def join_projections(model: ir.Model) -> None:
    """Compute queries, keys and values by one product where nothing lies between it and the attention; in place.

    This comes after the change of precision. Files still hold three matrices: a session joins them when it opens. On
    two threads a step of SmolLM2 then takes .92 to .95 of the time, on one .97.
    """
    attentions = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    for node in attentions:
        reshapes = _producers(node.inputs[:3], "Reshape")
        if not reshapes:
            continue
        add = Nodes(model, reshapes[0])
        y = _side_by_side(add, [reshape.inputs[0] for reshape in reshapes])
        if y is not None:
            add.before()
            reshapes[0].replace_input_with(0, y)
            node.replace_input_with(1, None)
            node.replace_input_with(2, None)
    if attentions:
        RemoveUnusedNodesPass()(model)


def _producers(values: Sequence[ir.Value | None], *operators: str) -> list[ir.Node]:
    """The nodes that make these values; [] unless all have as many inputs and the same one of these operators."""
    nodes = [node for value in values if value is not None and (node := value.producer()) is not None]
    alike = len(nodes) == len(values) and len({(node.op_type, len(node.inputs)) for node in nodes}) == 1
    return nodes if alike and nodes[0].op_type in operators else []


def _side_by_side(add: Nodes, values: Sequence[ir.Value | None]) -> ir.Value | None:
    """One product with these products' results side by side in its last axis; None if they can't be joined."""
    nodes = _producers(values, *JOINED)
    if not nodes:
        return None
    settings = [{name: attribute.value for name, attribute in node.attributes.items()} for node in nodes]
    widths = [each.pop("N", None) for each in settings]
    if any(each != settings[0] for each in settings):
        return None
    inputs = []
    for axis, each in zip(JOINED[nodes[0].op_type], zip(*(node.inputs for node in nodes), strict=True), strict=False):
        if axis is None or each[0] is None:
            joined = each[0]
            if any(value is not joined for value in each):
                return None
        elif all(value is not None and value.is_initializer() and value.shape for value in each):
            joined = add("Concat", *each, axis=axis)
        elif axis == -1:
            joined = _side_by_side(add, each)
            if joined is None:
                return None
        else:
            return None  # the graph computes these matrices
        inputs.append(joined)
    if widths[0] is not None:
        settings[0]["N"] = sum(widths)
    return add(nodes[0].op_type, *inputs, domain=nodes[0].domain, **settings[0])


class TextsPositions(Positions):
    """Positions with whole tables for the layers in which the operator rotates queries and keys."""

    def turned(self, op: Op, position_ids: PositionIds) -> list[Rotation]:
        layers = self.config.layers(self.stack)
        return [
            rotary_table(op, layer, self.tables_of(layer)) if turns_inside(layer) else rotation
            for layer, rotation in zip(layers, super().turned(op, position_ids), strict=True)
        ]


class LastLayer(DecoderLayer):
    """The last layer: once it has the keys and values of all rows, it computes only rows with logits."""

    places: ir.Value | None
    """The rows with logits (W,); None if the graph gives no logits."""

    def around(self, op: Op, name: str, x: ir.Value, sublayer: Callable[[ir.Value], ir.Value]) -> ir.Value:
        x = op.Gather(x, self.places, axis=0) if name == "feed_forward" and self.places is not None else x
        return super().around(op, name, x, sublayer)


class TextsTransformer(Transformer):
    """The decoder over rows, with the same parameters and names. places (W,): the rows with logits."""

    def __init__(self, config: TransformerConfig, places: ir.Value | None):
        super().__init__(config, GroupedAttention)
        self.decoder.positions = TextsPositions(config, "decoder")
        last = self.decoder.layers[len(self.decoder.layers) - 1]
        last.__class__ = LastLayer
        cast(LastLayer, last).places = places
        for parameter in (*cast(LastLayer, last).feed_forward.parameters(), self.output_weight):
            parameter.meta[FEW_ROWS] = True
        name_parameters(self)
