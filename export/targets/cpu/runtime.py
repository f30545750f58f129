"""The graphs of the target `cpu` as one model: buffers bound once, keys and values written in place, beams by index.

Shapes: see network.py; V vocabulary, C candidates of a row.
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
"""Room of a new cache; it doubles when it is full."""

LOGITS = ("logits",)


class CpuModel(Model):
    """encoder_cpu and decoder_cpu. Several threads may decode at the same time, each its own batch.

    `single_threaded`: opens the same model with one thread an operator, for `threads` batches at the same
    time: the faster way to use the cores where operators are too small to be shared among them. `listed`: opens what a
    search among given ids takes (`Listed`), if it is there.
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
        self.options = ort.RunOptions()
        # Without the entry Python's binding asks for it at every step and handles an exception (50 us). -1: no graph is
        # captured.
        self.options.add_run_config_entry("gpu_graph_id", "-1")
        self.encoder = PortSession(encoder, GRAPHS[ENCODER_CPU](request), self.options)
        self.decoder = StepGraph(decoder, GRAPHS[DECODER_CPU](request), self.config, self.memory, self.options)

    def in_parallel(self, search_on: Callable[[Model, Batch], T], work: Sequence[Batch]) -> Iterator[T]:
        """Run `search_on(model, batch)` on all batches, in parts that run at the same time where that is faster."""
        if self.single_threaded is None or sum(len(batch.index) for batch in work) < 2 * self.threads:
            return (search_on(self, batch) for batch in work)
        model = self.single_threaded()
        return self.pool.map(lambda batch: search_on(model, batch), split_among(work, self.threads))

    @functools.cached_property
    def pool(self) -> ThreadPoolExecutor:
        """The threads for batches at the same time; kept, as a new thread begins with no memory of its own."""
        from concurrent.futures import ThreadPoolExecutor  # with `logging`

        return ThreadPoolExecutor(self.threads)

    @functools.cached_property
    def listed_graphs(self) -> ListedGraphs | None:
        """The graphs that a search among given ids takes, if it is there."""
        sessions = self.listed()
        if sessions is None:
            return None
        (ids,) = GRAPHS[ROWS_CPU](self.request).input_names.values()
        outputs = [output.name for output in sessions[0].get_outputs()]
        step = StepGraph(sessions[1], GRAPHS[LISTED_CPU](self.request), self.config, self.memory, self.options)
        return ListedGraphs(sessions[0], ids, outputs, step)

    def among(self, candidates: Candidates) -> Listed | None:
        """Return the model with the vocabulary of a batch. Where tokens are drawn, it is that of all ids."""
        graphs = None if len(candidates.ids) == self.config.vocab_size else self.listed_graphs
        if graphs is not None:
            return Listed(self, graphs, candidates)
        return None

    def strategy(self, batch: Batch, options: Options, scored: bool) -> Strategy:
        return strategy(batch, options, self.config, scored)

    def encode(self, source: Values, mask: NDArray) -> NDArray[np.float32]:
        """Return the encoder's output (B, S, D) of a source, by value (`core/inputs.py`), and its mask (B, S)."""
        return self._encode(["memory"], source, mask)["memory"]

    def begin(self, source: Values, mask: NDArray, outputs: Sequence[str] = LOGITS, beam: int = 1) -> CpuDecoder:
        """Encode sources (B, S), ready for the start token of each."""
        return self.decoder_of(self.decoder, source, mask, outputs, beam)

    def decoder_of(
        self, step: StepGraph, source: Values, mask: NDArray, outputs: Sequence[str], beam: int
    ) -> CpuDecoder:
        """Encode sources (B, S), ready for the start token of each, which that graph reads."""
        decoder = RecurrentCpuDecoder if self.config.recurrent else CpuDecoder
        return decoder(step, self._encode(["source_mask", *step.cross], source, mask), outputs, beam)

    def start(
        self, sources: Sources, outputs: Sequence[str] = LOGITS, beam: int = 1, bans: NDArray | None = None
    ) -> tuple[CpuDecoder, Any]:
        """Encode for a search, and give what follows the start token: logits (B, V), or the requested outputs."""
        decoder = self.begin(*sources.padded(SOURCE_MULTIPLE, self.config.max_positions), outputs, beam)
        if bans is not None:
            decoder.bans[:] = bans
        return decoder, decoder.step(np.full(len(sources), sources.start, np.int64))

    def logits(self, source: Values, mask: NDArray, target_ids: NDArray) -> NDArray[np.float32]:
        """Return teacher-forced logits (B, T, V) of targets (B, T)."""
        return self._stepped(LOGITS, source, mask, target_ids)

    def attention(self, source: Values, mask: NDArray, target_ids: NDArray) -> NDArray[np.float32]:
        """Return the weights (B, T, S) that a folder exported with attention returns, of sources and targets (B, T)."""
        return self._stepped(("attention",), source, mask, target_ids)

    def _stepped(self, outputs: Sequence[str], source: Values, mask: NDArray, ids: NDArray) -> NDArray[np.float32]:
        decoder = self.begin(source, mask, outputs)
        return np.stack([decoder.step(column).copy() for column in ids.T], axis=1)

    def _encode(self, outputs: list[str], source: Values, mask: NDArray) -> Values:
        self.encoder.check_source(source)
        # The graph's output of that name is the decoder's input: the same tokens in another type.
        return self.encoder(outputs, {**source, "source_mask": mask})


