"""Runs the graphs of target `cpu` as one model.

Buffers are bound once, keys and values are written in place, and beams read each other's cache by an index.

Shapes: see network.py; V vocabulary, C listed ids, T target tokens, W extensions of a sentence.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export.interface import (
    DECODER_CPU,
    ENCODER_CPU,
    GRAPHS,
    LENGTH,
    LISTED,
    LISTED_CPU,
    ROWS_CPU,
    Request,
    operator_shape,
)
from export.targets.portable.runtime import SOURCE_MULTIPLE
from export.targets.session import PortSession, Values
from mlx_transformer.core.inputs import Sources
from mlx_transformer.decoding.candidates import Candidates
from mlx_transformer.decoding.options import Options
from mlx_transformer.decoding.steps import EXCLUDED, Batch, Model, Strategy

from .search import strategy
from .step_graph import BufferPool, ListedGraphs, StepGraph

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")

POSITIONS = 32
"""Positions a new cache has room for; the room doubles when it is full."""

LOGITS = ("logits",)


def run_options() -> ort.RunOptions:
    """Options of every run."""
    options = ort.RunOptions()
    # Without this entry Python's binding looks for it at every step and handles an exception (50 us). "-1" captures no
    # graph.
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


class CpuModel(Model):
    """encoder_cpu and decoder_cpu. Several threads may decode at the same time, each its own batch.

    `single_threaded`: opens the same model with one thread per operator, to run `threads` batches at the same time.
    That uses the cores better if operators are too small to be shared among threads. `listed`: opens the sessions for a
    search among given ids (`Listed`); returns None if the folder has none.
    """

    def __init__(
        self,
        request: Request,
        encoder: ort.InferenceSession,
        decoder: ort.InferenceSession,
        threads: int = 1,
        single_threaded: Callable[[], CpuModel] | None = None,
        listed: Callable[[], tuple[ort.InferenceSession, ort.InferenceSession] | None] = lambda: None,
    ):
        self.request, self.config, self.threads = request, request.config, threads
        self.listed = functools.cache(listed)
        self.single_threaded = None if single_threaded is None else functools.cache(single_threaded)
        self.memory = BufferPool()
        self.options = run_options()
        self.encoder = PortSession(encoder, GRAPHS[ENCODER_CPU](request), self.options)
        self.decoder = StepGraph(decoder, GRAPHS[DECODER_CPU](request), self.config, self.memory, self.options)

    def in_parallel(self, search_on: Callable[[Model, Batch], T], work: Sequence[Batch]) -> Iterator[T]:
        """Run `search_on(model, batch)` on all batches, in parts at the same time if that is faster."""
        if self.single_threaded is None or sum(len(batch.index) for batch in work) < 2 * self.threads:
            return (search_on(self, batch) for batch in work)
        model = self.single_threaded()
        return self.pool.map(lambda batch: search_on(model, batch), split_among(work, self.threads))

    @functools.cached_property
    def pool(self) -> ThreadPoolExecutor:
        """Threads for batches at the same time; kept, since a new thread starts without memory of its own."""
        from concurrent.futures import ThreadPoolExecutor  # here, since it imports logging

        return ThreadPoolExecutor(self.threads)

    @functools.cached_property
    def listed_graphs(self) -> ListedGraphs | None:
        """The graphs for a search among given ids; None if the folder has none."""
        sessions = self.listed()
        if sessions is None:
            return None
        (ids,) = GRAPHS[ROWS_CPU](self.request).input_names.values()
        outputs = [output.name for output in sessions[0].get_outputs()]
        step = StepGraph(sessions[1], GRAPHS[LISTED_CPU](self.request), self.config, self.memory, self.options)
        return ListedGraphs(sessions[0], ids, outputs, step)

    def among(self, candidates: Candidates) -> Listed | None:
        """The model restricted to the candidates of a batch; None if these are all ids (e.g. for sampling), or the
        folder has no graphs for it."""
        graphs = None if len(candidates.ids) == self.config.vocab_size else self.listed_graphs
        if graphs is not None:
            return Listed(self, graphs, candidates)
        return None

    def strategy(self, batch: Batch, options: Options, scored: bool) -> Strategy:
        return strategy(batch, options, self.config, scored)

    def encode(self, source: Values, mask: NDArray) -> NDArray[np.float32]:
        """The encoder's output (B, S, D) for a source, e.g. {"source_ids": (B, S)}, with its mask (B, S)."""
        return self._encode(["memory"], source, mask)["memory"]

    def begin(self, source: Values, mask: NDArray, outputs: Sequence[str] = LOGITS, beam: int = 1) -> CpuDecoder:
        """Encode sources (B, S); the decoder is ready for their start tokens."""
        return self.decoder_of(self.decoder, source, mask, outputs, beam)

    def decoder_of(
        self, step: StepGraph, source: Values, mask: NDArray, outputs: Sequence[str], beam: int
    ) -> CpuDecoder:
        """Encode sources (B, S) for the graph `step`; the decoder is ready for their start tokens."""
        decoder = RecurrentCpuDecoder if self.config.recurrent else CpuDecoder
        return decoder(step, self._encode(["source_mask", *step.cross], source, mask), outputs, beam)

    def start(
        self, sources: Sources, outputs: Sequence[str] = LOGITS, beam: int = 1, bans: NDArray | None = None
    ) -> tuple[CpuDecoder, Any]:
        """Encode sources for a search; returns the decoder and the first step's logits (B, V) or other outputs."""
        decoder = self.begin(*sources.padded(SOURCE_MULTIPLE, self.config.max_positions), outputs, beam)
        if bans is not None:
            decoder.bans[:] = bans
        return decoder, decoder.step(np.full(len(sources), sources.start, np.int64))

    def logits(self, source: Values, mask: NDArray, target_ids: NDArray) -> NDArray[np.float32]:
        """Teacher-forced logits (B, T, V) of targets (B, T)."""
        return self._stepped(LOGITS, source, mask, target_ids)

    def attention(self, source: Values, mask: NDArray, target_ids: NDArray) -> NDArray[np.float32]:
        """Attention weights (B, T, S) of targets (B, T) over sources, if the folder was exported with attention."""
        return self._stepped(("attention",), source, mask, target_ids)

    def _stepped(self, outputs: Sequence[str], source: Values, mask: NDArray, ids: NDArray) -> NDArray[np.float32]:
        decoder = self.begin(source, mask, outputs)
        return np.stack([decoder.step(column).copy() for column in ids.T], axis=1)

    def _encode(self, outputs: list[str], source: Values, mask: NDArray) -> Values:
        self.encoder.check_source(source)
        # The encoder also has an output "source_mask", for the decoder: the same mask as int32.
        return self.encoder(outputs, {**source, "source_mask": mask})


