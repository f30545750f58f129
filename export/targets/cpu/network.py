"""The network of target `cpu`: `export/nn` over rows of tokens, with ONNX Runtime's fused attention.

Activations have two dimensions, one row per token, so only attention computes with padding. Decoding writes keys and
values into buffers that never move; a beam reads another beam's keys and values through an index.

A pass, `use_gemm`, makes each Linear one Gemm, together with the bias or residual that is added to it:

    MatMul(x, Transpose(W)) --> Add(., bias or residual)        Gemm(x, W, bias or residual, transB=1)

The product starts from C, so the addition costs nothing, and W is read as it is stored.

Shapes: N tokens of the batch's sources, B sentences, S longest source, R rows decoded (B * K beams), L positions of a
buffer, D model, H heads, G key-value heads, d width of one head, C chosen ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from export.interface import CacheShape, operator_shape
from export.nn.attention import Attention, attention_weights, matmul_shared_heads, merge_heads, split_heads
from export.nn.cache import Cache, KeyValues, LayerCache
from export.nn.layers import DecoderLayer, Tap, no_tap, within
from export.nn.marks import HIDDEN, ROWS_OF, extent
from export.nn.masks import Mask, causal_padding_mask, padding_mask
from export.nn.model import Transformer
from export.nn.positions import PositionIds, Rotation, distances
from export.nn.primitives import Op, scoped, table
from export.nn.ssru import LayerState
from mlx_transformer.core.config import TransformerConfig


def use_gemm(graph: ir.Graph) -> None:
    """Replace every MatMul with a transposed initializer, or with chosen rows of a classifier, in place."""
    for node in list(graph):
        second = node.inputs[1] if node.op_type == "MatMul" else None
        if (weight := _transposed(second)) is not None:
            _replace(graph, node, weight, True)
        elif second is not None and ROWS_OF in second.meta:
            _replace(graph, node, second, False)


def join_reshapes(graph: ir.Graph) -> None:
    """Skip a Reshape before a Reshape, and both if the result has the first input's shape, in place.

    Modules split and merge heads for operators between, e.g. a rotation; some layers have none.
    """
    for node in graph:
        before = node.inputs[0] if node.op_type == "Reshape" else None
        producer = None if before is None else before.producer()
        if producer is not None and producer.op_type == "Reshape" and _counts_all(node.inputs[1]):
            node.replace_input_with(0, source := producer.inputs[0])
            if source is not None and _are_alike(source, node.outputs[0]):
                ir.convenience.replace_all_uses_with(node.outputs[0], source)


def _are_alike(x: ir.Value, reshaped: ir.Value) -> bool:
    """Whether both are known to be matrices with the same number of columns: then the Reshape changes nothing."""
    if x.shape is None or reshaped.shape is None or reshaped.is_graph_output():
        return False
    return len(x.shape) == len(reshaped.shape) == 2 and x.shape.is_static(1) and x.shape[1] == reshaped.shape[1]


def _counts_all(shape: ir.Value | None) -> bool:
    """Whether a Reshape to this shape is known to take no extent from its input, i.e. has no 0.

    Only constants, Shape and Concat of these are known.
    """
    const = None if shape is None else ir.convenience.get_const_tensor(shape)
    if const is not None:
        return 0 not in const.numpy()
    producer = None if shape is None else shape.producer()
    if producer is None or producer.op_type not in ("Shape", "Concat"):
        return False
    return producer.op_type == "Shape" or all(map(_counts_all, producer.inputs))


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """The initializer that a value is the transpose of; None for other values."""
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type != "Transpose":
        return None
    source = producer.inputs[0]
    return source if source is not None and source.is_initializer() else None


def _replace(graph: ir.Graph, product: ir.Node, weight: ir.Value, transposed: bool) -> None:
    replaced, addends = [product], []
    while (following := _sole_addition(replaced[-1])) is not None:
        addition, addend = following
        # A Gemm adds a single matrix or vector. Several vectors are summed first, which is cheap.
        if addends and not (_is_vector(addend) and _is_vector(addends[-1])):
            break
        replaced.append(addition)
        addends.append(addend)
        if not _is_vector(addend):
            break
    old = replaced[-1].outputs[0]
    new = []
    while len(addends) > 1:
        second = addends.pop()
        new.append(ir.node("Add", [addends.pop(), second], name=f"{product.name}/C{len(addends)}"))
        addends.append(new[-1].outputs[0])
        addends[-1].name = f"{old.name}/C{len(addends)}"
    gemm = ir.node(
        "Gemm", [product.inputs[0], weight, *addends], {"transB": int(transposed)}, name=f"{product.name}/Gemm"
    )
    result = gemm.outputs[0]
    result.shape, result.type = old.shape, old.type
    result.name, old.name = old.name, f"{old.name}/replaced"
    graph.insert_after(replaced[-1], [*new, gemm])
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    graph.remove(replaced, safe=True)


def _sole_addition(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The Add that is the only reader of the node's result, and its other input; None if there is no such Add."""
    output = node.outputs[0]
    users = list(output.uses())
    if len(users) != 1 or output.is_graph_output() or users[0].node.op_type != "Add":
        return None
    addition = users[0].node
    addend = addition.inputs[1] if addition.inputs[0] is output else addition.inputs[0]
    return None if addend is None else (addition, addend)


