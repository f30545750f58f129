"""Positions: absolute (added to the embeddings), rotary (rotate queries and keys), relative (added to the scores).

Shapes: B batch, L positions, S keys, D model, H heads, d_k one head's width. The tables come from `core/positions.py`,
so that MLX and ONNX use the same bits. They have `max_positions` rows; at a later position the Gather fails.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import nn

from mlx_transformer.core.config import RELATIVE, SINUSOIDS, Stack, TransformerConfig
from mlx_transformer.core.positions import (
    distinct_rotations,
    long_from,
    relative_buckets,
    rotary_tables,
    rotation_of,
    sinusoids,
)

from .marks import Role, extent
from .masks import Mask, window_mask
from .primitives import Op, Parameter, table

Rotation = tuple[ir.Value, ir.Value] | None
"""cos and sin, each (B, 1, L, D/2), B may be 1, for D turned numbers of a head; None if positions aren't rotary."""


class PositionIds(NamedTuple):
    """The new positions: the row of a table that each one reads, and its distances to the keys.

    In a target whose activations have one row per token there is no axis L, and `index` is (N,).
    """

    index: ir.Value
    """(B, L), B may be 1."""
    distances: ir.Value
    """(L, S): the key's place minus the query's, so later keys are positive. Padding takes a place."""


def positions_of(op: Op, length: ir.Value, tokens: ir.Value) -> PositionIds:
    """The number of tokens (B, L), 1 on tokens, before each of `length` places: padding takes no position."""
    places = op.Range(0, length, 1)
    return PositionIds(op.Max(op.Sub(op.CumSum(tokens, 1), 1), 0), distances(op, places, places))


def positions_after(op: Op, offset: ir.Value | None, length: ir.Value, index: ir.Value | None = None) -> PositionIds:
    """`length` positions from `offset` on. `index` (B, L) replaces them, e.g. where padding takes no position."""
    total = length if offset is None else op.Add(offset, length)
    places = op.Range(0 if offset is None else offset, total, 1)
    read = op.Unsqueeze(places, [0]) if index is None else index
    return PositionIds(read, distances(op, places, op.Range(0, total, 1)))


def distances(op: Op, queries: ir.Value, keys: ir.Value) -> ir.Value:
    """Places of queries (L,) and of keys (S,) -> (L, S)."""
    return op.Sub(keys, op.Unsqueeze(queries, [1]))


class PositionedInput(NamedTuple):
    """A stack's input with positions applied: each kind of positions changes one of the three."""

    x: ir.Value
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
            self.weight = Parameter([config.max_positions, config.d_model], Role.ADDED)
        if self.kind == "relative":
            self.weight = Parameter([config.relative_buckets, config.of(stack).heads], Role.ADDED)
        if self.kind == "relative_layers":
            self.layers = nn.ModuleList([RelativeTable(layer) for layer in config.layers(stack)])

    def forward(self, op: Op, x: ir.Value, position_ids: PositionIds, mask: Mask = None) -> PositionedInput:
        """Apply positions to x (B, L, D) and its mask."""
        angles = self.turned(op, position_ids)
        return PositionedInput(self.add_rows(op, x, position_ids), angles, self.add_bias(op, mask, position_ids))

    def turned(self, op: Op, position_ids: PositionIds) -> list[Rotation]:
        """cos and sin of each layer, computed once for all layers with the same rotation."""
        distinct, of_layer = distinct_rotations(self.config, self.stack)
        angles = [rotation(op, layer, position_ids, self.tables_of(layer)) for layer in distinct]
        return [angles[i] for i in of_layer]

    def tables_of(self, layer: TransformerConfig) -> str:
        """The name of a layer's cos and sin tables: "positions", for the second rotation of a model "positions.1"."""
        c = self.config
        every = list(dict.fromkeys(rotation_of(each) for stack in c.stacks for each in c.layers(stack)))
        return f"positions.{every.index(rotation_of(layer))}".removesuffix(".0")

    def windowed(self, op: Op, mask: Mask, position_ids: PositionIds) -> list[Mask]:
        """Each layer's mask, with keys outside its window masked."""
        windows = [layer.window for layer in self.config.layers(self.stack)]
        far = position_ids.distances
        masks = {w: mask if w is None else window_mask(op, mask, far, w, self.causal) for w in dict.fromkeys(windows)}
        return [masks[w] for w in windows]

    def add_rows(self, op: Op, x: ir.Value, position_ids: PositionIds) -> ir.Value:
        """x + position rows, (B, L, D), for sinusoidal and learned positions."""
        if self.kind not in ("learned", *SINUSOIDS):
            return x
        rows = self.weight if self.kind == "learned" else sinusoid_table(op, self.config)
        return op.Add(x, op.Gather(rows, position_ids.index, axis=0))  # (B, L, D)

    def add_bias(self, op: Op, mask: Mask, position_ids: PositionIds) -> list[Mask]:
        """Each layer's mask. Relative positions add a learned number per head and distance, (B, H, L, S) (Raffel et al.
        2020)."""
        if self.kind not in RELATIVE:
            return self.windowed(op, mask, position_ids)
        first = self.config.max_positions - 1  # the table's entry for distance 0
        rows = op.Gather(bucket_table(op, self.config, self.causal), op.Add(position_ids.distances, first))  # (L, S)
        if self.kind == "relative_layers":
            return [plus_mask(op, layer(op, rows), mask) for layer in self.layers]
        return [plus_mask(op, relative_bias(op, self.weight, rows), mask)] * self.count