class Listed(Model):
    """A `CpuModel` that computes only the logits of a batch's candidates."""

    def __init__(self, model: CpuModel, graphs: ListedGraphs, candidates: Candidates):
        self.model, self.config, self.candidates = model, candidates.config, candidates
        options: tuple[Any, ...] = (model.options,)  # as in PortSession
        rows: Any = graphs.rows.run(graphs.outputs, {graphs.ids: candidates.ids}, *options)
        self.step = graphs.step.among(candidates, dict(zip(graphs.outputs, rows, strict=True)))

    def strategy(self, batch: Batch, options: Options, scored: bool) -> Strategy:
        return strategy(batch, options, self.config, scored)

    def start(
        self, sources: Sources, outputs: Sequence[str] = LOGITS, beam: int = 1, bans: NDArray | None = None
    ) -> tuple[CpuDecoder, Any]:
        """As `CpuModel.start`, but a token is its place among the candidates."""
        source = sources.padded(SOURCE_MULTIPLE, self.config.max_positions)
        decoder = self.model.decoder_of(self.step, *source, outputs, beam)
        if bans is not None:
            decoder.bans[:] = bans
        return decoder, decoder.step(np.full(len(sources), self.candidates.places(sources.start), np.int64))


def split_among(work: Sequence[Batch], workers: int) -> Iterator[Batch]:
    """Split each batch into a part per worker; every part gets long and short sentences alike."""
    for batch in work:
        for first in range(min(workers, len(batch.index))):
            yield batch.part(slice(first, None, workers))


class MoveUp:
    """Moves the kept rows of arrays to the front, in place; rows already in their place are not copied."""

    def __init__(self, places: NDArray):
        """places: indices of the kept rows, in their new order."""
        self.count = len(places)
        self.to = np.flatnonzero(places != np.arange(self.count))
        self.of = places[self.to]

    def __call__(self, x: NDArray) -> NDArray:
        """Move the kept rows of x to its front; returns this part of x."""
        if len(self.to):
            x[self.to] = x[self.of]
        return x[: self.count]


