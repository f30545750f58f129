"""Positions: absolute (added to the embeddings), rotary (rotate queries and keys), relative (added to the scores).

Shapes: B batch, L positions, S keys, D model, H heads, d_k one head's width. The tables come from `core/positions.py`,
so that MLX and ONNX use the same bits. They are computed once for all models of the process, and again in larger chunks
when a sequence is longer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
from mlx import nn

from mlx_transformer.core.config import RELATIVE, SINUSOIDS, Stack, TransformerConfig
from mlx_transformer.core.positions import distinct_rotations, long_from, relative_buckets, rotary_tables, sinusoids
from mlx_transformer.system.errors import UserError

from .masks import Mask, as_array, as_numbers, window_mask

CHUNK = 1024

Rotation = tuple[mx.array, mx.array] | None
"""cos and sin, each (L, D/2) or (B, 1, L, D/2), for D turned numbers of a head; None if positions aren't rotary."""


class PositionIds(NamedTuple):
    """The row of a position table for each position: `index` is a slice (the same for the whole batch), or (B, L)."""

    index: slice | mx.array
    limit: int
    """All positions are below this number, which is known on the host: a table is extended without waiting for the
    device."""


def positions_of(length: int, tokens: mx.array | None = None) -> PositionIds:
    """0, 1, 2, ... along the sequence. With a padding mask `tokens` (B, L), padding isn't counted.

    >>> positions_of(4, mx.array([[False, False, True, True]])).index
    array([[0, 0, 0, 1]], dtype=int32)
    """
    if tokens is None:
        return PositionIds(slice(0, length), length)
    index = mx.maximum(mx.cumsum(tokens.astype(mx.int32), axis=1) - 1, 0)
    return PositionIds(index, length)


def positions_in_documents(segments: mx.array) -> PositionIds:
    """0, 1, 2, ... from the start of each document: segments [[7, 7, 7, 8, 8]] -> [[0, 1, 2, 0, 1]], both (B, L)."""
    length = segments.shape[1]
    places = mx.arange(length)[None, :]
    begins = mx.concatenate([mx.ones((segments.shape[0], 1), mx.bool_), segments[:, 1:] != segments[:, :-1]], axis=1)
    return PositionIds(places - mx.cummax(mx.where(begins, places, 0), axis=1), length)


def positions_after(offset: int, length: int, starts: mx.array | None = None) -> PositionIds:
    """`length` positions from `offset` on, minus each row's left padding `starts` (B,)."""
    if starts is None:
        return PositionIds(slice(offset, offset + length), offset + length)
    index = mx.maximum(mx.arange(offset, offset + length)[None, :] - starts[:, None], 0)
    return PositionIds(index, offset + length)


class PositionedInput(NamedTuple):
    """A stack's input with positions applied: each kind of positions changes one of the three."""

    x: mx.array
    """(B, L, D), with sinusoids or learned rows added (section 3.5)."""
    rotations: list[Rotation]
    """Rotary angles of each layer."""
    masks: list[Mask]
    """Self-attention mask of each layer, with relative positions added."""