class RelativeTable(nn.Module):
    """A layer's own table of relative positions, as in umT5 (Chung et al. 2023)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.weight = Parameter([config.relative_buckets, config.heads], Role.ADDED)

    def forward(self, op: Op, rows: ir.Value) -> ir.Value:
        """Bucket numbers (L, S) -> bias (1, H, L, S)."""
        return relative_bias(op, self.weight, rows)


def relative_bias(op: Op, weight: ir.Value, rows: ir.Value) -> ir.Value:
    """Bias of the scores (1, H, L, S): entries of a table `weight` (buckets, H) for these bucket numbers (L, S)."""
    return op.Unsqueeze(op.Transpose(op.Gather(weight, rows, axis=0), perm=[2, 0, 1]), [0])


def plus_mask(op: Op, bias: ir.Value, mask: Mask) -> ir.Value:
    return bias if mask is None else op.Add(mask, bias)


def rotation(op: Op, config: TransformerConfig, position_ids: PositionIds, name: str = "positions") -> Rotation:
    """cos and sin of these positions, from the tables called `name`; None unless positions are rotary."""
    if config.positions != "rotary":
        return None
    index, begin = position_ids.index, long_from(config)
    # The new axis is that of the heads, the second of queries and keys in every target.
    cos, sin = (op.Unsqueeze(op.Gather(rows, index, axis=0), [1]) for rows in rotary_table(op, config, name))
    if begin is None or begin >= config.max_positions:
        return cos, sin
    near = op.Unsqueeze(op.Less(op.ReduceMax(index, [-1], keepdims=1), begin), [1, 2])  # (B, 1, 1, 1)
    long = (op.Unsqueeze(op.Gather(rows, index, axis=0), [1]) for rows in rotary_table(op, config, name, long=True))
    cos, sin = (op.Where(near, own, other) for own, other in zip((cos, sin), long, strict=True))
    return cos, sin


def rotate(op: Op, x: ir.Value, rotation: Rotation) -> ir.Value:
    """Rotate each pair (x_i, x_{i + D/2}) of x (B, H, L, d_k) by its position's angle (Su et al. 2021)."""
    if rotation is None:
        return x
    cos, sin = rotation
    half, width = extent(cos, -1), extent(x, -1)
    if 2 * half < width:
        x1, x2, *rest = op.Split(x, [half, half, width - 2 * half], axis=-1, _outputs=3)  # (B, H, L, D/2), ...
    else:
        x1, x2, *rest = op.Split(x, axis=-1, num_outputs=2, _outputs=2)
    turned1 = op.Sub(op.Mul(x1, cos), op.Mul(x2, sin))
    turned2 = op.Add(op.Mul(x2, cos), op.Mul(x1, sin))
    return op.Concat(turned1, turned2, *rest, axis=-1)  # (B, H, L, d_k)


def sinusoid_table(op: Op, config: TransformerConfig) -> ir.Value:
    """Sinusoids (max_positions, D)."""

    def rows() -> NDArray:
        return sinusoids(config.max_positions, config.d_model, config.positions, first=config.first_position)

    return table(op, "positions.sinusoids", rows)


def bucket_table(op: Op, config: TransformerConfig, causal: bool) -> ir.Value:
    """Bucket (row of the weight) of each distance, from 1 - max_positions on: (2 * max_positions - 1,)."""
    name = "positions.causal_buckets" if causal else "positions.buckets"
    return table(op, name, lambda: relative_buckets(config.max_positions, config, causal))


def rotary_table(
    op: Op, config: TransformerConfig, name: str = "positions", long: bool = False
) -> tuple[ir.Value, ir.Value]:
    """cos and sin, each (max_positions, D/2)."""
    name = f"{name}.long" if long else name
    return (
        table(op, f"{name}.cos", lambda: rotary_tables(config.max_positions, config, long)[0]),
        table(op, f"{name}.sin", lambda: rotary_tables(config.max_positions, config, long)[1]),
    )