class CpuDecoder:
    """The decoding state of a batch, with the buffers that the graph reads and writes; see `decoding.steps.Decoder`.

    `beam`: a search that uses the graph's candidates gets 2 * beam per sentence. It sets `log_p` (B, K) of the live
    hypotheses before each step. The next `step` overwrites the result of the last.
    """

    def __init__(
        self,
        graphs: StepGraph,
        source: Values,
        outputs: Sequence[str],
        beam: int,
    ):
        """source: {name: array} of the encoder's outputs that the decoder reads. outputs: names of `step`'s results."""
        config = graphs.config
        self.graphs, self.outputs, self.source = graphs, outputs, source
        self.ids_listed = None if graphs.candidates is None else graphs.candidates.ids
        self.unlisted = None if graphs.candidates is None else graphs.candidates.unlisted
        self.past = 0
        self.past_length = np.zeros(1, np.int32)
        self.beam_width = np.ones(1, np.int32)
        # Up to EXCLUDED banned tokens may be better than the allowed tokens.
        self.candidates = np.array([min(2 * beam + EXCLUDED, config.vocab_size) if beam > 1 else 1])
        self.most_extensions = 2 * beam if beam > 1 else 1
        self.bans = np.zeros(config.vocab_size, np.float32)
        sentences = self.sentences
        self.log_p = np.zeros((sentences, 1), np.float32)
        # The first step of a beam search has one hypothesis per sentence; `repeat` copies its single position.
        room = POSITIONS if beam == 1 else 1
        self.cache = self._buffers(room)
        self.cache_indirection = np.zeros((sentences, 1, room), np.int32)
        self.binding = graphs.session.io_binding()
        for name in ("past_length", "beam_width", "candidates", "bans"):
            self._bind_input(name, getattr(self, name))
        for name, x in graphs.arrays.items():
            self.binding.bind_cpu_input(name, x)
        self._bind()

    @property
    def sentences(self) -> int:
        return len(self.source["source_mask"])

    @property
    def room(self) -> int:
        """Positions that the buffers have room for."""
        return self.cache[0].shape[2]

    def _buffers(self, room: int) -> list[NDArray[np.float32]]:
        """Take the buffers of all layers from the pool; they go back when the decoder is deleted."""
        memory = self.graphs.memory
        shapes = [shape for layer in self.graphs.config.layers("decoder") for shape in [operator_shape(layer)] * 2]
        lent = [memory.take((self.sentences, shape.heads, room, shape.key_width)) for shape in shapes]
        weakref.finalize(self, memory.give_back, lent).atexit = False
        return lent

    def step(self, ids: NDArray) -> Any:
        """Read the last tokens (R,); returns the logits (R, V) or the requested outputs, two as a tuple."""
        if self.past == self.room:
            self._grow()
        self.ids[:] = ids if self.ids_listed is None else self.ids_listed[ids]
        if self.most_extensions > 1:
            self.sums[:] = self.log_p.reshape(-1, 1)
        self.graphs.session.run_with_iobinding(self.binding, self.graphs.options)
        self.past += 1
        self.past_length[0] = self.past
        return self.results[0] if len(self.results) == 1 else self.results

    def extend_from(self, log_p: NDArray) -> None:
        """From the next step on, add `log_p` (B, K) of the hypotheses to the log p of their extensions."""
        self.log_p = log_p

    def repeat(self, times: int) -> None:
        """Make each row `times` beams. Their common past stays in the first beam's buffer."""
        self.beam_width *= times
        room = max(POSITIONS, self.room)
        sentences, beams = self.sentences, int(self.beam_width[0])
        self._move(len(self.cache[0]) * times, room, to=slice(None, None, times))
        self.cache_indirection = np.empty((sentences, beams, room), np.int32)
        self.cache_indirection[:] = np.arange(beams, dtype=np.int32)[None, :, None]
        self.cache_indirection[:, :, : self.past] = 0
        self._bind()

    def reorder(self, rows: NDArray) -> None:
        sentences, beams, _ = self.cache_indirection.shape
        past = self.cache_indirection.reshape(sentences * beams, -1)[:, : self.past]
        past[:] = past.take(rows, axis=0)  # rows are numbered through all sentences

    def keep(self, rows: NDArray) -> None:
        beams = int(self.beam_width[0])
        sentences = rows[::beams] // beams
        move_up = MoveUp(rows)
        for i, x in enumerate(self.cache):
            move_up(x[:, :, : self.past])
            self.cache[i] = x[: len(rows)]
        move_up = self._keep_sentences(sentences)
        self.cache_indirection = move_up(self.cache_indirection)
        self._bind()

    def _keep_sentences(self, sentences: NDArray) -> MoveUp:
        move_up = MoveUp(sentences)
        self.source = {value: move_up(x) for value, x in self.source.items()}
        self.unlisted = None if self.unlisted is None else self.unlisted[sentences]
        return move_up

    def _unlisted(self, beams: int) -> NDArray[np.float32]:
        """Mask that keeps each sentence from ids listed only for other sentences: (R, C), or zeros (1, C)."""
        if self.unlisted is None:
            return np.zeros((1, self.graphs.config.vocab_size), np.float32)
        return np.repeat(self.unlisted, beams, axis=0)

    def _grow(self) -> None:
        self._move(len(self.cache[0]), 2 * self.room)
        old = self.cache_indirection
        slots = np.arange(old.shape[1], dtype=np.int32)[None, :, None]
        self.cache_indirection = np.concatenate([old, np.broadcast_to(slots, old.shape)], axis=2)
        self._bind()

    def _move(self, rows: int, room: int, to: Any = slice(None), of: Any = slice(None)) -> None:
        """Move the past of the buffers' rows `of` to the rows `to` of new buffers."""
        for i, old in enumerate(self.cache):
            self.cache[i] = self.graphs.memory.take((rows, old.shape[1], room, old.shape[3]))
            self.cache[i][to, :, : self.past] = old[of, :, : self.past]
            self.graphs.memory.give_back([old])

    def _bind(self) -> None:
        """Bind the arrays that may be replaced to the graph; call it again after replacing one."""
        rows, config, beams = len(self.cache[0]), self.graphs.config, int(self.beam_width[0])
        self.ids, self.sums = np.zeros(rows, np.int64), np.zeros((rows, 1), np.float32)
        of_sentence = beams * int(self.candidates[0])
        extensions = min(self.most_extensions, of_sentence)
        extents = {"rows": rows, LENGTH: self.source["source_mask"].shape[1], LISTED: config.vocab_size}
        extents |= {"choices": rows // beams, "candidates": extensions}
        self.results = tuple(self._made(value, extents) for value in self.outputs)
        inputs = {
            "target_ids": self.ids,
            "cache_indirection": self.cache_indirection,
            **self.source,
        }
        graphs = self.graphs
        if self.most_extensions > 1 or self.past == 0:  # greedy search doesn't read these
            inputs["by_sentence"] = np.array([-1, of_sentence])
            inputs["extensions"] = np.array([extensions])
            inputs["log_p"] = self.sums
            inputs["first_entry"] = np.arange(rows)[:, None] % beams * config.vocab_size
        # The bindings share the arrays' memory. OrtValues cost most: a buffer that is input and output needs only one.
        for value, x in inputs.items():
            self._bind_input(value, x)
        if self.ids_listed is not None:
            self._bind_input("unlisted", self._unlisted(beams))
        for value, x in zip(self.outputs, self.results, strict=True):
            self.binding.bind_ortvalue_output(graphs.outputs[value], ort.OrtValue.ortvalue_from_numpy(x))
        for value, x in zip(graphs.cache, self.cache, strict=True):
            buffer = ort.OrtValue.ortvalue_from_numpy(x)
            self.binding.bind_ortvalue_input(graphs.inputs[value], buffer)
            self.binding.bind_ortvalue_output(graphs.outputs[value], buffer)

    def _bind_input(self, value: str, x: NDArray) -> None:
        if value in self.graphs.inputs:
            self.binding.bind_cpu_input(self.graphs.inputs[value], x)

    def _made(self, value: str, extents: Mapping[str, int]) -> NDArray:
        """A new array for this output, with the declared type and axes."""
        port = self.graphs.made[value]
        return np.empty([axis if isinstance(axis, int) else extents[axis] for axis in port.axes], port.dtype)


class RecurrentCpuDecoder(CpuDecoder):
    """`CpuDecoder` for SSRUs: each layer has a state (R, D) with a row per hypothesis, which never grows."""

    @property
    def room(self) -> int:
        return -1  # a state is never full

    def _buffers(self, room: int) -> list[NDArray[np.float32]]:
        return [np.zeros((self.sentences, self.graphs.config.d_model), np.float32) for _ in self.graphs.cache]

    def repeat(self, times: int) -> None:
        self.beam_width *= times
        self._take(np.repeat(np.arange(len(self.cache[0])), times))

    def reorder(self, rows: NDArray) -> None:
        for state in self.cache:
            state[:] = state[rows]

    def keep(self, rows: NDArray) -> None:
        beams = int(self.beam_width[0])
        self._keep_sentences(rows[::beams] // beams)
        self._take(rows)

    def _take(self, rows: NDArray) -> None:
        self.cache[:] = [state[rows] for state in self.cache]
        self._bind()
