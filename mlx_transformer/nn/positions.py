"""Positions: sinusoids and learned rows are added to the embeddings, rotary angles turn queries and keys, numbers by
relative position are added to the scores.

Shapes: B batch, L positions, D model, d_k one head. Tables come from `core/positions.py`, bit for bit the same as the
ONNX side's; they are computed once, shared by all models of the process and extended in chunks for longer sequences.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
from mlx import nn

from mlx_transformer.core.config import RELATIVE, SINUSOIDS, Stack, TransformerConfig
from mlx_transformer.core.positions import distinct_rotations, relative_buckets, rotary_tables, sinusoids
from mlx_transformer.system.errors import UserError

from .masks import Mask, as_array, as_numbers, window_mask

CHUNK = 1024

Rotation = tuple[mx.array, mx.array] | None
"""cos and sin, (L, d_k/2) or (B, 1, L, d_k/2); None where positions are not rotary."""


class PositionIds(NamedTuple):
    """Which row of a table each position reads: `index` is a slice (the same in every row of the batch) or (B, L)."""

    index: slice | mx.array
    limit: int
    """Every position is below it; known on the host, so that tables can be extended and checked without waiting."""


def positions_of(length: int, tokens: mx.array | None = None) -> PositionIds:
    """0, 1, 2, ... along the sequence, or with tokens (B, L) the number of tokens before: padding takes no position."""
    if tokens is None:
        return PositionIds(slice(0, length), length)
    index = mx.maximum(mx.cumsum(tokens.astype(mx.int32), axis=1) - 1, 0)
    return PositionIds(index, length)


def positions_in_documents(segments: mx.array) -> PositionIds:
    """0, 1, 2, ... from the start of each document of a row: segments (B, L), as `masks.document_mask` has them."""
    length = segments.shape[1]
    places = mx.arange(length)[None, :]
    begins = mx.concatenate([mx.ones((segments.shape[0], 1), mx.bool_), segments[:, 1:] != segments[:, :-1]], axis=1)
    return PositionIds(places - mx.cummax(mx.where(begins, places, 0), axis=1), length)


def positions_after(offset: int, length: int, starts: mx.array | None = None) -> PositionIds:
    """`length` positions from `offset` on, less the padding (B,) that each row starts with."""
    if starts is None:
        return PositionIds(slice(offset, offset + length), offset + length)
    index = mx.maximum(mx.arange(offset, offset + length)[None, :] - starts[:, None], 0)
    return PositionIds(index, offset + length)


class PositionedInput(NamedTuple):
    """A stack's input with its positions wherever this kind of them acts."""

    x: mx.array
    """(B, L, D): sinusoids and learned rows are added to it (section 3.5)."""
    rotations: list[Rotation]
    """Rotary angles of each layer."""
    masks: list[Mask]
    """Mask of each layer's self-attention."""