def _is_vector(value: ir.Value) -> bool:
    """Whether a value is known to be a vector: a bias or a graph input. All other addends have two dimensions."""
    return (value.is_initializer() or value.is_graph_input()) and value.shape is not None and len(value.shape) == 1


DOMAIN = "com.microsoft"
OPSETS = {"": 23, DOMAIN: 1}
"""Opsets of the graphs; the operator Attention begins with opset 23."""


@dataclass(frozen=True)
class Sources:
    """Maps padded sources (B, S) to rows of tokens (N,) and back."""

    real: ir.Value
    """(B, S) int64, 1 on tokens, 0 on padding."""
    mask: ir.Value
    """The same as int32."""
    tokens: ir.Value
    """(N,) the place of each token in the flattened (B, S)."""
    slots: ir.Value
    """(B, S) the row of each place; on padding an arbitrary row."""
    hidden: ir.Value
    """(B, 1, S, S) mask, added to the scores: `HIDDEN` for keys on padding."""

    @classmethod
    def of(cls, op: Op, attention_mask: ir.Value, causal: bool = False) -> Sources:
        flat = op.Reshape(attention_mask, [-1])
        tokens = op.Squeeze(op.NonZero(flat), [0])
        slots = op.Reshape(op.Max(op.Sub(op.CumSum(flat, 0), 1), 0), op.Shape(attention_mask))
        mask = op.Cast(attention_mask, to=ir.DataType.INT32)
        # The operator Attention doesn't broadcast a mask over queries.
        length = op.Shape(attention_mask, start=1)
        if causal:
            places = op.Range(0, op.Squeeze(length, [0]), 1)
            hidden = causal_padding_mask(op, attention_mask, distances(op, places, places))
        else:
            hidden = op.Expand(padding_mask(op, attention_mask), op.Concat([1, 1], length, [1], axis=0))
        return cls(attention_mask, mask, tokens, slots, hidden)

    def rows(self, op: Op, x: ir.Value) -> ir.Value:
        """Padded (B, S) -> rows (N,), or (B, S, D) -> (N, D)."""
        width = [extent(x, 2)] if len(x.shape or ()) == 3 else []
        return op.Gather(op.Reshape(x, [-1, *width]), self.tokens, axis=0)

    def padded(self, op: Op, x: ir.Value) -> ir.Value:
        """Rows (N, D) -> padded (B, S, D)."""
        return op.Gather(x, self.slots, axis=0)

    def by_head(self, op: Op, x: ir.Value) -> ir.Value:
        """Rows (N, H, d) -> padded (B, H, S, d); one Gather pads and transposes."""
        heads = extent(x, 1)
        head = table(op, f"heads.{heads}", lambda: np.arange(heads)[None, :, None])
        slots = op.Add(op.Unsqueeze(op.Mul(self.slots, heads), [1]), head)
        return op.Gather(op.Reshape(x, [-1, extent(x, 2)]), slots, axis=0)

    def positions(self, op: Op) -> PositionIds:
        """The position of each row: the number of tokens before it in its sentence; padding takes no position."""
        places = op.Range(0, op.Squeeze(op.Shape(self.real, start=1), [0]), 1)
        return PositionIds(self.rows(op, op.CumSum(self.real, 1, exclusive=1)), distances(op, places, places))


class InPlace(LayerCache):
    """A layer's keys and values (R, H, L, d), to which the attention operator itself writes, at position `past`."""

    def __init__(self, keys: ir.Value, values: ir.Value, past: ir.Value, beam_width: ir.Value, indirection: ir.Value):
        """past (1,) int32: number of positions written so far. beam_width (1,) int32: K.

        indirection (B, K, L) int32: for each beam and past position, the beam whose buffer it reads.
        """
        super().__init__(keys, values)
        self.past, self.beam_width, self.indirection = past, beam_width, indirection

    def attend(self, op: Op, q: ir.Value, k: ir.Value, v: ir.Value, added: Mask, **settings: Any) -> ir.Value:
        """Attend from rows (R, H, d) to their past and themselves -> (R, 1, H*d). added (1, H, 1, past+1): a bias."""
        rows = (op.Reshape(x, [-1, 1, extent(x, 1) * extent(x, 2)]) for x in (q, k, v))
        y, self.keys, self.values = op.DecoderMaskedMultiHeadAttention(
            *(*rows, None, added),
            *(self.keys, self.values, self.past, self.beam_width, self.indirection),
            past_present_share_buffer=1,
            _outputs=3,
            **settings,
        )
        return y


