"""The loop of every search: choose the next tokens, run the decoder one step, until all sentences are finished.

Shapes: B sentences, K hypotheses of a sentence, R = B*K rows (hypothesis r % K of sentence r // K), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar, cast

import numpy as np

from mlx_transformer.core.config import RELATIVE, TransformerConfig
from mlx_transformer.core.inputs import SOURCE_IDS, Sources
from mlx_transformer.core.positions import borders

from .arrays import Array, Arrays, NumpyArrays
from .options import Hypothesis, Options, aligned_right

T = TypeVar("T")

# Added to the log-probability of banned tokens. Finite, so that sums, differences and products with 0 stay finite on
# every device. A score below DEAD contains a banned token.
BANNED = -1e9
DEAD = BANNED / 2
EXCLUDED = 3
"""Largest number of tokens banned by default: padding, start and, before min_new_tokens, the end token."""


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """The search was cancelled: `stopped()` returned True, e.g. because the client of a server has left."""


class Decoder(Protocol):
    """A batch being decoded. Its rows are hypotheses; `step` extends their caches."""

    def step(self, ids: Array) -> Array:
        """Run the last tokens (R,); return logits (R, V) of the next tokens."""
        ...

    def repeat(self, times: int) -> None:
        """Repeat each row `times` times, side by side."""
        ...

    def reorder(self, rows: Array) -> None:
        """Reorder the caches: row i continues from row rows[i], of the same sentence."""
        ...

    def keep(self, rows: Array) -> None:
        """Keep only these rows (R',), in this order: whole sentences."""
        ...


class Rewinding(Decoder, Protocol):
    """A decoder of a model with `takes_back`."""

    def read_each(self, ids: Array) -> Array:
        """Run the last tokens (R, L); return the logits (R, L, V) of the token after each."""
        ...

    def take_back(self, count: int) -> None:
        """Forget the last `count` positions of all rows."""
        ...


class PromptDecoder(Decoder, Protocol):
    """The decoder of a decoder-only model: it reads prompts in parts, and its rows join and leave (`Running`)."""

    def extend(self, ids: Array) -> Array | None:
        """Run further tokens of the prompts (R, L); return logits (R, V) of the next tokens, or None if the model has
        `own_lengths`."""
        ...

    def join(self, other: Self) -> None:
        """Append the rows of another decoder of this model; its texts may have other lengths."""
        ...

    def part(self, row: int, length: int, of: int) -> Self | None:
        """Copy the cache of the first `length` of a row's `of` tokens to a new decoder; None if the cache has dropped
        positions that the next token attends to."""
        ...

    def shrink(self, lengths: Sequence[int]) -> None:
        """Drop padding that all rows have. lengths (R,): the tokens of each row."""
        ...


class Model(Protocol):
    """The interface of a model for searches: `start`, and optional methods for runtimes with a faster way."""

    config: TransformerConfig
    arrays: Arrays = cast(Arrays, NumpyArrays())  # a cast, since NumPy's parameters have other names
    extends_positions: bool = False
    """Whether sequences may be longer than `config.max_positions`."""
    takes_back: bool = False
    """Whether its decoders are `Rewinding`."""
    draft: Model | None = None
    """A smaller model with the same vocabulary, which guesses tokens for `Options.speculate`."""
    joins: bool = False
    """Whether its decoders are `PromptDecoder`s."""
    own_lengths: bool = False
    """Whether joined rows keep their own lengths, without padding. A `reader` then reads a prompt without its last
    token and computes no logits; the last token is fed in a step of all rows."""

    def start(self, sources: Sources) -> tuple[Decoder, Array]:
        """Encode sources (decoder-only: read prompts) of any lengths; return a decoder and logits (B, V) of the first
        new tokens."""
        ...

    def reader(self) -> PromptDecoder | None:
        """An empty decoder of one row, if the model has `own_lengths`; None: use `start`."""
        return None

    def strategy(self, batch: Batch, options: Options, scored: bool) -> Strategy | None:
        """The model's own strategy for this batch, e.g. if its graph chooses among the logits; None: use `Beam` or
        `Greedy`, which read all logits."""
        return None

    def among(self, candidates: Any) -> Model | None:
        """A model that computes logits of the candidates only (`candidates.Candidates`); None: it can't, and the search
        selects them from all logits."""
        return None

    def batch_search(
        self, options: Options, stopped: Callable[[], bool]
    ) -> Callable[[Batch], list[list[Hypothesis]]] | None:
        """A function to search a whole batch at once, for a graph with the search inside; None: use steps."""
        return None

    def in_parallel(self, search_on: Callable[[Model, Batch], T], work: Sequence[Batch]) -> Iterator[T]:
        """Yield `search_on(model, batch)` for all batches, in any order."""
        return (search_on(self, batch) for batch in work)


@dataclass(frozen=True)
class Batch:
    """Inputs decoded together.

    index (B,): indices in the list of all inputs. sources: ids or vectors. prefix: forced first tokens. limits (B,):
    most new tokens. places (B,): row numbers, on which random draws depend. candidates: ids each output may
    contain; None: all.
    """

    index: np.ndarray
    sources: Sources
    prefix: list[np.ndarray]
    limits: np.ndarray
    places: np.ndarray
    candidates: list[np.ndarray] | None = None

    def part(self, chosen: slice) -> Batch:
        """A batch of some of the inputs."""
        candidates = None if self.candidates is None else self.candidates[chosen]
        arrays = self.sources[chosen], self.prefix[chosen], self.limits[chosen], self.places[chosen]
        return Batch(self.index[chosen], *arrays, candidates)


class Strategy(Protocol):
    """Chooses the next tokens, e.g. `Greedy` or `Beam`. It keeps the state of each sentence in arrays of the device."""

    width: int
    """Hypotheses (rows) per sentence."""
    done: Array
    """(B,) boolean: the sentence is finished, and its results no longer change."""
    index: np.ndarray
    """(B,) place of each remaining sentence in the original batch."""

    def start(self, model: Model, sources: Sources) -> tuple[Decoder, Array]:
        """Start decoding; return the decoder and its first output, which goes to `choose` (by default, logits)."""
        return model.start(sources)

    def choose(self, logits: Array, t: int) -> tuple[Array, Array | None]:
        """Choose new token number t from logits (R, V); return ids (R,) and the row (R,) each of them continues.

        None in place of the rows: row i continues row i.
        """
        ...

    def arrays(self) -> list[Array]:
        """The arrays that `choose` changes, for lazy devices."""
        ...

    def keep(self, live: np.ndarray) -> None:
        """Store the results of all other sentences, and continue with the sentences at these places."""
        ...

    def results(self) -> list[list[Hypothesis]]:
        """Hypotheses of all sentences of the original batch, best first."""
        ...


def run(
    model: Model, batch: Batch, strategy: Strategy, stopped: Callable[[], bool] = lambda: False
) -> list[list[Hypothesis]]:
    """Decode one batch to its end. Raises `Stopped` if `stopped()`, which is called before each step, returns True."""
    xp = model.arrays
    if stopped():
        raise Stopped
    decoder, logits = strategy.start(model, batch.sources)
    steps = int(batch.limits.max())
    for t in range(steps):
        earlier = strategy.done
        ids, rows = strategy.choose(logits, t)
        if xp.lazy:
            xp.queue(ids, *strategy.arrays())
        if t + 1 == steps:
            break
        if t == 0 and strategy.width > 1:
            decoder.repeat(strategy.width)
        elif rows is not None:
            decoder.reorder(rows)
        if (t + 1) % xp.check_every == 0:
            # A lazy device has finished the previous step while this one was queued: reading it needs no wait.
            finished = xp.numpy(earlier if xp.lazy else strategy.done)
            running = len(finished) - int(np.count_nonzero(finished))
            if running == 0:
                break
            if running <= xp.drop_below * len(finished):
                live = running_sentences(finished, running)
                rows_left = (live[:, None] * strategy.width + np.arange(strategy.width)).reshape(-1).astype(np.int32)
                strategy.keep(live)
                decoder.keep(xp.asarray(rows_left))
                ids = xp.take(ids, xp.asarray(rows_left), axis=0)
        if stopped():
            raise Stopped
        logits = decoder.step(ids)
    return strategy.results()


class Rereading(Decoder):
    """The decoder of a decoder-only model with longrope, whose rotary frequencies depend on the length of a text.

    The cached keys are rotated for a short text. When a row exceeds this length, all rows are read again, as in
    transformers.
    """

    def __init__(self, model: Model, start: Callable[[Sources], tuple[Decoder, Array]], sources: Sources):
        """start: as `Model.start`; called again with longer texts."""
        self.xp, self.config, self.start = model.arrays, model.config, start
        self.rows, self.borders = [row.tolist() for row in sources], borders(model.config)
        self.decoder, self.logits = start(sources)

    def step(self, ids: Array) -> Array:
        return self.extend(ids[:, None])

    def extend(self, ids: Array) -> Array:
        new = self.xp.numpy(ids).tolist()
        self.rows = [[*row, *tokens] for row, tokens in zip(self.rows, new, strict=True)]
        lengths = {len(row) - i for row in self.rows for i in range(1, len(new[0]) + 1)}
        if self.borders.isdisjoint(lengths):
            return cast(PromptDecoder, self.decoder).extend(ids)
        rows = {SOURCE_IDS.name: [np.array(row) for row in self.rows]}
        self.decoder, logits = self.start(Sources(self.config, rows))
        return logits

    def repeat(self, times: int) -> None:
        self.rows = [row for row in self.rows for _ in range(times)]
        self.decoder.repeat(times)

    def reorder(self, rows: Array) -> None:
        self._select(rows)
        self.decoder.reorder(rows)

    def keep(self, rows: Array) -> None:
        self._select(rows)
        self.decoder.keep(rows)

    def _select(self, rows: Array) -> None:
        self.rows = [self.rows[i] for i in self.xp.numpy(rows).tolist()]


def reading(model: Model, start: Callable[[Sources], tuple[Decoder, Array]], sources: Sources) -> tuple[Decoder, Array]:
    """Start a model's decoder; with longrope, a `Rereading` decoder."""
    if not borders(model.config):
        return start(sources)
    decoder = Rereading(model, start, sources)
    return decoder, decoder.logits


def joins(config: TransformerConfig) -> bool:
    """Whether rows of different lengths can be joined by padding on the left. Not for encoder-decoder models, relative
    positions, and longrope, whose frequencies depend on a text's length."""
    return not (config.has_encoder or config.positions in RELATIVE or borders(config))


def common(a: Any, b: Any) -> int:
    """Length of the common prefix of two texts' ids.

    >>> common([5, 6, 7], np.array([5, 6, 8, 9]))
    2
    """
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(differ[0]) if differ.size else length


def running_sentences(finished: np.ndarray, running: int) -> np.ndarray:
    """Old places of the unfinished sentences, for new places 0 to running - 1. Sentences already at these places stay,
    and the others fill the gaps, so that few move.

    >>> running_sentences(np.array([False, True, False, True, False]), 3)
    array([0, 4, 2])
    """
    live = np.flatnonzero(~finished)
    order = np.arange(running)
    order[finished[:running]] = live[live >= running]
    return order


def banned_ids(config: TransformerConfig) -> list[int]:
    """Ids never generated: padding and the start token. BART's start token is also its end, and is allowed."""
    return sorted({config.pad_id, config.bos_id} - {config.eos_id})


class Rules:
    """The tokens allowed at each step: bans, minimum length, forced tokens, no repetitions."""

    def __init__(self, xp: Arrays, batch: Batch, options: Options, config: TransformerConfig):
        self.xp, self.options, self.min_new_tokens = xp, options, options.min_new_tokens
        self.ends, self.vocab_size = options.ends(config), config.vocab_size
        never = [*banned_ids(config), *options.suppressed]
        self.bans, self.early_bans = self._marked(never), self._marked([*never, *self.ends])
        self.first_bans = self._marked(options.suppressed_first) if options.suppressed_first else None
        sequences = aligned_right(options.banned_sequences)
        self.sequences = xp.asarray(sequences.astype(np.int32)) if len(sequences) else None
        self.sequence_length = sequences.shape[1]
        self.token = xp.arange(config.vocab_size)[None, None]
        self.history = xp.asarray(_begun(batch, options, config)[:, None]) if options.reads_history else None
        """Start token or prompt, then all new tokens (B, K, L); -1 before shorter prompts."""
        shape = len(batch.sources), 1, config.vocab_size
        self.counts = xp.full(shape, 0.0) if options.counts_tokens else None
        """How often each new token was written (B, K, V)."""
        first = len(options.forced_first)
        longest = max((len(row) for row in batch.prefix), default=0)
        self.forced = np.full((len(batch.prefix), first + longest), -1, np.int32)
        for i, row in enumerate(batch.prefix):
            self.forced[i, first : first + len(row)] = row

    def apply(self, scores: Array, t: int) -> Array:
        """Add BANNED to the scores (B, K, V) of tokens not allowed as token number t. Tokens forced by a prefix are
        never banned."""
        xp, before = self.xp, scores
        scores = scores + (self.early_bans if t < self.min_new_tokens else self.bans)
        if self.first_bans is not None and t == len(self.options.forced_first):
            scores = scores + self.first_bans
        if self.history is not None:
            scores = self._without_sequences(self._without_repeats(scores))
        if t < self.forced.shape[1]:
            forced = xp.asarray(self.forced[:, t])[:, None, None]
            only = xp.where(self.token == forced, before, before + BANNED)
            scores = xp.where(forced >= 0, only, scores)
        return scores

    def penalised(self, scores: Array) -> Array:
        """Apply repetition_penalty, then presence_penalty and frequency_penalty, to scores (B, K, V): logits, or log p
        in beam search."""
        penalty, o = self.options.repetition_penalty, self.options
        if self.history is not None and penalty != 1:
            weaker = self.xp.where(scores < 0, scores * penalty, scores / penalty)
            scores = self.xp.where(self._among(self.history), weaker, scores)
        if self.counts is not None:
            present = self.xp.where(self.counts > 0, o.presence_penalty, 0.0)
            scores = scores - (self.counts * o.frequency_penalty + present)
        return scores

    def unscored(self, t: int, limits: Array) -> Array | None:
        """The token (B,) each sentence must write as number t without counting in its score; -1: any token.

        None if there is none for any sentence.
        """
        if t < len(self.options.forced_first):
            return self.xp.where(limits >= 0, self.options.forced_first[t], -1)
        return self.xp.where(limits == t + 1, self.ends[0], -1) if self.options.forced_end else None

    def is_end(self, token: Array) -> Array:
        """Whether each token (...) is an end token."""
        ended = token == self.ends[0]
        for other in self.ends[1:]:
            ended = ended | (token == other)
        return ended

    def write(self, token: Array, parent: Array | None = None) -> None:
        """Append the new tokens (B, K), each to the history of hypothesis `parent` (B, K) of its sentence."""
        if self.history is not None:
            before = self.history
            if parent is not None:
                before = self.xp.take_along_axis(before, parent[:, :, None], axis=1)
            self.history = self.xp.concatenate([before, token[:, :, None]], axis=2)
        if self.counts is not None:
            if parent is not None:
                self.counts = self.xp.take_along_axis(self.counts, parent[:, :, None], axis=1)
            self.counts = self.counts + self.xp.where(self.token == token[:, :, None], 1.0, 0.0)

    def keep(self, live: np.ndarray) -> None:
        self.forced = self.forced[live]
        if self.history is not None:
            (self.history,) = take_sentences(self.xp, live, self.history)
        if self.counts is not None:
            (self.counts,) = take_sentences(self.xp, live, self.counts)

    def _without_repeats(self, scores: Array) -> Array:
        """Ban tokens that would repeat an n-gram of the history."""
        n, history = self.options.no_repeat_ngram, self.history
        windows = 0 if history is None or n == 0 else history.shape[2] - n + 1
        if history is None or windows < 1:
            return scores
        same = history[:, :, n - 1 :] >= 0
        for i in range(n - 1):
            last = history[:, :, history.shape[2] - n + 1 + i][:, :, None]
            same = same & (history[:, :, i : i + windows] == last)
        return scores + self.xp.where(self._among(self.xp.where(same, history[:, :, n - 1 :], -1)), BANNED, 0.0)

    def _without_sequences(self, scores: Array) -> Array:
        """Ban tokens that would complete one of `banned_sequences`."""
        xp, history = self.xp, self.history
        if history is None or self.sequences is None:
            return scores
        before = self.sequence_length - 1
        size, hypotheses, _ = history.shape
        padded = xp.concatenate([xp.asarray(np.full((size, hypotheses, before), -2, np.int32)), history], axis=2)
        latest, first = padded[:, :, -before:], self.sequences[:, :-1]
        same = xp.sum(xp.where((latest[:, :, None] == first) | (first < 0), 1, 0), axis=3) == before
        return scores + xp.where(self._among(xp.where(same, self.sequences[:, -1], -1)), BANNED, 0.0)

    def _marked(self, ids: Sequence[int]) -> Array:
        """(V,): BANNED at these ids, else 0."""
        bans = np.zeros(self.vocab_size, np.float32)
        bans[list(ids)] = BANNED
        return self.xp.asarray(bans)

    def _among(self, tokens: Array) -> Array:
        """(B, K, V): True for ids that occur in tokens (B, K, N), where -1 stands for no token."""
        size, hypotheses, _ = tokens.shape
        places = self.xp.where(tokens < 0, self.vocab_size, tokens).reshape(size * hypotheses, -1)
        return self.xp.marked(places, self.vocab_size + 1)[:, :-1].reshape(size, hypotheses, -1)


def _begun(batch: Batch, options: Options, config: TransformerConfig) -> np.ndarray:
    """(B, L): the start token, or the prompt with -1 before shorter prompts."""
    if config.has_encoder:
        start = config.bos_id if options.start_id is None else options.start_id
        return np.full((len(batch.sources), 1), start, np.int32)
    return aligned_right([row.tolist() for row in batch.sources]).astype(np.int32)


def take_sentences(xp: Arrays, live: np.ndarray, *arrays: Array) -> list[Array]:
    """Select sentences of each array (B, ...)."""
    rows = xp.asarray(live.astype(np.int32))
    return [xp.take(array, rows, axis=0) for array in arrays]


class History:
    """One array (B, ...) per step. Arrays stay on the device until `close` copies them to the host together."""

    def __init__(self, xp: Arrays, size: int):
        self.xp, self.size = xp, size
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []  # (places of sentences, array (steps, sentences, ...))
        self.steps: list[Array] = []

    def append(self, x: Array) -> None:
        self.steps.append(x)

    def close(self, index: np.ndarray) -> None:
        """Copy the steps since the last call to the host. index: places of their sentences in the original batch."""
        if self.steps:
            self.parts.append((index, self.xp.numpy(self.xp.stack(self.steps, axis=0))))
            self.steps = []

    def numpy(self, fill: int) -> np.ndarray:
        """All steps (T, B, ...), with `fill` where a sentence had been dropped."""
        length = sum(len(part) for _, part in self.parts)
        joined = np.full((length, self.size, *self.parts[0][1].shape[2:]), fill, np.int64)
        t = 0
        for index, part in self.parts:
            joined[t : t + len(part), index] = part
            t += len(part)
        return joined
