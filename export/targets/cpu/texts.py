"""Runs the graphs of a decoder-only model in target `cpu`: `Texts`, any number of texts continued side by side.

    model = OnnxTransformer("chat-onnx").graphs
    running = model.texts()
    text = model.texts()
    text.add(prompt[:128])           # reads without logits; steps of other texts may come between parts of a prompt
    text.read(prompt[128:-1])
    row = running.join(text)         # behind the running texts
    logits = running.step([prompt[-1]])  # (R, V): reads one token of each text, of any lengths
    running.leave(row)               # the last text takes its row

`step` reads the last token of a prompt and returns the logits behind it. To reuse a prefix, `take` a copy of a text's
first positions (or `cut` the text itself) and `read` on from there.

Each text's keys and values are a row of buffers (rows, K, L, d), bound to the graph as input and output. The graph
writes new positions in place, and nothing is copied between steps. The buffers grow by doubling.

A prompt is read by itself, `CHUNK` tokens at a time, so its keys and values don't depend on its neighbours.

Shapes: R texts, S new tokens of a text, K key-value heads, L positions of the buffers, d one head, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export.interface import GRAPHS, PROMPT_CPU, STEP_CPU, Request, grouped_shape
from export.targets.portable.runtime import CausalGraphs
from export.targets.session import Session
from mlx_transformer.core.inputs import Sources
from mlx_transformer.decoding.steps import Rewinding

from .runtime import MoveUp, run_options
from .step_graph import Buffer, BufferPool, StepGraph

CHUNK = 128
"""Tokens of a prompt read at a time: their activations stay in the processor's cache."""
ROOM = 64
"""Least positions of new buffers."""


