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
writes new positions in place, and nothing is copied between steps. The buffers grow by doubling. In layers with windows
they hold the last positions only: the longest window, and at most two chunks more.

A prompt is read by itself, `CHUNK` tokens at a time, so its keys and values don't depend on its neighbours.

Shapes: R texts, S new tokens of a text, K key-value heads, L places of the buffers, d one head, V vocabulary.
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
from mlx_transformer.decoding.steps import Rewinding, common

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
        """The number of tokens read so far of each text (R,)."""
        self.dropped = np.zeros(0, np.int64)
        """How many of each text's first positions the buffers of layers with windows no longer hold (R,)."""
        self.buffers: list[Buffer] = []
        """Keys and values of each layer (rows, K, L, d): at least R rows, and room for the longest text."""
        self.room = 0
        """Positions for which the buffers have room."""
        layers = step.config.layers("decoder")
        self.windowed = [layer.window is not None for layer in layers for _ in range(2)]
        self.window = max((layer.window or 0 for layer in layers), default=0)
        self._binding: Any = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))

    @property
    def kept(self) -> int:
        """Last positions of a text that layers with windows keep, so that a chunk can be cut off."""
        return self.window - 1 + CHUNK

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
        """Begin a text in a new last row by reading these tokens; returns the row."""
        self.make_room(len(self) + 1, self.longest)
        self.ids.append([])
        self._set_lengths([*self.lengths, 0], [*self.dropped, 0])
        self.read(ids, len(self) - 1)
        return len(self) - 1

    def read(self, ids: Iterable[int], row: int = -1) -> None:
        """Read further tokens of the text in `row`, by default the last text, without logits."""
        tokens = list(ids)
        for i in range(0, len(tokens), CHUNK):
            self._read(self.prompt, tokens[i : i + CHUNK], row)

    def logits(self, ids: Sequence[int], row: int = -1) -> NDArray[np.float32]:
        """Read further tokens (S,) of the text in `row`; returns the logits (S, V) after each token."""
        made = np.empty((len(ids), 1, self.graph.config.vocab_size), np.float32)
        for i in range(0, len(ids), CHUNK):
            tokens = ids[i : i + CHUNK]
            self._read(self.graph, tokens, row, made[i : i + len(tokens)])
        return made[:, 0]

    def join(self, other: Texts) -> int:
        """Move the texts of `other` to new last rows, which empties `other`; returns the first new row."""
        first, count = len(self), len(other)
        if first:
            self.make_room(first + count, other.longest)
            for x, y, used in zip(self.buffers, other.buffers, other._used(), strict=True):
                x[first : first + count, :, :used] = y[:count, :, :used]
        else:
            self.buffers, self.room = other.buffers, other.room
        self.ids += other.ids
        self._set_lengths([*self.lengths, *other.lengths], [*self.dropped, *other.dropped])
        other.clear()
        return first

    def leave(self, row: int) -> None:
        """End a text; the last text takes its row."""
        last = len(self) - 1
        if row != last:
            for x, used in zip(self.buffers, self._used([last]), strict=True):
                x[row, :, :used] = x[last, :, :used]
        for each in (self.ids, self.lengths, self.dropped):
            each[row] = each[last]
        self.ids.pop()
        self._set_lengths(self.lengths[:last], self.dropped[:last])

    def has(self, row: int, length: int) -> bool:
        """Whether a text can be continued after its first `length` positions: their last window is still held."""
        return not self.dropped[row] or bool(self.dropped[row] <= length - (self.window - 1))

    def take(self, row: int, length: int) -> Texts:
        """A copy of the first `length` positions of a text, which it must `has`."""
        copy = Texts(self.graph, self.prompt)
        copy.ids = [self.ids[row][:length]]
        copy._set_lengths([length], self.dropped[[row]])
        copy.make_room(1, length)
        for x, y, used in zip(copy.buffers, self.buffers, copy._used(), strict=True):
            x[0, :, :used] = y[row, :, :used]
        return copy

    def cut(self, row: int, length: int) -> None:
        """Forget a text's positions from `length` on, or all of them unless it `has` the first `length`."""
        if not self.has(row, length):
            length = self.dropped[row] = 0
        del self.ids[row][length:]
        self.lengths[row] = length

    def clear(self) -> None:
        """End all texts and free the buffers."""
        self.ids, self.buffers, self.room = [], [], 0
        self._set_lengths([], [])

    def select(self, rows: NDArray, first: int = 0) -> None:
        """Continue row i from the old row rows[i]. first: positions before it are the same in both."""
        self.make_room(max(len(rows), len(self)), self.longest)
        move, dropped = MoveUp(rows), int(self.dropped.max(initial=0))
        for x, windowed, used in zip(self.buffers, self.windowed, self._used(), strict=True):
            move(x[: max(len(rows), len(self)), :, max(first - windowed * dropped, 0) : used])
        self.ids = [list(self.ids[row]) for row in rows]
        self._set_lengths(self.lengths[rows], self.dropped[rows])

    def make_room(self, rows: int, positions: int) -> None:
        """Make the buffers large enough for so many texts and positions; their contents stay."""
        had = len(self.buffers[0]) if self.buffers else 0
        if rows <= had and positions <= self.room and self.buffers:
            return
        rows = max(rows, min(2 * had, 2 * rows)) if rows > had else had
        if positions > self.room or not self.room:
            most = max(positions, self.graph.config.max_positions)
            self.room = min(max(ROOM, 2 * positions), most)
        shapes = [grouped_shape(layer) for layer in self.graph.config.layers("decoder") for _ in range(2)]
        rooms = [min(self.room, self.kept + CHUNK) if windowed else self.room for windowed in self.windowed]
        buffers = [
            np.empty((rows, shape.heads, room, shape.key_width), np.float32)
            for shape, room in zip(shapes, rooms, strict=True)
        ]
        for new, old, used in zip(buffers, self.buffers, self._used(), strict=False):
            new[: len(self), :, :used] = old[: len(self), :, :used]
        self.buffers, self._binding = buffers, None

    def _used(self, rows: Any = slice(None)) -> list[int]:
        """Places of each buffer that these texts use."""
        lengths, held = self.lengths[rows], self.lengths[rows] - self.dropped[rows]
        return [int((held if windowed else lengths).max(initial=0)) for windowed in self.windowed]

    def _drop(self, rows: range, new: int) -> None:
        """If `new` positions don't fit into the buffers of layers with windows, move the last `kept` to the front."""
        for row in rows if self.window else ():
            held = int(self.lengths[row] - self.dropped[row])
            if held + new > self.kept + CHUNK:
                for x in (x for x, windowed in zip(self.buffers, self.windowed, strict=True) if windowed):
                    x[row, :, : self.kept] = x[row, :, held - self.kept : held]
                self.dropped[row] += held - self.kept

    def _set_lengths(self, lengths: Any, dropped: Any) -> None:
        """Set the lengths of the texts after their number or rows changed."""
        self.lengths, self.dropped, self._binding = np.array(lengths, np.int32), np.array(dropped, np.int64), None

    def _read(self, graph: StepGraph, ids: Sequence[int], row: int, logits: NDArray | None = None) -> None:
        """Run a graph over new tokens (S,) of a text. logits (S, 1, V): filled with the logits after each token."""
        row = range(len(self))[row]
        self.make_room(len(self), int(self.lengths[row]) + len(ids))
        rows, tokens = slice(row, row + 1), np.array([ids], np.int64)
        self._run(graph, self._bound(graph, rows, tokens, logits), rows, tokens)

    def _run(self, graph: StepGraph, binding: Any, rows: slice, tokens: NDArray[np.int64]) -> None:
        """Run a graph over new tokens (rows, S) of these texts."""
        self._drop(range(len(self))[rows], tokens.shape[1])
        lengths, dropped = self.lengths[rows] + tokens.shape[1], self.dropped[rows, None].copy()
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        binding.bind_cpu_input(graph.inputs["target_mask"], mask)
        if self.window:
            binding.bind_ortvalue_input(graph.inputs["dropped"], ort.OrtValue.ortvalue_from_numpy(dropped))
        graph.session.run_with_iobinding(binding, graph.options)
        self.lengths[rows] = lengths
        for text, new in zip(self.ids[rows], tokens.tolist(), strict=True):
            text += new

    def _bound(self, graph: StepGraph, rows: slice, ids: NDArray, logits: NDArray | None) -> Any:
        """A binding of the graph to these rows of the buffers; `_run` binds the inputs that depend on lengths."""
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
    """The texts of a search. Rows are hypotheses; a sentence's hypotheses are neighbours and equally long."""

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

    def part(self, row: int, length: int, of: int) -> TextsDecoder | None:
        return TextsDecoder(self.texts.take(row, length)) if self.texts.has(row, length) else None

    def shrink(self, lengths: Sequence[int]) -> None:
        """Nothing is padded."""


class TextsCache:
    """The state of `DecoderGraphs.step`: rows with padding at the left of their first tokens."""

    def __init__(self, texts: Texts, mask: NDArray):
        self.texts, self.mask = texts, mask


class DecoderGraphs(CausalGraphs):
    """step_cpu, and in int4 prompt_cpu. Several threads may continue their own texts at the same time."""

    def __init__(self, request: Request, sessions: Mapping[str, Session], exact: bool = True):
        """exact: a prompt read in other parts, e.g. after an earlier search's text, gives the same logits up to
        float32's rounding. Where activations are rounded, a last bit can change a token. Then only whole chunks of an
        earlier prompt are continued, since their bits are the same."""
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

        A single prompt reuses the keys and values of the last search of a single prompt, for their common prefix.
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
        same = common(texts.ids[0][:most], prompt[:-1])
        texts.cut(0, same if self.exact else same - same % CHUNK)
        texts.read(prompt[len(texts.ids[0]) : -1])
        return texts

    def _keep(self, texts: Texts, prompt: int) -> None:
        """Keep a text for the next search, and how much of it may be continued: see `exact`."""
        if len(texts) == 1:
            self._kept.append((texts, len(texts.ids[0]) if self.exact else prompt - prompt % CHUNK))