class Positions(nn.Module):
    """Positions of a stack. Parameters: `weight` if learned or relative; with "relative_layers" a table per layer."""

    def __init__(self, config: TransformerConfig, stack: Stack):
        super().__init__()
        self.config = config
        self.stack: Stack = stack
        self.kind = config.positions
        self.causal = config.is_causal(stack)
        self.count = len(config.layers(stack))
        if self.kind == "learned":
            self.weight = mx.random.normal((config.max_positions, config.d_model), scale=config.d_model**-0.5)
        if self.kind == "relative":
            shape = config.relative_buckets, config.of(stack).heads
            self.weight = mx.random.normal(shape, scale=config.d_model**-0.5)
        if self.kind == "relative_layers":
            self.layers = [RelativeTable(layer) for layer in config.layers(stack)]

    def __call__(self, x: mx.array, position_ids: PositionIds, mask: Mask = None) -> PositionedInput:
        """Apply positions to x (B, L, D). `UserError` if the sequence is longer than a learned table."""
        angles = self.turned(position_ids, x.dtype)
        return PositionedInput(self.add_rows(x, position_ids), angles, self.add_bias(mask, position_ids, x.shape[1]))

    def turned(self, position_ids: PositionIds, dtype: mx.Dtype) -> list[Rotation]:
        """cos and sin of each layer, computed once for all layers with the same rotation."""
        distinct, of_layer = distinct_rotations(self.config, self.stack)
        angles = [rotation(layer, position_ids, dtype) for layer in distinct]
        return [angles[i] for i in of_layer]

    def windowed(self, mask: Mask, position_ids: PositionIds, queries: int) -> list[Mask]:
        """Each layer's mask, with keys outside its window masked."""
        keys = position_ids.limit
        windows = [w if w is None or w < keys else None for w in (c.window for c in self.config.layers(self.stack))]
        masks: dict[int | None, Mask] = {
            w: mask if w is None else window_mask(mask, queries, keys, w, self.causal) for w in dict.fromkeys(windows)
        }
        return [masks[w] for w in windows]

    def add_rows(self, x: mx.array, position_ids: PositionIds) -> mx.array:
        """x + position rows, (B, L, D), for sinusoidal and learned positions."""
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
        """Each layer's mask. Relative positions add a learned number per head and distance, (B, H, L, S) (Raffel et al.
        2020)."""
        if self.kind not in RELATIVE:
            return self.windowed(mask, position_ids, queries)
        keys = position_ids.limit
        table = bucket_table(keys, self.config, self.causal)
        distances = mx.arange(keys) - mx.arange(keys - queries, keys)[:, None]  # (L, S)
        rows, array = table[distances + table.shape[0] // 2], as_array(mask, queries, keys)
        if self.kind == "relative_layers":
            return [plus_mask(layer(rows), array) for layer in self.layers]
        return [plus_mask(relative_bias(self.weight, rows), array)] * self.count


class RelativeTable(nn.Module):
    """A layer's own table of relative positions, as in umT5 (Chung et al. 2023)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.weight = mx.random.normal((config.relative_buckets, config.heads), scale=config.d_model**-0.5)

    def __call__(self, rows: mx.array) -> mx.array:
        return relative_bias(self.weight, rows)


def relative_bias(weight: mx.array, rows: mx.array) -> mx.array:
    """Bias of the scores (1, H, L, S): entries of a table `weight` (buckets, H) for these bucket numbers (L, S)."""
    return weight[rows].transpose(2, 0, 1)[None]


def plus_mask(bias: mx.array, mask: mx.array | None) -> mx.array:
    return bias if mask is None else as_numbers(mask, bias.dtype) + bias


def rotation(config: TransformerConfig, position_ids: PositionIds, dtype: mx.Dtype) -> Rotation:
    """cos and sin of these positions; None unless positions are rotary."""
    if config.positions != "rotary":
        return None
    (index, limit), begin = position_ids, long_from(config)
    rows = [table[index] for table in rotary_table(limit, config)]
    if begin is not None and limit > begin:
        far = True if isinstance(index, slice) else (mx.max(index, axis=1) >= begin)[:, None, None]  # (B, 1, 1)
        long = (table[index] for table in rotary_table(limit, config, long=True))
        rows = [mx.where(far, own, other) for own, other in zip(long, rows, strict=True)]
    cos, sin = (x.astype(dtype) for x in rows)
    return (cos, sin) if cos.ndim == 2 else (cos[:, None], sin[:, None])


def rotate(x: mx.array, rotation: Rotation) -> mx.array:
    """Rotate each pair (x_i, x_{i + D/2}) of x (B, H, L, d_k) by its position's angle (Su et al. 2021)."""
    if rotation is None:
        return x
    cos, sin = rotation
    half = cos.shape[-1]
    x1, x2, *rest = mx.split(x, [half, 2 * half] if 2 * half < x.shape[-1] else 2, axis=-1)  # (B, H, L, D/2), ...
    return mx.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, *rest], axis=-1)


def sinusoid_table(length: int, config: TransformerConfig) -> mx.array:
    """At least `length` rows of the sinusoidal encoding, float32. A longer table starts with exactly the same rows."""
    return _sinusoids(_chunks(length), config.d_model, config.positions, config.first_position)


def bucket_table(length: int, config: TransformerConfig, causal: bool) -> mx.array:
    """Bucket (row of the weight) of each distance, for at least `length` positions; distance 0 is in the middle."""
    return _buckets(_chunks(length), config, causal)


def rotary_table(length: int, config: TransformerConfig, long: bool = False) -> tuple[mx.array, mx.array]:
    """At least `length` rows of cos and of sin, float32."""
    return _rotary(_chunks(length), config, long)


def _chunks(length: int) -> int:
    return -(-length // CHUNK) * CHUNK


@lru_cache(maxsize=32)
def _sinusoids(length: int, d_model: int, kind: str, first: int) -> mx.array:
    return mx.array(sinusoids(length, d_model, kind, first=first))


@lru_cache(maxsize=32)
def _buckets(length: int, config: TransformerConfig, causal: bool) -> mx.array:
    return mx.array(relative_buckets(length, config, causal))


@lru_cache(maxsize=32)
def _rotary(length: int, config: TransformerConfig, long: bool) -> tuple[mx.array, mx.array]:
    cos, sin = rotary_tables(length, config, long)
    return mx.array(cos), mx.array(sin)
