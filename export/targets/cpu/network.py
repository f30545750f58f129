"""The same network over rows of tokens, with ONNX Runtime's fused attention: what the target `cpu` runs.

Activations have two dimensions, one row a token: padding is in no product but those of attention, and every Linear is
one Gemm. Decoding writes keys and values into buffers that never move; beams read each other's through an index.

Shapes: N tokens of the batch's sources, B sentences, S longest source, R rows decoded (B * K beams), L positions of a
buffer, D model, H heads, d one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import onnx_ir as ir
from onnxscript import nn

from export.nn.attention import Attention
from export.nn.cache import KeyValues
from export.nn.layers import Decoder, DecoderLayer, Encoder, EncoderLayer
from export.nn.masks import HIDDEN, padding_mask
from export.nn.model import Transformer
from export.nn.positions import Rotation, rotate
from export.nn.primitives import Op, name_parameters, scoped, table
from export.nn.taps import Tap, no_tap, within
from mlx_transformer.spec.config import TransformerConfig

DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class Sources:
    """Where the tokens of padded sources (B, S) are among the rows (N,), and back."""

    mask: ir.Value
    """(B, S) int32, 1 on tokens."""
    tokens: ir.Value
    """(N,) place of each token in the flattened (B, S)."""
    slots: ir.Value
    """(B, S) row of each place; any row on padding."""
    hidden: ir.Value
    """(B, 1, 1, S) added to the scores of keys: `HIDDEN` on padding."""
    heads: int
    head_slots: ir.Value
    """(B, H, S) the same as `slots`, in rows split by head (N*H,)."""
    head_tokens: ir.Value
    """(N, H) place of each token's heads in the flattened (B, H, S)."""

    @classmethod
    def of(cls, op: Op, attention_mask: ir.Value, heads: int) -> Sources:
        flat = op.Reshape(attention_mask, [-1])
        tokens = op.Squeeze(op.NonZero(flat), [0])
        slots = op.Reshape(op.Max(op.Sub(op.CumSum(flat, 0), 1), 0), op.Shape(attention_mask))
        mask = op.Cast(attention_mask, to=ir.DataType.INT32)
        hidden = padding_mask(op, attention_mask)
        head = table(op, "heads", lambda: np.arange(heads)[None])  # (1, H)
        head_slots = op.Add(op.Unsqueeze(op.Mul(slots, heads), [1]), op.Unsqueeze(head, [2]))
        # Token s of sentence b is at b*S + s, its head h at (b*H + h)*S + s.
        length = op.Shape(attention_mask, start=1)
        before = op.Mul(op.Sub(tokens, op.Mod(tokens, length)), heads - 1)
        head_tokens = op.Add(op.Unsqueeze(op.Add(tokens, before), [1]), op.Mul(head, length))
        return cls(mask, tokens, slots, hidden, heads, head_slots, head_tokens)

    def rows(self, op: Op, x: ir.Value) -> ir.Value:
        """Padded (B, S) to rows (N,)."""
        return op.Gather(op.Reshape(x, [-1]), self.tokens, axis=0)

    def padded(self, op: Op, x: ir.Value) -> ir.Value:
        """Rows (N, D) to (B, S, D)."""
        return op.Gather(x, self.slots, axis=0)

    def by_head(self, op: Op, x: ir.Value, width: int) -> ir.Value:
        """Rows (N, H*d) to (B, H, S, d), d = width: padding and the transposition in one go."""
        return op.Gather(op.Reshape(x, [-1, width]), self.head_slots, axis=0)

    def from_heads(self, op: Op, x: ir.Value, width: int) -> ir.Value:
        """(B, H, S, d) to rows (N, H*d)."""
        rows = op.Gather(op.Reshape(x, [-1, width]), self.head_tokens, axis=0)
        return op.Reshape(rows, [-1, self.heads * width])


@dataclass(frozen=True)
class Buffers:
    """One layer's keys and values (R, H, L, d), written in place at position `past`."""

    keys: ir.Value
    values: ir.Value
    past: ir.Value
    """(1,) int32, positions written so far."""
    beam_width: ir.Value
    """(1,) int32."""
    cache_indirection: ir.Value
    """(B, K, L) int32: whose position the beam reads, for each position of the past."""