class CpuCache(Cache):
    """The cache of a step with one token per row, all at the same position; the attention operator writes it."""

    def __init__(
        self,
        layers: Sequence[LayerCache | LayerState],
        past: ir.Value,
        cross: Sequence[KeyValues],
        source_mask: ir.Value,
    ):
        """past (1,): number of positions so far. source_mask (B, S) int32."""
        self.layers, self.past, self.cross, self.cross_mask = layers, past, cross, source_mask

    def position_ids(self, op: Op, ids: ir.Value) -> PositionIds:
        """The position of the new tokens, with an index (1,) for all rows."""
        index = op.Cast(self.past, to=ir.DataType.INT64)
        keys = op.Range(0, op.Add(op.Squeeze(index, [0]), 1), 1)
        return PositionIds(index, distances(op, index, keys))

    def self_mask(self, op: Op, position_ids: PositionIds) -> Mask:
        """None: the new token may attend to every position in the buffers."""
        return None


class CpuAttention(Attention):
    """Multi-head attention over rows; heads are (N, H, d)."""

    def __init__(self, config: TransformerConfig, sources: Sources | None = None):
        super().__init__(config)
        self.sources, self.shape, self.value_width = sources, operator_shape(config), config.d_v

    def split(self, op: Op, x: ir.Value, heads: int, rows: ir.Value | None = None) -> ir.Value:
        """(N, H*d) -> (N, H, d)."""
        return op.Reshape(x, [-1, heads, extent(x, 1) // heads])

    def merge(self, op: Op, y: ir.Value, like: ir.Value | None = None) -> ir.Value:
        """(N, H, d) -> (N, H*d)."""
        return op.Reshape(y, [-1, extent(y, 1) * extent(y, 2)])

    def kernel(self, op: Op, q: ir.Value, k: ir.Value, v: ir.Value, mask: Mask, past: LayerCache | None) -> ir.Value:
        """Attend from q (N, H, d_k) to keys and values of new positions (N, G, ...) or of the source (B, H, S, d)."""
        if len(k.shape or ()) == 4:
            return self.over_source(op, q, k, v, mask)
        if past is None:
            return self.within_source(op, q, k, v, mask)
        q, k, v = (as_operand(op, x, self.shape) for x in (q, k, v))
        y = cast(Any, past).attend(op, q, k, v, mask, scale=self.scale, **self.settings)
        return self.from_operand(op, y)

    def within_source(self, op: Op, q: ir.Value, k: ir.Value, v: ir.Value, added: Mask) -> ir.Value:
        """Attend between tokens of the same source. added: mask and bias (B or 1, H or 1, S, S)."""
        assert self.sources is not None
        heads, width = {"q_num_heads": self.heads, "kv_num_heads": extent(k, 1)}, extent(v, 2)
        padded = [self.sources.padded(op, self.merge(op, x)) for x in (q, k, v)]  # (B, S, H*d) or (B, S, G*d)
        if self.score_cap is not None:  # the operator's softcap bounds the mask too
            q, k, v = (split_heads(op, x, extent(x, 2) // extent(y, 2)) for x, y in zip(padded, (q, k, v), strict=True))
            weights = attention_weights(op, q, k, added, self.scale, self.score_cap)  # (B, H, S, S)
            weights.shape = ir.Shape([None, self.heads, None, None])  # a window's mask leaves it open
            y = merge_heads(op, matmul_shared_heads(op, weights, v))
            return self.split(op, self.sources.rows(op, y), self.heads)
        y = typed(op.Attention(*padded, added, scale=self.scale, **heads), self.heads * width)  # (B, S, H*d_v)
        return self.split(op, self.sources.rows(op, y), self.heads)  # (N, H, d_v)

    def over_source(self, op: Op, q: ir.Value, k: ir.Value, v: ir.Value, mask: Mask) -> ir.Value:
        """Attend from rows to their sentence's keys and values (B, H, S, d), which beams share; mask (B, S) int32.

        `cross_keys_values` has scaled the keys: a product with one query is faster without a scale.
        """
        by_sentence = op.Concat(op.Shape(mask, end=1), [-1, self.heads * self.shape.key_width], axis=0)
        q = op.Reshape(as_operand(op, q, self.shape), by_sentence)  # (B, K, H*d)
        return self.from_operand(op, op.MultiHeadAttention(q, k, v, None, mask, scale=1.0, **self.settings))

    @scoped
    def weights(
        self,
        op: Op,
        x: ir.Value,
        k: ir.Value,
        mask: Mask = None,
        rotation: Rotation = None,
        rows: ir.Value | None = None,
    ) -> ir.Value:
        """Attention weights (B, H, K, S) of rows over their sentence's keys (B, H, S, d), as in `over_source`.

        Computed by extra operators, since the fused operator doesn't return its weights.
        """
        assert mask is not None
        q = as_operand(op, self.queries(op, x, rotation), self.shape)
        each = [self.heads, self.shape.key_width]
        q = typed(op.Reshape(q, op.Concat(op.Shape(mask, end=1), [-1, *each], axis=0)), *each, rank=4)
        scores = op.MatMul(op.Transpose(q, perm=[0, 2, 1, 3]), op.Transpose(k, perm=[0, 1, 3, 2]))  # (B, H, K, S)
        return op.Softmax(op.Add(scores, padding_mask(op, mask)), axis=-1)

    @property
    def settings(self) -> dict[str, Any]:
        """Attributes of ONNX Runtime's attention operators."""
        return {"num_heads": self.heads, "mask_filter_value": HIDDEN, "_domain": DOMAIN}

    def from_operand(self, op: Op, y: ir.Value) -> ir.Value:
        """An operator's result (..., H*d) -> (N, H, d_v)."""
        y = op.Reshape(typed(y), [-1, self.heads, self.shape.value_width])
        if self.value_width == self.shape.value_width:
            return y
        return typed(op.Slice(y, [0], [self.value_width], [2]), self.heads, self.value_width)


def as_operand(op: Op, x: ir.Value, shape: CacheShape) -> ir.Value:
    """(N, G, d_k or d_v) -> (N, H, d): copies shared keys or values for each head, pads narrow heads with zeros."""
    heads, width = extent(x, 1), extent(x, 2)
    if width < shape.key_width:
        x = typed(op.Pad(x, [0, 0, 0, 0, 0, shape.key_width - width]), heads, shape.key_width)
    return for_all_heads(op, x, shape.heads)


def for_all_heads(op: Op, x: ir.Value, heads: int) -> ir.Value:
    """(N, G, d) -> (N, H, d): head h gets a copy of key-value head h // (H/G)."""
    shared, width = extent(x, 1), extent(x, 2)
    if heads == shared:
        return x
    copies = op.Expand(op.Reshape(x, [-1, shared, 1, width]), [1, 1, heads // shared, 1])
    return op.Reshape(copies, [-1, heads, width])


def typed(y: ir.Value, *extents: int, rank: int = 3) -> ir.Value:
    """Set the type and shape of a result of ONNX Runtime's own operators, which onnx can't infer; returns y.

    `extents` are the last of `rank` axes. After an untyped value the builder adds casts to constants. ONNX Runtime's
    fusion of an RMSNorm doesn't find its epsilon behind a cast and takes 1e-5 instead.
    """
    y.type = ir.TensorType(ir.DataType.FLOAT)
    y.shape = ir.Shape([*[None] * (rank - len(extents)), *extents])
    return y


class CpuTransformer(Transformer):
    """The network over rows, with the same parameters and names. `sources`: maps rows, in an encoder's graph only."""

    def __init__(self, config: TransformerConfig, sources: Sources | None = None):
        super().__init__(config, partial(CpuAttention, sources=sources))
        self.sources = sources

    def encode_rows(self, op: Op, source: Mapping[str, ir.Value | None], *, tap: Tap = no_tap) -> ir.Value:
        """Encode the padded arguments of `embedded`, e.g. source_ids (B, S) -> memory (N, D)."""
        sources = self.sources
        assert sources is not None
        x = self.embedded(op, **{name: None if x is None else sources.rows(op, x) for name, x in source.items()})
        return self.encoder(op, x, sources.positions(op), sources.hidden, within(tap, "encoder"))

    def cross_keys_values(self, op: Op, memory: ir.Value) -> list[KeyValues]:
        """Every layer's keys and values of the memory (N, D), keys scaled, for `over_source`: (B, H, S, d)."""
        assert self.sources is not None
        pairs = []
        for layer, (k, v) in zip(self.decoder.layers, self.decoder.cross_keys_values(op, memory), strict=True):
            attention = cast(CpuAttention, cast(DecoderLayer, layer).cross_attention)
            k = op.Mul(k, attention.scale)
            k, v = (self.sources.by_head(op, as_operand(op, x, attention.shape)) for x in (k, v))
            pairs.append((k, v))
        return pairs