class Texts:
    """Texts being continued, a row each. Not for several threads at once."""

    def __init__(self, step: StepGraph, prompt: StepGraph):
        self.graph, self.prompt = step, prompt
        self.ids: list[list[int]] = []
        """The tokens read so far of each text."""
        self.lengths = np.zeros(0, np.int32)
        """Their numbers (R,)."""
        self.buffers: list[Buffer] = []
        """Keys and values of each layer (rows, K, L, d): at least R rows, and room for the longest text."""
        self._binding: Any = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))

    @property
    def room(self) -> int:
        """Positions that the buffers have room for."""
        return self.buffers[0].shape[2] if self.buffers else 0

    def step(self, ids: Any) -> NDArray[np.float32]:
        """Read the next token (R,) of each text; returns the logits (R, V), which the next `step` overwrites."""
        self.make_room(len(self), self.longest + 1)
        if self._binding is None:  # the arrays of a step keep their places until rows or buffers change
            self._new = np.zeros((len(self), 1), np.int64)
            self._logits = np.empty((len(self), 1, self.graph.config.vocab_size), np.float32)
            self._binding = self._bound(self.graph, slice(len(self)), self._new, self._logits)
        self._new[:, 0] = ids
        self._run(self.graph, self._binding, slice(len(self)), self._new)
        return self._logits[:, 0]

    def add(self, ids: Iterable[int] = ()) -> int:
        """Begin a text behind the others by reading these tokens; returns its row."""
        self.make_room(len(self) + 1, self.longest)
        self.ids.append([])
        self._set_lengths([*self.lengths, 0])
        self.read(ids, len(self) - 1)
        return len(self) - 1

    def read(self, ids: Iterable[int], row: int = -1) -> None:
        """Read further tokens of a text, the last one by default, without logits."""
        tokens = list(ids)
        for i in range(0, len(tokens), CHUNK):
            self._read(self.prompt, tokens[i : i + CHUNK], row)

    def logits(self, ids: Sequence[int], row: int = -1) -> NDArray[np.float32]:
        """Read further tokens (S,) of a text; returns the logits (S, V) behind each."""
        made = np.empty((len(ids), 1, self.graph.config.vocab_size), np.float32)
        for i in range(0, len(ids), CHUNK):
            tokens = ids[i : i + CHUNK]
            self._read(self.graph, tokens, row, made[i : i + len(tokens)])
        return made[:, 0]

    def join(self, other: Texts) -> int:
        """Move the texts of `other`, which is then empty, behind these; returns the first one's row."""
        first, count = len(self), len(other)
        if first:
            self.make_room(first + count, other.longest)
            for x, y in zip(self.buffers, other.buffers, strict=True):
                x[first : first + count, :, : other.longest] = y[:count, :, : other.longest]
        else:
            self.buffers = other.buffers
        self.ids += other.ids
        self._set_lengths([*self.lengths, *other.lengths])
        other.clear()
        return first

    def leave(self, row: int) -> None:
        """End a text; the last text takes its row."""
        last = len(self) - 1
        if row != last:
            for x in self.buffers:
                x[row, :, : self.lengths[last]] = x[last, :, : self.lengths[last]]
        self.ids[row] = self.ids[last]
        self.lengths[row] = self.lengths[last]
        self.ids.pop()
        self._set_lengths(self.lengths[:last])

    def take(self, row: int, length: int) -> Texts:
        """A copy of the first `length` positions of a text."""
        copy = Texts(self.graph, self.prompt)
        copy.make_room(1, length)
        for x, y in zip(copy.buffers, self.buffers, strict=True):
            x[0, :, :length] = y[row, :, :length]
        copy.ids = [self.ids[row][:length]]
        copy._set_lengths([length])
        return copy

    def cut(self, row: int, length: int) -> None:
        """Forget the positions of a text from `length` on."""
        del self.ids[row][length:]
        self.lengths[row] = length

    def clear(self) -> None:
        """End all texts and free the buffers."""
        self.ids, self.buffers = [], []
        self._set_lengths([])

    def select(self, rows: NDArray, first: int = 0) -> None:
        """Continue row i from the old row rows[i]. first: positions before it are the same in both."""
        self.make_room(max(len(rows), len(self)), self.longest)
        move = MoveUp(rows)
        for x in self.buffers:
            move(x[: max(len(rows), len(self)), :, first : self.longest])
        self.ids = [list(self.ids[row]) for row in rows]
        self._set_lengths(self.lengths[rows])

    def make_room(self, rows: int, positions: int) -> None:
        """Make the buffers large enough for so many texts and positions; what they hold stays."""
        had, room = (len(self.buffers[0]) if self.buffers else 0), self.room
        if rows <= had and positions <= room and self.buffers:
            return
        rows = max(rows, min(2 * had, 2 * rows)) if rows > had else had
        if positions > room or not room:
            most = max(positions, self.graph.config.max_positions)
            room = min(max(ROOM, 2 * positions), most)
        shapes = [grouped_shape(layer) for layer in self.graph.config.layers("decoder") for _ in range(2)]
        buffers = [np.empty((rows, shape.heads, room, shape.key_width), np.float32) for shape in shapes]
        for new, old in zip(buffers, self.buffers, strict=False):
            new[: len(self), :, : self.longest] = old[: len(self), :, : self.longest]
        self.buffers, self._binding = buffers, None

    def _set_lengths(self, lengths: Any) -> None:
        """Set the lengths of the texts after their number or rows changed."""
        self.lengths, self._binding = np.array(lengths, np.int32), None

    def _read(self, graph: StepGraph, ids: Sequence[int], row: int, logits: NDArray | None = None) -> None:
        """Run a graph over new tokens (S,) of a text. logits (S, 1, V): is filled with those behind each token."""
        row = range(len(self))[row]
        self.make_room(len(self), int(self.lengths[row]) + len(ids))
        rows, tokens = slice(row, row + 1), np.array([ids], np.int64)
        self._run(graph, self._bound(graph, rows, tokens, logits), rows, tokens)

    def _run(self, graph: StepGraph, binding: Any, rows: slice, tokens: NDArray[np.int64]) -> None:
        """Run a graph over new tokens (rows, S) of these texts."""
        lengths = self.lengths[rows] + tokens.shape[1]
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        binding.bind_cpu_input(graph.inputs["target_mask"], mask)
        graph.session.run_with_iobinding(binding, graph.options)
        self.lengths[rows] = lengths
        for text, new in zip(self.ids[rows], tokens.tolist(), strict=True):
            text += new

    def _bound(self, graph: StepGraph, rows: slice, ids: NDArray, logits: NDArray | None) -> Any:
        """A binding of the graph to these rows of the buffers; the mask is still to be bound."""
        binding = graph.session.io_binding()
        binding.bind_cpu_input(graph.inputs["target_ids"], ids)
        if logits is not None:
            kept = len(logits) // len(ids)
            binding.bind_ortvalue_input(graph.inputs["kept"], ort.OrtValue.ortvalue_from_numpy(np.array(kept)))
            binding.bind_ortvalue_output(graph.outputs["logits"], ort.OrtValue.ortvalue_from_numpy(logits))
        for value, x in zip(graph.cache, self.buffers, strict=True):
            buffer = ort.OrtValue.ortvalue_from_numpy(x[rows])
            binding.bind_ortvalue_input(graph.inputs[value], buffer)
            binding.bind_ortvalue_output(graph.outputs[value], buffer)
        return binding


