"""Runs the graphs of target portable as one model: encode, decode, and decode step by step with a cache.

NumPy in, NumPy out. Shapes: B sentences, R rows (B or B*beams), S source, T target, L new tokens, P past tokens, D
model, V vocabulary, C classes, W numbers of a text's vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from export.interface import (
    DECODER_FIRST,
    DECODER_MERGED,
    DECODER_NEXT,
    ENCODER,
    GRAPHS,
    MODEL,
    VECTORS_OF,
    Request,
    head,
)
from export.targets.session import PortSession, Session, Values
from mlx_transformer.core.config import RELATIVE
from mlx_transformer.core.heads import Kind
from mlx_transformer.core.inputs import Sources
from mlx_transformer.decoding.steps import Decoder, Model, joins, reading

SOURCE_MULTIPLE = 4
"""Sources are padded to a multiple of this length. When one query attends to keys, ONNX Runtime sums four keys at a
time and the rest one by one. At other lengths the order of the sum, and so its last bit, would depend on the length of
the longest sentence in the batch."""

PROMPT_MULTIPLE = 16
"""Prompts, padded on the left, are padded to a multiple of this length, so that a token's lane in a register of 16
numbers doesn't depend on the batch."""


@dataclass
class OnnxCache:
    """The decoding state of a batch; implements `decoding.steps.Decoder`. Rows are hypotheses; the `beams` rows of a
    sentence are side by side."""

    graphs: EncoderDecoderGraphs | CausalGraphs
    fixed: Values
    """Inputs from the source: its mask, the memory, after the first run its keys and values. Empty if decoder-only."""
    shared: bool
    """`fixed` has one row per sentence, shared by its beams."""
    mask: NDArray[np.int64] | None = None
    """Decoder-only: 1 on tokens, 0 on the prompt's padding (R, P)."""
    past: Values = field(default_factory=dict)
    """Keys and values (or states) so far; empty before the first run."""
    beams: int = 1
    length: int = 0
    """Positions so far."""

    def step(self, ids: NDArray) -> NDArray:
        return self.extend(ids[:, None])

    def extend(self, ids: NDArray) -> NDArray:
        return self.graphs.step(ids.astype(np.int64), self)[:, -1]

    def join(self, other: OnnxCache) -> None:
        """Append the rows of another cache of a decoder-only model; shorter rows are padded on the left."""
        length = max(self._columns, other._columns)
        self.mask = np.concatenate([_padded(cache._mask, 1, length) for cache in (self, other)])
        pairs = {name: (x, other.past[name]) for name, x in self.past.items()}
        self.past = {name: np.concatenate([_padded(x, 2, length) for x in pair]) for name, pair in pairs.items()}

    def part(self, row: int, length: int, of: int) -> OnnxCache:
        first = self._columns - of
        past = {name: x[row : row + 1, :, first : first + length].copy() for name, x in self.past.items()}
        return replace(self, mask=np.ones((1, length), np.int64), past=past)

    def shrink(self, lengths: Sequence[int]) -> None:
        if first := self._columns - max(lengths):
            self.mask = self._mask[:, first:]
            self.past = {name: x[:, :, first:].copy() for name, x in self.past.items()}

    def read_each(self, ids: NDArray) -> NDArray:
        return self.graphs.step(ids.astype(np.int64), self)

    def take_back(self, count: int) -> None:
        self.past = {name: x[:, :, :-count] for name, x in self.past.items()}
        self.length -= count
        if self.mask is not None:
            self.mask = self.mask[:, :-count]

    def repeat(self, times: int) -> None:
        self.beams *= times
        rows = np.repeat(np.arange(next(iter(self.past.values())).shape[0]), times)
        self._take(rows, None if self.shared else rows)

    def reorder(self, rows: NDArray) -> None:
        """Continue row i from the old row rows[i] of the same sentence; the source's values stay."""
        if not np.array_equal(rows, np.arange(len(rows))):
            self._take(rows, None)

    def keep(self, rows: NDArray) -> None:
        self._take(rows, rows[:: self.beams] // self.beams if self.shared else rows)

    @property
    def _mask(self) -> NDArray[np.int64]:
        assert self.mask is not None
        return self.mask

    @property
    def _columns(self) -> int:
        return self._mask.shape[1]

    def _take(self, rows: NDArray, fixed: NDArray | None) -> None:
        self.past = {name: np.take(x, rows, axis=0) for name, x in self.past.items()}
        if self.mask is not None:
            self.mask = self.mask[rows]
        if fixed is not None:
            self.fixed = {name: np.take(x, fixed, axis=0) for name, x in self.fixed.items()}


def _padded(x: NDArray, axis: int, length: int) -> NDArray:
    """Put zeros before x, so that the axis has this length."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = length - x.shape[axis], 0
    return np.pad(x, widths) if widths[axis][0] else x


class EncoderDecoderGraphs(Model):
    """encoder_model with decoder_model and decoder_with_past_model, or with decoder_model_merged."""

    def __init__(self, request: Request, sessions: Mapping[str, Session]):
        self.config = request.config
        self.encoder = PortSession(sessions[ENCODER], GRAPHS[ENCODER](request))
        # The merged graph has the inputs of both other decoders. Optimum's decoders may have more of them than ours.
        ports = GRAPHS[DECODER_MERGED](request)
        decoders = {name: PortSession(session, ports) for name, session in sessions.items() if name != ENCODER}
        self.first = decoders.get(DECODER_FIRST) or decoders[DECODER_MERGED]
        self.next = decoders.get(DECODER_NEXT) or decoders[DECODER_MERGED]
        self.encoder.need(outputs=["memory"])
        for graph in (self.first, self.next):
            graph.need(["target_ids", "source_mask"], ["logits"])
        # Beams can share a row of the source if its axis has another name than the decoder's rows, as in our graphs.
        self.shared = self.next.shapes["source_mask"][:1] != self.next.shapes["target_ids"][:1]

    def encode(self, source: Values, mask: NDArray) -> NDArray:
        """The encoder's output (B, S, D) for a source, e.g. {"source_ids": (B, S)}, with its mask (B, S)."""
        self.encoder.check_source(source)
        return self.encoder(["memory"], {**source, "source_mask": mask})["memory"]

    def decode(self, ids: NDArray, memory: NDArray, mask: NDArray) -> NDArray:
        return self._begin(["logits"], ids, memory, mask)["logits"]

    def attention(self, source: Values, mask: NDArray, target_ids: NDArray) -> NDArray:
        """Attention weights (B, T, S) of targets (B, T) over sources, if the folder was exported with attention."""
        return self._begin(["attention"], target_ids, self.encode(source, mask), mask)["attention"]

    def begin(self, memory: NDArray, mask: NDArray) -> OnnxCache:
        return OnnxCache(self, {"memory": memory, "source_mask": mask}, self.shared)

    def step(self, ids: NDArray, cache: OnnxCache) -> NDArray:
        """Logits (R, L, V) after the new tokens `ids` (R, L); updates the cache."""
        if cache.past:
            at = {"positions": positions(ids, cache.length)}
            values = {"target_ids": ids, "later": np.array([True]), **at, **cache.fixed, **cache.past}
            cache.past = self.next(["logits", *self.next.cache], values)
        else:
            outputs = ["logits", *self.first.cache, *self.first.cross]
            cache.past = self._begin(outputs, ids, cache.fixed["memory"], cache.fixed["source_mask"])
            cache.fixed |= {value: cache.past.pop(value) for value in self.first.cross}
            if "memory" not in self.next.inputs:
                del cache.fixed["memory"]
        cache.length += ids.shape[1]
        return cache.past.pop("logits")

    def start(self, sources: Sources) -> tuple[OnnxCache, NDArray]:
        """Encode sources for a search; returns the cache and the logits (B, V) after the start token."""
        source, mask = sources.padded(SOURCE_MULTIPLE, self.config.max_positions)
        decoder = self.begin(self.encode(source, mask), mask)
        return decoder, decoder.step(np.full(len(sources), sources.start, np.int64))

    def _begin(self, outputs: list[str], ids: NDArray, memory: NDArray, mask: NDArray) -> Values:
        values = {"target_ids": ids, "memory": memory, "source_mask": mask, "later": np.array([False])}
        values["positions"] = positions(ids)
        return self.first(outputs, {**values, **self.first.empty_past(len(ids))})


def positions(ids: NDArray, first: int = 0) -> NDArray[np.int64]:
    """Positions of the tokens (R, L), counted from `first`."""
    return np.broadcast_to(np.arange(first, first + ids.shape[1]), ids.shape)


class CausalGraphs(Model):
    """A decoder-only model: model.onnx with its cache."""

    takes_back = True

    def __init__(self, request: Request, sessions: Mapping[str, Session]):
        self.config, self.graph = request.config, PortSession(sessions[MODEL], GRAPHS[MODEL](request))
        self.joins = joins(self.config)

    def logits(self, source: Values, mask: NDArray) -> NDArray:
        return self.step(source["source_ids"], self.begin(mask))

    def begin(self, mask: NDArray) -> OnnxCache:
        """An empty cache. `mask` (B, L): of the first tokens, 0 on padding at the left."""
        return OnnxCache(self, {}, True, mask)

    def step(self, ids: NDArray, cache: OnnxCache) -> NDArray:
        """Logits (R, L, V) after the new tokens `ids` (R, L); updates the cache."""
        assert cache.mask is not None
        if cache.past:
            cache.mask = np.concatenate([cache.mask, np.ones_like(ids)], axis=1)
        positions = np.maximum(np.cumsum(cache.mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
        past = cache.past or self.graph.empty_past(len(ids))
        values = {"target_ids": ids, "target_mask": cache.mask, "positions": positions, **past}
        cache.past = self.graph(["logits", *self.graph.cache], values)
        return cache.past.pop("logits")

    def start(self, sources: Sources) -> tuple[Decoder, NDArray]:
        """Read the prompts, padded on the left, for a search; returns the cache and the logits (B, V) after them."""
        return reading(self, self._start, sources)

    def _start(self, sources: Sources) -> tuple[OnnxCache, NDArray]:
        # With relative positions padding takes places, and the table may have no entries for more of them.
        multiple = 1 if self.config.positions in RELATIVE else PROMPT_MULTIPLE
        source, mask = sources.padded(multiple, left=True)
        cache = self.begin(mask)
        return cache, self.step(source["source_ids"], cache)[:, -1]


class EncoderGraphs:
    """An encoder-only model: model.onnx."""

    def __init__(self, request: Request, sessions: Mapping[str, Session]):
        self.config, self.graph = request.config, PortSession(sessions[MODEL], GRAPHS[MODEL](request))

    def encode(self, source: Values, mask: NDArray) -> NDArray:
        """The encoder's output (B, L, D) for a source, e.g. {"source_ids": (B, L)}, with its mask (B, L)."""
        return self._run(["memory"], source, mask)[0]

    def logits(self, source: Values, mask: NDArray) -> NDArray:
        """The head's output, by its kind: logits (B, L, V), (B, L, C) or (B, C); (B, L, 2), logits of an answer's start
        and end; pooled vectors (B, D); or hidden states (B, L, D)."""
        values = [port.value for port in head(Request(config=self.config), "", "")] or ["memory"]
        arrays = self._run(values, source, mask)
        return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1)

    def vectors(self, source: Values, mask: NDArray, kind: Kind = "dense") -> NDArray:
        """Text vectors from a graph with these outputs: by kind "dense" (B, W), "sparse", weights of tokens (B, L), or
        "multi", vectors of tokens (B, L, W)."""
        return self._run([VECTORS_OF[kind]], source, mask)[0]

    def _run(self, outputs: list[str], source: Values, mask: NDArray) -> list[NDArray]:
        self.graph.check_source(source)
        arrays = self.graph(outputs, {**source, "source_mask": mask})
        return [arrays[value] for value in outputs]