class RowsAttention(Attention):
    """Multi-head attention from rows to rows. Heads that share keys and values get copies of them.

    The operators know one width of a head, d = max(d_k, d_v): the narrower ones are filled with zeros.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.d_k, self.d_v, self.d = config.d_k, config.d_v, head_width(config)
        self.scale = self.d_k**-0.5

    def queries(self, op: Op, x: ir.Value, rotation: Rotation = None) -> ir.Value:
        """(N, D) -> (N, H*d)"""
        q = rotate_rows(op, self.query_proj(op, x), self.heads, self.d_k, rotation)
        return self.widened(op, q, self.heads, self.d_k)

    @scoped
    def keys_values(self, op: Op, x: ir.Value, rotation: Rotation = None) -> KeyValues:
        """(N, D) -> keys (N, H*d), values (N, H*d)."""
        k = rotate_rows(op, self.key_proj(op, x), self.key_value_heads, self.d_k, rotation)
        pair = (k, self.d_k), (self.value_proj(op, x), self.d_v)
        k, v = (self.for_all_heads(op, self.widened(op, x, self.key_value_heads, width)) for x, width in pair)
        return k, v

    @scoped
    def attend(self, op: Op, x: ir.Value, k: ir.Value, v: ir.Value, mask: Any, rotation: Rotation = None) -> ir.Value:
        """Tokens of a source (N, D) over those of the same source. mask: `Sources`."""
        q, k, v = (mask.by_head(op, rows, self.d) for rows in (self.queries(op, x, rotation), k, v))
        scores = op.FusedMatMul(q, k, transB=1, alpha=self.scale, _domain=DOMAIN)
        weights = op.Softmax(op.Add(typed(scores, rank=4), mask.hidden), axis=-1)
        return self.output(op, mask.from_heads(op, op.MatMul(weights, v), self.d))

    @scoped
    def attend_cross(self, op: Op, x: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value) -> ir.Value:
        """Rows (R, D) over their sentence's keys and values (B, H, S, d), which beams share; mask (B, S) int32.

        The keys are divided by sqrt(d_k) already: a product with one query is faster where nothing is left to scale.
        """
        by_sentence = op.Concat(op.Shape(mask, start=0, end=1), [-1, self.heads * self.d], axis=0)
        said = {**self.said, "scale": 1.0}
        y = typed(op.MultiHeadAttention(op.Reshape(self.queries(op, x), by_sentence), k, v, None, mask, **said))
        return self.output(op, op.Reshape(y, [-1, self.heads * self.d]))

    @scoped
    def attend_in_place(self, op: Op, x: ir.Value, past: Buffers, rotation: Rotation) -> tuple[ir.Value, KeyValues]:
        """Rows (R, D) over their own past and themselves; also the buffers, which hold their keys and values now."""
        rows = self.queries(op, x, rotation), *self.keys_values(op, x, rotation)
        q, k, v = (op.Reshape(x, [-1, 1, self.heads * self.d]) for x in rows)
        y, keys, values = op.DecoderMaskedMultiHeadAttention(
            *(q, k, v, None, None),
            *(past.keys, past.values, past.past, past.beam_width, past.cache_indirection),
            past_present_share_buffer=1,
            _outputs=3,
            **self.said,
        )
        return self.output(op, op.Reshape(typed(y), [-1, self.heads * self.d])), (keys, values)

    @property
    def said(self) -> dict[str, Any]:
        return {"num_heads": self.heads, "scale": self.scale, "mask_filter_value": HIDDEN, "_domain": DOMAIN}

    def output(self, op: Op, y: ir.Value) -> ir.Value:
        """(N, H*d) -> (N, D)"""
        if self.d_v < self.d:
            y = op.Slice(op.Reshape(y, [-1, self.heads, self.d]), [0], [self.d_v], [2])
            y = op.Reshape(y, [-1, self.heads * self.d_v])
        return self.output_proj(op, y)

    def widened(self, op: Op, x: ir.Value, heads: int, width: int) -> ir.Value:
        """Each head of the rows (N, heads*width) with zeros up to d."""
        if width == self.d:
            return x
        filled = op.Pad(op.Reshape(x, [-1, heads, width]), [0, 0, 0, 0, 0, self.d - width])
        return op.Reshape(filled, [-1, heads * self.d])

    def for_all_heads(self, op: Op, x: ir.Value) -> ir.Value:
        """(N, K*d) -> (N, H*d): each head's own copy of the keys or values that it shares."""
        if self.heads == self.key_value_heads:
            return x
        each = op.Reshape(x, [-1, self.key_value_heads, 1, self.d])
        copies = op.Expand(each, [1, 1, self.heads // self.key_value_heads, 1])
        return op.Reshape(copies, [-1, self.heads * self.d])


def typed(y: ir.Value, rank: int = 3) -> ir.Value:
    """A result of ONNX Runtime's own operators, of so many axes, whose type nobody infers. Untyped, what follows would
    cast its constants, and ONNX Runtime's fusion of an RMSNorm doesn't find a cast epsilon: it takes 1e-5 instead."""
    y.type, y.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([None] * rank)
    return y


def head_width(config: TransformerConfig) -> int:
    """d: of queries, keys and values alike."""
    return max(config.d_k, config.d_v)


def rotate_rows(op: Op, x: ir.Value, heads: int, width: int, rotation: Rotation) -> ir.Value:
    """Each head, d = width, of the rows (N, H*d) by its row's angles (N or 1, d/2)."""
    if rotation is None:
        return x
    cos, sin = (op.Unsqueeze(angles, [1]) for angles in rotation)
    turned = rotate(op, op.Reshape(x, [-1, heads, width]), (cos, sin))
    return op.Reshape(turned, [-1, heads * width])


class RowsEncoderLayer(EncoderLayer):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.self_attention = RowsAttention(config)


class RowsDecoderLayer(DecoderLayer):
    """Where the other layer's cache grows by an operator of its own, here attention itself writes to it."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.self_attention = RowsAttention(config)
        self.cross_attention = RowsAttention(config)
        self.presents: KeyValues | None = None

    def attend_self(self, op: Op, x: ir.Value, mask: Any, rotation: Rotation, past: Any, tap: Tap) -> ir.Value:
        y, self.presents = self.self_attention.attend_in_place(op, x, past, rotation)
        tap("self_attention", y)
        return y

    @scoped
    def cross_keys_values(self, op: Op, memory: ir.Value) -> KeyValues:
        """The keys divided by sqrt(d_k), as `RowsAttention.attend_cross` wants them."""
        k, v = self.cross_attention.keys_values(op, memory)
        return op.Mul(k, self.cross_attention.scale), v

    def attend_cross(self, op: Op, x: ir.Value, cross: KeyValues, mask: Any, tap: Tap) -> ir.Value:
        y = self.cross_attention.attend_cross(op, x, *cross, mask)
        tap("cross_attention", y)
        return y


class RowsEncoder(Encoder):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([RowsEncoderLayer(config) for _ in range(config.encoder_layers)])


class RowsDecoder(Decoder):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([RowsDecoderLayer(config) for _ in range(config.decoder_layers)])


class RowsTransformer(Transformer):
    """An encoder-decoder over rows; the same parameters by the same names."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.encoder, self.decoder = RowsEncoder(config), RowsDecoder(config)
        name_parameters(self)

    def encode_rows(self, op: Op, ids: ir.Value, sources: Sources, *, tap: Tap = no_tap) -> ir.Value:
        """Padded ids (B, S) -> memory (N, D)."""
        x = self.embed_source(op, sources.rows(op, ids))
        # Tokens before each one in its own sentence; padding, on either side, takes no position.
        mask = op.Cast(sources.mask, to=ir.DataType.INT64)
        position_ids = sources.rows(op, op.Sub(op.CumSum(mask, 1), 1))
        return self.encoder(op, x, position_ids, sources, within(tap, "encoder"))

    def cross_keys_values(self, op: Op, memory: ir.Value, sources: Sources) -> list[KeyValues]:
        """Every layer's keys and values of the memory (N, D), by sentence: (B, H, S, d)."""
        d = head_width(self.config)
        pairs = self.decoder.cross_keys_values(op, memory)
        return [(sources.by_head(op, k, d), sources.by_head(op, v, d)) for k, v in pairs]

    def step_rows(
        self,
        op: Op,
        ids: ir.Value,
        buffers: Sequence[Buffers],
        cross: Sequence[KeyValues],
        source_mask: ir.Value,
        *,
        tap: Tap = no_tap,
    ) -> tuple[ir.Value, list[KeyValues]]:
        """Hidden states (R, D) after one more token of each row (R,), and the buffers."""
        x = self.embed_target(op, ids)
        position_ids = op.Cast(buffers[0].past, to=ir.DataType.INT64)
        scope = within(tap, "decoder")
        x = self.decoder(op, x, position_ids, None, cross, source_mask, cast(Any, buffers), scope)
        presents = [cast(RowsDecoderLayer, layer).presents for layer in self.decoder.layers]
        return x, cast(list[KeyValues], presents)