class TextsDecoder(Rewinding):
    """The texts of a search. Its rows are hypotheses; a sentence's stand side by side and are equally long."""

    def __init__(self, texts: Texts):
        self.texts, self.shared = texts, 0

    def step(self, ids: NDArray) -> NDArray[np.float32]:
        return self.texts.step(ids)

    def read_each(self, ids: NDArray) -> NDArray[np.float32]:
        if ids.shape[1] == 1:
            return self.texts.step(ids[:, 0])[:, None]
        return np.stack([self.texts.logits(tokens.tolist(), row) for row, tokens in enumerate(ids)])

    def take_back(self, count: int) -> None:
        for row, length in enumerate(self.texts.lengths.tolist()):
            self.texts.cut(row, length - count)

    def repeat(self, times: int) -> None:
        self.texts.select(np.repeat(np.arange(len(self.texts)), times))
        self.shared = int(self.texts.lengths.min())

    def reorder(self, rows: NDArray) -> None:
        self.texts.select(rows, self.shared)

    def keep(self, rows: NDArray) -> None:
        self.texts.select(rows)

    def extend(self, ids: NDArray) -> None:
        for row, tokens in enumerate(ids.tolist()):
            self.texts.read(tokens, row)

    def join(self, other: TextsDecoder) -> None:
        self.texts.join(other.texts)

    def part(self, row: int, length: int, of: int) -> TextsDecoder:
        return TextsDecoder(self.texts.take(row, length))

    def shrink(self, lengths: Sequence[int]) -> None:
        """Nothing is padded."""


class TextsCache:
    """The state of `DecoderGraphs.step`: rows with padding at the left of their first tokens."""

    def __init__(self, texts: Texts, mask: NDArray):
        self.texts, self.mask = texts, mask


class DecoderGraphs(CausalGraphs):
    """step_cpu, in int4 with prompt_cpu. Threads may continue texts of their own at the same time."""

    def __init__(self, request: Request, sessions: Mapping[str, Session], exact: bool = True):
        """exact: a prompt read in other parts, e.g. behind an earlier search's text, gives the same up to float32's
        rounding. Where activations are rounded, a last bit can change a token. Then only whole chunks of an earlier
        prompt are continued, since their bits are the same."""
        self.config, self.options = request.config, run_options()
        self.joins = self.own_lengths = True
        graphs = {
            name: StepGraph(session, GRAPHS[name](request), self.config, BufferPool(), self.options)
            for name, session in sessions.items()
        }
        self.graph = graphs[STEP_CPU]
        self.prompt = graphs.get(PROMPT_CPU, self.graph)
        self.exact = exact
        self._kept: deque[tuple[Texts, int]] = deque(maxlen=1)
        """The text of the last search of a single prompt, and how many of its tokens may be continued."""

    def texts(self) -> Texts:
        return Texts(self.graph, self.prompt)

    def reader(self) -> TextsDecoder:
        texts = self.texts()
        texts.add()
        return TextsDecoder(texts)

    def begin(self, mask: NDArray) -> Any:
        return TextsCache(self.texts(), mask)

    def step(self, ids: NDArray, cache: Any) -> NDArray:
        """Logits (R, L, V) after the new tokens `ids` (R, L); on padding, 0."""
        texts, real = cache.texts, np.ones_like(ids)
        if not len(texts):
            real = cache.mask
            for _ in ids:
                texts.add()
        elif ids.shape[1] == 1:
            return texts.step(ids[:, 0]).copy()[:, None]
        logits = np.zeros((*ids.shape, self.config.vocab_size), np.float32)
        for row, tokens in enumerate(ids):
            there = real[row].astype(bool)
            logits[row, there] = texts.logits(tokens[there].tolist(), row)
        return logits

    def start(self, sources: Sources) -> tuple[TextsDecoder, NDArray[np.float32]]:
        """Read the prompts for a search; returns the decoder and the first step's logits (B, V).

        A single prompt goes on from the last search of a single prompt, as far as both begin alike.
        """
        prompts = [row.tolist() for row in sources]
        texts = self._continued(prompts[0]) if len(prompts) == 1 else self.texts()
        texts.make_room(len(prompts), max(map(len, prompts)))
        for prompt in prompts[len(texts) :]:
            texts.add(prompt[:-1])
        decoder = TextsDecoder(texts)
        if len(prompts) == 1:
            weakref.finalize(decoder, self._keep, texts, len(prompts[0]) - 1).atexit = False
        return decoder, texts.step([prompt[-1] for prompt in prompts])

    def _continued(self, prompt: list[int]) -> Texts:
        """A single text that has read this prompt, except its last token."""
        try:
            texts, most = self._kept.pop()
        except IndexError:
            texts, most = self.texts(), 0
            texts.add()
        common = same_tokens(texts.ids[0][:most], prompt[:-1])
        texts.cut(0, common if self.exact else common - common % CHUNK)
        texts.read(prompt[len(texts.ids[0]) : -1])
        return texts

    def _keep(self, texts: Texts, prompt: int) -> None:
        """Keep a text for the next search, and how much of it may be continued: see `exact`."""
        if len(texts) == 1:
            self._kept.append((texts, len(texts.ids[0]) if self.exact else prompt - prompt % CHUNK))


def same_tokens(x: Sequence[int], y: Sequence[int]) -> int:
    """How many first tokens two texts share."""
    return next((i for i, pair in enumerate(zip(x, y, strict=False)) if pair[0] != pair[1]), min(len(x), len(y)))
