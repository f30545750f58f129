"""The cache of decoding: keys and values of each layer, or the state of its SSRU. A step computes new positions only.

Shapes: R rows (sentences x beams), B sentences, K key-value heads, H heads, L new positions, S source, d one head.

Self-attention keys and values live in buffers with spare room. A step writes its slice in place and reads a view of the
used part; MLX updates a buffer in place if nothing else refers to it. Buffers double up to CHUNK positions, then grow
by CHUNK. A layer with a window holds only its last positions: the window and less than 2 CHUNKs more. Keys and values
of the encoder's output are computed once and made contiguous for the GPU kernels.

Optionally, self-attention's keys and values are quantised to 4 or 8 bits when they are stored, with a scale and a bias
for every 32 or 64 numbers: about a quarter or half of the memory of 16 bits. The products read the integers directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import mlx.core as mx

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import Name, UserError

from .masks import Mask, causal_padding_mask, padding_mask
from .ssru import LayerState

CHUNK = 256
SMALLEST = 32

KeyValues = tuple[mx.array, mx.array]
"""Keys (rows, K, length, d_k) and values (rows, K, length, d_v)."""


CACHE_BITS = (4, 8)


@dataclass(frozen=True)
class Integers:
    """Keys or values (R, K, L, d) as integers (R, K, L, d * bits / 32), scales and biases (R, K, L, d / group)."""

    arrays: tuple[mx.array, ...]
    bits: int
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, length, words = self.arrays[0].shape
        width = words * 32 // self.bits
        return (*rows, width, length) if self.transposed else (*rows, length, width)

    def swapaxes(self, _: int, __: int) -> Integers:
        """Swap the last two axes."""
        return replace(self, transposed=not self.transposed)


def product(x: mx.array, y: mx.array | Integers) -> mx.array:
    """x @ y; y may be quantised."""
    if not isinstance(y, Integers):
        return x @ y
    group = group_of(y.shape[-2 if y.transposed else -1])
    return mx.quantized_matmul(x, *y.arrays, transpose=y.transposed, group_size=group, bits=y.bits)


def group_of(width: int) -> int:
    """Numbers that share a scale, for heads of this width: 64 or 32."""
    return 64 if width % 64 == 0 else 32


def room_for(length: int) -> int:
    """Capacity of a buffer for `length` positions: 32, 64, 128, 256, then multiples of 256."""
    if length > CHUNK:
        return -(-length // CHUNK) * CHUNK
    return max(SMALLEST, 1 << (length - 1).bit_length())


class LayerCache:
    """Self-attention keys and values of a layer.

    window: how many positions a query sees; None: all. bits: quantise to integers of 4 or 8 bits; None: don't.
    """

    def __init__(self, window: int | None = None, bits: int | None = None) -> None:
        self.window, self.bits = window, bits
        self.used = 0
        """Positions in the buffers."""
        self.dropped = 0
        """Number of earlier positions that were dropped, as no later query sees them."""
        self.buffers: list[mx.array] = []
        """Keys and values (R, K, capacity, d); with `bits` the three arrays of each."""

    def extend(self, k: mx.array, v: mx.array) -> tuple[mx.array | Integers, mx.array | Integers]:
        """Append keys and values (R, K, L, d); return those of all positions held, (R, K, used, d)."""
        self._drop()
        start, end = self.used, self.used + k.shape[2]
        new = [*self._stored(k), *self._stored(v)]
        if not self.buffers:
            self.buffers = [_empty(x, room_for(end)) for x in new]
        elif (more := room_for(end) - self.buffers[0].shape[2]) > 0:
            self.buffers = [mx.concatenate([x, _empty(x, more)], axis=2) for x in self.buffers]
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer[:, :, start:end, :] = x
        self.used = end
        held = [x[:, :, :end, :] for x in self.buffers]
        if self.bits is None:
            return held[0], held[1]
        return Integers(tuple(held[:3]), self.bits), Integers(tuple(held[3:]), self.bits)

    def _stored(self, x: mx.array) -> Sequence[mx.array]:
        return [x] if self.bits is None else mx.quantize(x, group_size=group_of(x.shape[-1]), bits=self.bits)

    def take_back(self, count: int) -> None:
        """Forget the last `count` positions; the next step overwrites them."""
        self.used -= count

    def take(self, rows: mx.array) -> None:
        """Select rows by index (R',), which may repeat. Copies only the used part, rounded up to 32 positions."""
        part = -(-self.used // SMALLEST) * SMALLEST
        self.buffers = [mx.take(x[:, :, :part, :], rows, axis=0) for x in self.buffers]

    def has(self, length: int) -> bool:
        """Whether the window of a query after the first `length` positions is still held."""
        return not self.dropped or self.dropped <= length - (self.window or 0) + 1

    def part(self, rows: slice, first: int, end: int) -> LayerCache:
        """Copy positions `first` to `end` of some rows, as far as they are held."""
        part, begin = LayerCache(self.window, self.bits), max(first, self.dropped)
        part.used, part.dropped = end - begin, begin - first
        begin, end = begin - self.dropped, end - self.dropped
        part.buffers = [_padded(x[rows, :, begin:end], 0, part.used) for x in self.buffers]
        return part

    def join(self, other: LayerCache, length: int) -> None:
        """Append the rows of `other`. Both are padded on the left: to `length` positions, or, if positions were
        dropped, to as many as the longer holds."""
        held = length if not (self.dropped or other.dropped) else max(self.used, other.used)
        own, others = ([_padded(x[:, :, : c.used], held - c.used, held) for x in c.buffers] for c in (self, other))
        self.buffers = [mx.concatenate([*pair], axis=0) for pair in zip(own, others, strict=True)]
        self.used, self.dropped = held, length - held

    def _drop(self) -> None:
        """Drop positions outside the window once there are 2 CHUNKs of them; one CHUNK stays, so that `take_back` can
        go back so far."""
        if self.window is None or self.used < self.window + 2 * CHUNK:
            return
        kept = self.window + CHUNK
        self.buffers = [_padded(x[:, :, self.used - kept : self.used], 0, kept) for x in self.buffers]
        self.dropped, self.used = self.dropped + self.used - kept, kept

    def arrays(self) -> list[mx.array]:
        return self.buffers


class Cache:
    """Caches of all layers for a batch; made by `Transformer.start`, extended by `Transformer.step`.

    For a beam search: `repeat(beams)` once after the first step, then `reorder(rows)` at each step, and `keep(rows)`
    to drop finished sentences. Row r is hypothesis r % beams of sentence r // beams.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache | LayerState],
        cross: Sequence[KeyValues] | None = None,
        source_tokens: mx.array | None = None,
        heads: int = 1,
        starts: mx.array | None = None,
    ):
        self.offset = 0
        """Positions decoded so far, padding included."""
        self.beams = 1
        self.layers = layers
        self.starts = starts
        """Number of padding positions at the left of each row's prompt (R,); None: no padding."""
        self.cross = None if cross is None else [(mx.contiguous(k), mx.contiguous(v)) for k, v in cross]
        # Repeated for each head here: the fused kernel would copy a broadcast mask at every call.
        self.cross_mask: Mask = None
        if source_tokens is not None:
            b, s = source_tokens.shape
            self.cross_mask = mx.contiguous(mx.broadcast_to(padding_mask(source_tokens), (b, heads, 1, s)))

    def self_mask(self, length: int, heads: int) -> Mask:
        """Self-attention mask of `length` new positions over cached and new positions; the same in every layer."""
        if self.starts is None:
            return "causal" if length > 1 else None
        total = self.offset + length
        tokens = mx.arange(total)[None, :] >= self.starts[:, None]  # (R, total)
        mask = causal_padding_mask(tokens, length)
        return mx.contiguous(mx.broadcast_to(mask, (mask.shape[0], heads, length, total)))  # (R, H, L, total)

    def take_back(self, count: int) -> None:
        """Forget the last `count` positions of all rows. Not for SSRUs, whose state can't go back."""
        for layer in self.layers:
            cast(LayerCache, layer).take_back(count)
        self.offset -= count

    def repeat(self, beams: int) -> None:
        """Repeat every row `beams` times, side by side. The beams of a sentence share its source keys and values."""
        self.beams *= beams
        for layer in self.layers:
            if arrays := layer.arrays():
                layer.take(mx.repeat(mx.arange(arrays[0].shape[0]), beams))
        if self.starts is not None:
            self.starts = mx.repeat(self.starts, beams)

    def reorder(self, rows: mx.array) -> None:
        """Reorder the hypotheses: row i continues from row rows[i] (R,), of the same sentence."""
        for layer in self.layers:
            layer.take(rows)

    def keep(self, rows: mx.array) -> None:
        """Keep only these rows (R',): whole sentences, the beams of each side by side."""
        for layer in self.layers:
            layer.take(rows)
        if self.starts is not None:
            self.starts = mx.take(self.starts, rows)
        sentences = rows[:: self.beams] // self.beams
        if self.cross is not None:
            self.cross = [(mx.take(k, sentences, axis=0), mx.take(v, sentences, axis=0)) for k, v in self.cross]
        if isinstance(self.cross_mask, mx.array):
            self.cross_mask = mx.take(self.cross_mask, sentences, axis=0)

    def join(self, other: Cache) -> None:
        """Append the rows of another prompt's cache; shorter rows are padded on the left."""
        length = max(self.offset, other.offset)
        if self.offset != other.offset or self.starts is not None or other.starts is not None:
            self.starts = mx.concatenate([cache._starts_in(length) for cache in (self, other)])
        for own, others in zip(self._attended, other._attended, strict=True):
            own.join(others, length)
        self.offset = length

    def part(self, row: int, length: int, of: int) -> Cache | None:
        """Copy the first `length` of a row's `of` positions; None if a layer has dropped positions of its window."""
        first = self.offset - of
        if not all(layer.has(first + length) for layer in self._attended):
            return None
        part = Cache([layer.part(slice(row, row + 1), first, first + length) for layer in self._attended])
        part.offset = length
        mx.eval(part.arrays())  # a lazy copy would keep the whole batch in memory
        return part

    def shrink(self, lengths: Sequence[int]) -> None:
        """Drop padding that all rows have. lengths (R,): the positions of each row without its padding."""
        longest = max(lengths)
        if longest < self.offset:
            self.layers = [layer.part(slice(None), self.offset - longest, self.offset) for layer in self._attended]
            self.offset = longest
        self.starts = None if min(lengths) == longest else mx.array([longest - length for length in lengths])

    @property
    def _attended(self) -> list[LayerCache]:
        """The layers of a decoder-only model."""
        return [layer for layer in self.layers if isinstance(layer, LayerCache)]

    def _starts_in(self, length: int) -> mx.array:
        """Padding before each row (R,) if there are `length` positions."""
        starts = mx.zeros(self.arrays()[0].shape[0], mx.int32) if self.starts is None else self.starts
        return starts + (length - self.offset)

    def arrays(self) -> list[mx.array]:
        """All cached arrays, for `mx.eval` and `mx.async_eval`."""
        arrays = [array for layer in self.layers for array in layer.arrays()]
        arrays += [array for pair in self.cross or [] for array in pair]
        return arrays


def empty_layers(config: TransformerConfig, bits: int | None = None) -> list[LayerCache | LayerState]:
    """An empty cache for each decoder layer; bits: see `LayerCache`."""
    return [LayerState() if config.recurrent else LayerCache(layer.window, bits) for layer in config.layers("decoder")]


def check_cache(config: TransformerConfig, bits: int, where: str) -> None:
    """Raise `UserError` if a model's keys and values can't be quantised to `bits` bits. where: the model's name."""
    if bits not in CACHE_BITS:
        raise UserError("{}: choose 4 or 8", Name("cache_bits", str(bits)))
    if not config.has_decoder or config.recurrent:
        raise UserError("{}: caches no keys and values: leave out {}", where, Name("cache_bits"))
    widths = {width for layer in config.layers("decoder") for width in (layer.d_k, layer.d_v)}
    if odd := sorted(width for width in widths if width % 32):
        raise UserError("{}: its heads are {} wide; {} needs a multiple of 32", where, odd[0], Name("cache_bits"))


@lru_cache(maxsize=64)
def mask_heads(config: TransformerConfig) -> int:
    """Number of heads to repeat decoder masks for; 1 (broadcast) if the layers differ in their number of heads."""
    heads = {layer.heads for layer in config.layers("decoder")}
    return heads.pop() if len(heads) == 1 else 1


def _padded(x: mx.array, left: int, length: int) -> mx.array:
    """Make a buffer for `length` positions from x (R, K, L, d), with `left` positions of zeros before it."""
    return mx.pad(x, [(0, 0), (0, 0), (left, room_for(length) - left - x.shape[2]), (0, 0)])


def _empty(like: mx.array, capacity: int) -> mx.array:
    r, h, _, d = like.shape
    return mx.zeros((r, h, capacity, d), like.dtype)
