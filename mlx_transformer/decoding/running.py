"""Continuous batching: rows join and leave a running batch between two steps.

    prompts -> read in chunks, in turn -> rows of a batch -> a step of all rows -> the next token of each

Each row has its own strategy, options and random draws, so neighbours don't change its tokens. `Prefixes` keeps the
caches of ended rows. A prompt that begins like a kept text computes only the rest.

Shapes: R rows, L tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import SOURCE_IDS, Sources
from mlx_transformer.system.errors import UserError

from .arrays import Array
from .greedy import Greedy
from .steps import Batch, Decoder, Model, PromptDecoder, common

CHUNK = 128
"""Most prompt tokens read between two steps. Whole prompts are no faster: a chunk's activations stay in the processor's
cache."""
SLACK = 256
"""Padded positions that a row may always have; beyond these, at most half of a batch's positions are padding."""
FEWEST = 16
"""Least tokens shared with a kept cache: fewer are computed as fast as their cache is copied."""


class NewToken(NamedTuple):
    """A chosen token. log_p: its log-probability by the model, before rules and temperature. cut: the limit ends the
    output here.

    likeliest: (id, log p) of the likeliest tokens at this place, the likeliest first.
    """

    id: int
    log_p: float = 0.0
    likeliest: Sequence[tuple[int, float]] = ()
    cut: bool = False


@dataclass(eq=False)
class Output:
    """A row: its prompt, its strategy, and the tokens waiting for its reader.

    batch: its input, as a batch of one row. likeliest, names: see `Running.write`. fed: new tokens in the cache. over:
    it ended, failed, or its reader left.
    """

    batch: Batch
    strategy: Greedy
    likeliest: int | None = None
    names: NDArray | None = None
    stop: int = 0
    """Where reading ends: with the prompt, or before its last token (`Model.own_lengths`)."""
    turn: int = 0
    decoder: Decoder | None = None
    read: int = 0
    new: list[int] = field(default_factory=list)
    fed: int = 0
    waiting: deque[NewToken] = field(default_factory=deque)
    over: bool = False
    error: Exception | None = None

    @property
    def prompt(self) -> NDArray[np.int64]:
        return next(iter(self.batch.sources))

    @property
    def limit(self) -> int:
        return int(self.batch.limits[0])

    @property
    def unread(self) -> int:
        """Tokens of the prompt still to be read in parts."""
        return self.stop - self.read

    @property
    def length(self) -> int:
        """Positions in its cache."""
        return self.read + self.fed

    @property
    def cached(self) -> NDArray[np.int64]:
        """The ids in its cache."""
        return np.concatenate([self.prompt[: self.read], np.array(self.new[: self.fed], np.int64)])

    def fail(self, error: Exception) -> None:
        self.error, self.over = error, True

    def take(self, token: int, finite: bool, logits: NDArray | None) -> None:
        """Append the chosen token. logits (V,): for its log-probability."""
        if not finite:
            self.fail(UserError("the model's logits are not finite; check its weights"))
            return
        self.new.append(token)
        ends, cut = token in self.strategy.rules.ends, len(self.new) >= self.limit
        self.over = self.over or ends or cut
        if not ends:
            self.waiting.append(_named(token, logits, self.likeliest, self.names)._replace(cut=cut))


@dataclass(eq=False)
class Rows:
    """Rows that take steps together. logits (R, V): of the next tokens; None: a step must read `tokens` (R,) first."""

    decoder: Decoder
    outputs: list[Output]
    logits: Array | None
    tokens: Array