class Listed(Model):
    """The same model with the vocabulary of a batch, of whose ids alone it computes the logits."""

    def __init__(self, model: CpuModel, graphs: ListedGraphs, candidates: Candidates):
        self.model, self.config, self.candidates = model, candidates.config, candidates
        options: tuple[Any, ...] = (model.options,)  # those of every run, as PortSession has them
        rows: Any = graphs.rows.run(graphs.outputs, {graphs.ids: candidates.ids}, *options)
        self.step = graphs.step.among(candidates, dict(zip(graphs.outputs, rows, strict=True)))

    def strategy(self, batch: Batch, options: Options, scored: bool) -> Strategy:
        return strategy(batch, options, self.config, scored)

    def start(
        self, sources: Sources, outputs: Sequence[str] = LOGITS, beam: int = 1, bans: NDArray | None = None
    ) -> tuple[CpuDecoder, Any]:
        """Start as `CpuModel` does, in places among the candidates."""
        source = sources.padded(SOURCE_MULTIPLE, self.config.max_positions)
        decoder = self.model.decoder_of(self.step, *source, outputs, beam)
        if bans is not None:
            decoder.bans[:] = bans
        return decoder, decoder.step(np.full(len(sources), self.candidates.places(sources.start), np.int64))


def split_among(work: Sequence[Batch], workers: int) -> Iterator[Batch]:
    """Split the batches in parts: each worker has an equal share of the long and of the short sentences in each."""
    for batch in work:
        for first in range(min(workers, len(batch.index))):
            yield batch.part(slice(first, None, workers))


class MoveUp:
    """Moves what is kept of arrays to their front, in place: what is there already costs nothing."""

    def __init__(self, places: NDArray):
        """places: of what is kept, in their new order."""
        self.count = len(places)
        self.to = np.flatnonzero(places != np.arange(self.count))
        self.of = places[self.to]

    def __call__(self, x: NDArray) -> NDArray:
        """Return the front of x, with the kept parts along its first axis."""
        if len(self.to):
            x[self.to] = x[self.of]
        return x[: self.count]


class CpuDecoder:
    """`decoding.steps.Decoder`: one batch in decoding, with the memory that the graph reads and writes.

    `beam`: of the search that takes the graph's candidates, 2 * beam of each sentence. `log_p` (B, K) of the live
    hypotheses it leaves here before each step. The result of `step` is overwritten by the next one.
    """

    def __init__(
        self,
        graphs: StepGraph,
        source: Values,
        outputs: Sequence[str],
        beam: int,
    ):
        """source: what the decoder reads of it, by value. outputs: what `step` returns, by value."""
        config = graphs.config
        self.graphs, self.outputs, self.source = graphs, outputs, source
        self.ids_listed = None if graphs.candidates is None else graphs.candidates.ids
        self.unlisted = None if graphs.candidates is None else graphs.candidates.unlisted
        self.past = 0
        self.past_length = np.zeros(1, np.int32)
        self.beam_width = np.ones(1, np.int32)
        # Each of those that may be banned can stand before an allowed one.
        self.candidates = np.array([min(2 * beam + EXCLUDED, config.vocab_size) if beam > 1 else 1])
        self.most_extensions = 2 * beam if beam > 1 else 1
        self.bans = np.zeros(config.vocab_size, np.float32)
        sentences = self.sentences
        self.log_p = np.zeros((sentences, 1), np.float32)
        # A beam search's first step has one hypothesis a sentence: its one position is copied out by `repeat`.
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
        """The positions that the buffers have room for."""
        return self.cache[0].shape[2]

    def _buffers(self, room: int) -> list[NDArray[np.float32]]:
        """Take the memory of all layers, before the first token."""
        memory = self.graphs.memory
        shapes = [shape for layer in self.graphs.config.layers("decoder") for shape in [operator_shape(layer)] * 2]
        lent = [memory.take((self.sentences, shape.heads, room, shape.key_width)) for shape in shapes]
        weakref.finalize(self, memory.give_back, lent).atexit = False
        return lent

    def step(self, ids: NDArray) -> Any:
        """Take the last tokens (R,) and return the logits (R, V), or the requested outputs; two come as a pair."""
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
        """Add the log p (B, K) of these hypotheses to those of their extensions, from the next step on."""
        self.log_p = log_p

    def repeat(self, times: int) -> None:
        """Make each row `times` beams; what they have in common stays where it is, with the first of them."""
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
        past[:] = past.take(rows, axis=0)  # row numbers count the beams of all sentences

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
        """Return what keeps a sentence from ids that are its neighbours' (R, C); (1, C) where there are none."""
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
        """Bind the arrays that are replaced now and then to the graph; needed again whenever one was."""
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
        if self.most_extensions > 1 or self.past == 0:  # a greedy search reads none of these
            inputs["by_sentence"] = np.array([-1, of_sentence])
            inputs["extensions"] = np.array([extensions])
            inputs["log_p"] = self.sums
            inputs["first_entry"] = np.arange(rows)[:, None] % beams * config.vocab_size
        # All of these share the arrays' memory. An OrtValue costs most: one for a buffer that is input and output.
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
        """Return an array for this output, of the type and the axes that are declared."""
        port = self.graphs.made[value]
        return np.empty([axis if isinstance(axis, int) else extents[axis] for axis in port.axes], port.dtype)


class RecurrentCpuDecoder(CpuDecoder):
    """The same for a decoder of SSRUs, whose state (R, D) a layer has a row for each hypothesis and never grows."""

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