class Positions(nn.Module):
    """Positions of the tokens of one stack. Parameters: `weight` if learned or relative, or a table in each of
    `layers`."""

    def __init__(self, config: TransformerConfig, stack: Stack):
        super().__init__()
        self.config = config
        self.stack: Stack = stack
        self.kind = config.positions
        self.causal = stack == "decoder"
        self.count = config.decoder_layers if self.causal else config.encoder_layers
        if self.kind == "learned":
            self.weight = mx.random.normal((config.max_positions, config.d_model), scale=config.d_model**-0.5)
        if self.kind == "relative":
            shape = config.relative_buckets, config.of(stack).heads
            self.weight = mx.random.normal(shape, scale=config.d_model**-0.5)
        if self.kind == "relative_layers":
            self.layers = [RelativeTable(layer) for layer in config.layers(stack)]

    def __call__(self, x: mx.array, position_ids: PositionIds, mask: Mask = None) -> PositionedInput:
        """x (B, L, D). `UserError` for a position past a learned table."""
        angles = self.turned(position_ids, x.dtype)
        return PositionedInput(self.add_rows(x, position_ids), angles, self.add_bias(mask, position_ids, x.shape[1]))

    def turned(self, position_ids: PositionIds, dtype: mx.Dtype) -> list[Rotation]:
        """cos and sin for each layer, computed once for all layers that rotate alike."""
        distinct, of_layer = distinct_rotations(self.config, self.stack)
        angles = [rotation(layer, position_ids, dtype) for layer in distinct]
        return [angles[i] for i in of_layer]

    def windowed(self, mask: Mask, queries: int) -> list[Mask]:
        """Return each layer's mask with what its window hides."""
        windows = [layer.window for layer in self.config.layers(self.stack)]
        masks: dict[int | None, Mask] = {None: mask}
        masks |= {w: window_mask(mask, queries, w) for w in dict.fromkeys(windows) if w is not None}
        return [masks[w] for w in windows]

    def add_rows(self, x: mx.array, position_ids: PositionIds) -> mx.array:
        """x + position rows, (B, L, D)."""
        if self.kind not in ("learned", *SINUSOIDS):
            return x
        table = self.weight if self.kind == "learned" else sinusoid_table(position_ids.limit, self.config)
        if position_ids.limit > table.shape[0]:
            raise UserError(
                f"a sequence of {position_ids.limit} tokens is longer than the {table.shape[0]} learned positions"
                " (max_positions): shorten it or train with a larger table"
            )
        return x + table[position_ids.index].astype(x.dtype)

    def add_bias(self, mask: Mask, position_ids: PositionIds, queries: int) -> list[Mask]:
        """Return each layer's mask, and for relative positions a number a head by the distance, (B, H, L, S) (Raffel et
        al. 2020)."""
        if self.kind not in RELATIVE:
            return [mask] * self.count if self.causal else self.windowed(mask, queries)
        keys = position_ids.limit
        table = bucket_table(keys, self.config, self.causal)
        distances = mx.arange(keys) - mx.arange(keys - queries, keys)[:, None]
        rows, array = table[distances + table.shape[0] // 2], as_array(mask, queries, keys)
        if self.kind == "relative_layers":
            return [plus_mask(layer(rows), array) for layer in self.layers]
        return [plus_mask(relative_bias(self.weight, rows), array)] * self.count


class RelativeTable(nn.Module):
    """A layer's own numbers by relative position, as in umT5 (Chung et al. 2023)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.weight = mx.random.normal((config.relative_buckets, config.heads), scale=config.d_model**-0.5)

    def __call__(self, rows: mx.array) -> mx.array:
        """Return (L, S) -> (1, H, L, S)."""
        return relative_bias(self.weight, rows)


def relative_bias(weight: mx.array, rows: mx.array) -> mx.array:
    """Return numbers (1, H, L, S) of these rows (L, S) of a table."""
    return weight[rows].transpose(2, 0, 1)[None]


def plus_mask(bias: mx.array, mask: mx.array | None) -> mx.array:
    return bias if mask is None else as_numbers(mask, bias.dtype) + bias


def rotation(config: TransformerConfig, position_ids: PositionIds, dtype: mx.Dtype) -> Rotation:
    """Return the angles of these positions, once for all layers; None unless positions are rotary."""
    if config.positions != "rotary":
        return None
    cos, sin = (table[position_ids.index].astype(dtype) for table in rotary_table(position_ids.limit, config))
    return (cos, sin) if cos.ndim == 2 else (cos[:, None], sin[:, None])


def rotate(x: mx.array, rotation: Rotation) -> mx.array:
    """Turn each pair (x_i, x_{i + d_k/2}) of (B, H, L, d_k) by its position's angle (Su et al. 2021)."""
    if rotation is None:
        return x
    cos, sin = rotation
    x1, x2 = mx.split(x, 2, axis=-1)
    return mx.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def sinusoid_table(length: int, config: TransformerConfig) -> mx.array:
    """Return at least `length` rows of the encoding, float32; a longer table starts with the very same rows."""
    return _sinusoids(_chunks(length), config.d_model, config.positions, config.first_position)


def bucket_table(length: int, config: TransformerConfig, causal: bool) -> mx.array:
    """Return rows of the weight by distance, symmetric about 0, for at least `length` positions."""
    return _buckets(_chunks(length), config, causal)


def rotary_table(length: int, config: TransformerConfig) -> tuple[mx.array, mx.array]:
    """Return at least `length` rows of cos and sin, float32."""
    return _rotary(_chunks(length), config)


def _chunks(length: int) -> int:
    return -(-length // CHUNK) * CHUNK


@lru_cache(maxsize=32)
def _sinusoids(length: int, d_model: int, kind: str, first: int) -> mx.array:
    return mx.array(sinusoids(length, d_model, kind, first=first))


@lru_cache(maxsize=32)
def _buckets(length: int, config: TransformerConfig, causal: bool) -> mx.array:
    return mx.array(relative_buckets(length, config, causal))


@lru_cache(maxsize=32)
def _rotary(length: int, config: TransformerConfig) -> tuple[mx.array, mx.array]:
    cos, sin = rotary_tables(length, config)
    return mx.array(cos), mx.array(sin)