class Prefixes:
    """Caches of ended rows, by their ids, up to `most_bytes`; the least recently used go first. Thread-safe."""

    def __init__(self, config: TransformerConfig, most_bytes: int):
        self.most = most_bytes // max(1, position_bytes(config))  # positions
        self.kept: OrderedDict[int, tuple[NDArray[np.int64], PromptDecoder]] = OrderedDict()
        self.lock, self.number = Lock(), 0

    def longest(self, ids: NDArray[np.int64]) -> tuple[int, int, PromptDecoder] | None:
        """The kept cache with the most first ids in common: their number, the cache's length, and the cache."""
        with self.lock:
            shared = [(common(ids, kept), number) for number, (kept, _) in self.kept.items()]
            count, number = max(shared, default=(0, 0))
            if count < FEWEST:
                return None
            self.kept.move_to_end(number)
            kept, decoder = self.kept[number]
            return count, len(kept), decoder

    def keep(self, ids: NDArray[np.int64], part: Callable[[], PromptDecoder | None]) -> None:
        """Keep the cache of these ids, unless a longer one begins with them. part: copies it, if it can."""
        if not FEWEST <= len(ids) <= self.most:
            return
        with self.lock:
            for number, (kept, _) in self.kept.items():
                if common(ids, kept) == len(ids):
                    self.kept.move_to_end(number)
                    return
        if (own := part()) is None:
            return
        with self.lock:
            for number in [n for n, (kept, _) in self.kept.items() if common(ids, kept) == len(kept)]:
                del self.kept[number]
            self.number += 1
            self.kept[self.number] = ids, own
            while self.positions > self.most:
                self.kept.popitem(last=False)

    @property
    def positions(self) -> int:
        return sum(len(ids) for ids, _ in self.kept.values())


class Running:
    """The running batch of a model, for one thread.

    Rows with finished prompts take their steps together if the model's decoders `join`. apart: each row takes its own
    steps, since its neighbours might change its tokens. chunk: prompt tokens read between two steps; prompts are cut at
    multiples of it. prefixes: kept caches, which new rows may begin with; running rows serve too. whole_chunks: share
    whole chunks of a cache only, since another cut would change the last bits of the rest.
    """

    def __init__(
        self,
        model: Model,
        chunk: int = CHUNK,
        prefixes: Prefixes | None = None,
        apart: bool = False,
        whole_chunks: bool = False,
    ):
        self.model, self.chunk, self.prefixes, self.whole_chunks = model, chunk, prefixes, whole_chunks
        self.joins, self.shares = model.joins and not apart, model.joins and prefixes is not None
        self.turns = 0
        self.reading: list[Output] = []
        self.batches: list[Rows] = []

    def write(
        self, batch: Batch, strategy: Greedy, likeliest: int | None = None, names: NDArray | None = None
    ) -> Generator[NewToken | None]:
        """Yield the new tokens of an input, and None while there are none.

        A row without waiting tokens takes a turn, for all rows. So asking every row in turn causes a single step.
        likeliest: how many of the likeliest tokens each new token lists, with log-probabilities; None: no
        log-probabilities at all. names: the id of each place of the logits; None: the place. A row leaves when its
        iterator is closed.
        """
        output = Output(batch, strategy, likeliest, names, turn=self.turns - 1)
        output.stop = len(output.prompt) - self.model.own_lengths
        self.reading.append(output)
        try:
            while True:
                if not output.waiting and not output.over:
                    if output.turn == self.turns:
                        self.turn()
                    output.turn = self.turns
                if output.waiting:
                    yield output.waiting.popleft()
                elif output.error is not None:
                    raise output.error
                elif output.over:
                    return
                else:
                    yield None
        finally:
            output.over = True

    def turn(self) -> None:
        """Read a chunk of the prompts; then take a step of all rows with finished prompts."""
        self.turns += 1
        self._drop()  # rows whose readers have left
        batches = self._joined([*self.batches, *self._read()])
        for rows in batches:
            if rows.logits is None:
                self._guarded(rows.outputs, lambda rows=rows: self._step(rows))
        self.batches = self._joined([rows for rows in batches if rows.logits is not None])
        for rows in self.batches:
            self._guarded(rows.outputs, lambda rows=rows: self._choose(rows))
        self._drop()  # ended rows

    def _drop(self) -> None:
        for rows in self.batches:
            self._leave(rows, [i for i, output in enumerate(rows.outputs) if output.over])
        self.batches = [rows for rows in self.batches if rows.outputs]
        self.reading = [output for output in self.reading if not output.over]

    # Prompts.
    def _read(self) -> list[Rows]:
        """Read at most `chunk` tokens of the prompts, in turn; return the rows whose prompts are finished."""
        left, begun = self.chunk, []
        while self.reading and left > 0:
            # The oldest and the shortest in turn: a long prompt neither delays the others nor starves.
            output = self.reading[0] if self.turns % 2 else min(self.reading, key=lambda each: each.unread)
            if output.decoder is None and self.shares:
                self._guarded([output], lambda output=output: self._share(output))
            end = self._end(output)
            if left < self.chunk and end - output.read > left:
                break
            left -= end - output.read
            self._guarded([output], lambda output=output, end=end: begun.extend(self._read_to(output, end)))
            if not output.unread or output.over:
                self.reading.remove(output)
        return begun

    def _end(self, output: Output) -> int:
        """Where the next chunk of a prompt ends. An encoder reads the whole source."""
        whole = output.stop
        return whole if self.model.config.has_encoder else min(whole, (output.read // self.chunk + 1) * self.chunk)

    def _read_to(self, output: Output, end: int) -> list[Rows]:
        """Read the prompt up to `end`; the row, if that is the prompt's end."""
        sources, xp, logits = output.batch.sources, self.model.arrays, None
        decoder = output.decoder or self.model.reader()
        if decoder is None:
            first = sources if end == len(output.prompt) else _ids(sources, output.prompt[:end])
            decoder, logits = self.model.start(first)
        elif end > output.read:
            logits = cast(PromptDecoder, decoder).extend(xp.asarray(output.prompt[None, output.read : end]))
        output.read, output.decoder = end, decoder if end < output.stop else None
        if end < output.stop:
            return []
        return [Rows(decoder, [output], logits, xp.asarray(output.prompt[end:].astype(np.int32)))]

    def _share(self, output: Output) -> None:
        """Begin with another row's cache, as far as it begins like the prompt without its last token."""
        ids = output.prompt[:-1]
        running = [(other, rows.decoder, i) for rows in self.batches for i, other in enumerate(rows.outputs)]
        running += [(other, other.decoder, 0) for other in self.reading if other.decoder is not None]
        found = [(common(ids, other.cached), other.length, decoder, i) for other, decoder, i in running]
        found += [(*kept, 0)] if self.prefixes and (kept := self.prefixes.longest(ids)) else []
        for count, length, decoder, row in sorted(found, key=lambda each: -each[0]):
            count -= count % self.chunk if self.whole_chunks else 0
            if count < FEWEST:
                return
            if (part := cast(PromptDecoder, decoder).part(row, count, length)) is not None:
                output.decoder, output.read = part, count
                return

    # Steps.
    def _step(self, rows: Rows) -> None:
        rows.logits = rows.decoder.step(rows.tokens)
        for output in rows.outputs:
            if output.read < len(output.prompt):
                output.read += 1
            else:
                output.fed += 1

    def _joined(self, batches: list[Rows]) -> list[Rows]:
        """Join batches of similar lengths that are at the same point of a turn: all with logits, or all without."""
        joined: list[Rows] = []
        for rows in batches if self.joins else ():
            fed = rows.logits is None
            fitting = (o for o in joined if (o.logits is None) == fed and _fit(o.outputs, rows.outputs))
            if (other := next(fitting, None)) is None:
                joined.append(rows)
                continue
            cast(PromptDecoder, other.decoder).join(cast(PromptDecoder, rows.decoder))
            both = lambda x, y: self.model.arrays.concatenate([x, y], axis=0)  # noqa: E731
            other.tokens = both(other.tokens, rows.tokens) if fed else other.tokens
            other.logits = None if fed else both(other.logits, rows.logits)
            other.outputs += rows.outputs
        return joined if self.joins else batches

    def _choose(self, rows: Rows) -> None:
        """Choose a token of each row. A lazy device computes the next step while the host reads these tokens."""
        xp, outputs, logits = self.model.arrays, [*rows.outputs], rows.logits
        assert logits is not None
        chosen = [each.strategy.choose(logits[i : i + 1], len(each.new))[0] for i, each in enumerate(outputs)]
        tokens, totals = (
            xp.concatenate(each, axis=0) for each in (chosen, [output.strategy.total for output in outputs])
        )
        rows.logits, rows.tokens = None, tokens
        if xp.lazy:
            ending = [i for i, output in enumerate(outputs) if len(output.new) + 1 >= output.limit]
            self._leave(rows, ending)
            if rows.outputs:
                self._step(rows)
            xp.queue(tokens, totals, *([] if rows.logits is None else [rows.logits]))
        is_scored = any(output.likeliest is not None for output in outputs)
        scored = xp.numpy(xp.float32(logits)) if is_scored else None
        finite = np.isfinite(xp.numpy(totals))
        for i, (output, token) in enumerate(zip(outputs, xp.numpy(tokens).tolist(), strict=True)):
            output.take(token, bool(finite[i]), None if scored is None else scored[i])

    def _leave(self, rows: Rows, leaving: list[int]) -> None:
        """Take these rows out of their batch, and keep their caches."""
        if not leaving:
            return
        for i in leaving if self.shares else ():
            output = rows.outputs[i]
            if output.error is None:
                part = lambda i=i, n=output.length: cast(PromptDecoder, rows.decoder).part(i, n, n)  # noqa: E731
                with suppress(MemoryError):
                    cast(Prefixes, self.prefixes).keep(output.cached, part)
        live = [i for i in range(len(rows.outputs)) if i not in {*leaving}]
        rows.outputs = [rows.outputs[i] for i in live]
        if live:
            places = self.model.arrays.asarray(np.array(live, np.int32))
            rows.decoder.keep(places)
            taken = lambda x: self.model.arrays.take(x, places, axis=0)  # noqa: E731
            rows.logits, rows.tokens = None if rows.logits is None else taken(rows.logits), taken(rows.tokens)
            if self.joins:
                cast(PromptDecoder, rows.decoder).shrink([output.length for output in rows.outputs])

    def _guarded(self, outputs: list[Output], work: Callable[[], None]) -> None:
        """Do this work. If it fails, its rows end with the error and the others go on."""
        try:
            work()
        except Exception as error:  # raised where the row is read
            for output in outputs:
                output.fail(error)


def position_bytes(config: TransformerConfig) -> int:
    """Bytes of the keys and values of one position of a row, in float32."""
    return 4 * sum(layer.key_value_heads * (layer.d_k + layer.d_v) for layer in config.layers("decoder"))


def _fit(some: list[Output], others: list[Output]) -> bool:
    """Whether rows may be padded to the longest."""
    lengths = [output.length for output in (*some, *others)]
    return len(lengths) * max(lengths) <= 2 * sum(lengths) + SLACK * len(lengths)


def _ids(sources: Sources, ids: NDArray) -> Sources:
    return Sources(sources.config, {SOURCE_IDS.name: [ids]}, sources.start)


def _named(token: int, logits: NDArray | None, likeliest: int | None, names: NDArray | None) -> NewToken:
    id = token if names is None else int(names[token])
    if logits is None or likeliest is None:
        return NewToken(id)
    exact = logits.astype(np.float64) - logits.max()
    log_p = exact - np.log(np.exp(exact).sum())
    first = np.argsort(-log_p, kind="stable")[:likeliest]
    others = [(int(i if names is None else names[i]), float(log_p[i])) for i in first]
    return NewToken(id, float(log_p[token]), others)
