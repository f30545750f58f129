"""The loop that every kind of search shares: choose tokens, run the decoder one step, until all sentences are finished.

Shapes: B sentences, K hypotheses of a sentence, R = B*K rows (hypothesis r % K of sentence r // K), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Sources

from .arrays import Array, Arrays, NumpyArrays
from .options import Hypothesis, Options, aligned_right

T = TypeVar("T")

# Log-probability of what must not happen. Finite, so that sums, differences and products with 0 stay finite on every
# device; anything below DEAD has such a token in it.
BANNED = -1e9
DEAD = BANNED / 2
EXCLUDED = 3
"""Most tokens that may be banned, besides forced prefixes: padding, start and, while it is too early, end."""


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """The search was given up: `stopped()` said that nobody waits for it any more."""


class Decoder(Protocol):
    """A batch in decoding. Its rows are hypotheses; `step` appends to their caches."""

    def step(self, ids: Array) -> Array:
        """Last tokens (R,) -> logits (R, V) of the next ones."""
        ...

    def repeat(self, times: int) -> None:
        """Repeat each row so many times, side by side."""
        ...

    def reorder(self, rows: Array) -> None:
        """Let row i go on from row rows[i], one of the same sentence."""
        ...

    def keep(self, rows: Array) -> None:
        """Keep only these rows (R',), whole sentences, in this order."""
        ...


class Model(Protocol):
    """The interface that `search` needs of a model: `start`, and what it can do better than `search` by itself."""

    config: TransformerConfig
    arrays: Arrays = cast(Arrays, NumpyArrays())  # NumPy's functions name their arguments otherwise
    extends_positions: bool = False
    """Sequences may be longer than `config.max_positions`."""

    def start(self, sources: Sources) -> tuple[Decoder, Array]:
        """Return sources (decoder-only: prompts) of any lengths -> the decoder and the first tokens' logits (B, V)."""
        ...

    def strategy(self, batch: Batch, options: Options, scored: bool) -> Strategy | None:
        """Return its own strategy for this batch, one that leaves the choice among the logits to the graph; None: it
        has none, and `Beam` or `Greedy` looks at all logits."""
        return None

    def among(self, candidates: Any) -> Model | None:
        """Return the model with the vocabulary of a batch (`candidates.Candidates`), which computes the logits of these
        ids alone; None: it can't, and they are chosen from all logits."""
        return None

    def batch_search(
        self, options: Options, stopped: Callable[[], bool]
    ) -> Callable[[Batch], list[list[Hypothesis]]] | None:
        """Return a function that searches a whole batch at once, as a graph with the search inside does; None: the
        model takes steps."""
        return None

    def in_parallel(self, search_on: Callable[[Model, Batch], T], work: Sequence[Batch]) -> Iterator[T]:
        """Run `search_on(model, batch)` on all batches, in any order."""
        return (search_on(self, batch) for batch in work)


@dataclass(frozen=True)
class Batch:
    """The inputs that are decoded together: their indices in the caller's list, what is read of them, forced tokens,
    limits (B,), places (B,), on which drawn tokens depend, and the ids that each output may be made of; None: all."""

    index: np.ndarray
    sources: Sources
    prefix: list[np.ndarray]
    limits: np.ndarray
    places: np.ndarray
    candidates: list[np.ndarray] | None = None

    def part(self, chosen: slice) -> Batch:
        """Return some of its inputs."""
        candidates = None if self.candidates is None else self.candidates[chosen]
        arrays = self.sources[chosen], self.prefix[chosen], self.limits[chosen], self.places[chosen]
        return Batch(self.index[chosen], *arrays, candidates)


class Strategy(Protocol):
    """How the next tokens are chosen. Holds what it knows of each sentence, in arrays of the device."""

    width: int
    """Hypotheses (rows) a sentence."""
    done: Array
    """(B,) boolean: the sentence is finished, nothing of it changes any more."""
    index: np.ndarray
    """(B,) place of each sentence that is still here in the batch as it was at the start."""

    def start(self, model: Model, sources: Sources) -> tuple[Decoder, Array]:
        """Begin with these inputs: the decoder, and what it says of their first tokens."""
        return model.start(sources)

    def choose(self, logits: Array, t: int) -> tuple[Array, Array | None]:
        """Return logits (R, V) of new token number t -> next ids (R,), and the rows (R,) they follow (None: their
        own)."""
        ...

    def arrays(self) -> list[Array]:
        """Return the arrays that `choose` changes."""
        ...

    def keep(self, live: np.ndarray) -> None:
        """Put the results of all other sentences aside and go on with these."""
        ...

    def results(self) -> list[list[Hypothesis]]:
        """Return hypotheses of all sentences that were in the batch, best first."""
        ...


def run(
    model: Model, batch: Batch, strategy: Strategy, stopped: Callable[[], bool] = lambda: False
) -> list[list[Hypothesis]]:
    """Decode one batch to its end. `Stopped` once `stopped()`, which is asked before each step, is true."""
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
            # On a device that works ahead: the step before, which it has finished while this one was being queued.
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


def running_sentences(finished: np.ndarray, running: int) -> np.ndarray:
    """Return the `running` sentences that go on, in places 0, 1, ...: each stays where it is, if that is one of these;
    the others take the places of finished ones, so that few have to be moved."""
    live = np.flatnonzero(~finished)
    order = np.arange(running)
    order[finished[:running]] = live[live >= running]
    return order


def banned_ids(config: TransformerConfig) -> list[int]:
    """Return what is never written: padding, and the start token where it isn't the end too, as in BART."""
    return sorted({config.pad_id, config.bos_id} - {config.eos_id})


class Rules:
    """Which tokens are allowed: never pad or start, no end too early, forced ones, nothing that mustn't be repeated."""

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
        """All that was written and read before it (B, K, L), -1 before its begin."""
        first = len(options.forced_first)
        longest = max((len(row) for row in batch.prefix), default=0)
        self.forced = np.full((len(batch.prefix), first + longest), -1, np.int32)
        for i, row in enumerate(batch.prefix):
            self.forced[i, first : first + len(row)] = row

    def apply(self, scores: Array, t: int) -> Array:
        """Add BANNED to the scores (B, K, V) of tokens that may not be number t. A token that a prefix forces may
        always be."""
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
        """Return scores (B, K, V), those of all that was written weakened: logits, or in beam search log p
        (transformers)."""
        penalty = self.options.repetition_penalty
        if self.history is None or penalty == 1:
            return scores
        weaker = self.xp.where(scores < 0, scores * penalty, scores / penalty)
        return self.xp.where(self._among(self.history), weaker, scores)

    def unscored(self, t: int, limits: Array) -> Array | None:
        """Return the token (B,) that each sentence gets as number t without its being scored, -1: none; None: nowhere
        one."""
        if t < len(self.options.forced_first):
            return self.xp.where(limits >= 0, self.options.forced_first[t], -1)
        return self.xp.where(limits == t + 1, self.ends[0], -1) if self.options.forced_end else None

    def is_end(self, token: Array) -> Array:
        """Return whether tokens (...) are ends."""
        ended = token == self.ends[0]
        for other in self.ends[1:]:
            ended = ended | (token == other)
        return ended

    def write(self, token: Array, parent: Array | None = None) -> None:
        """Take the new tokens (B, K) down, each after hypothesis `parent` of its sentence."""
        if self.history is not None:
            before = self.history
            if parent is not None:
                before = self.xp.take_along_axis(before, parent[:, :, None], axis=1)
            self.history = self.xp.concatenate([before, token[:, :, None]], axis=2)

    def keep(self, live: np.ndarray) -> None:
        self.forced = self.forced[live]
        if self.history is not None:
            (self.history,) = take_sentences(self.xp, live, self.history)

    def _without_repeats(self, scores: Array) -> Array:
        """Return BANNED on each token that would end the same n tokens as were written before."""
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
        """Return BANNED on each token that would end one of `banned_sequences`."""
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
        """Return (V,): BANNED at these ids, else 0."""
        bans = np.zeros(self.vocab_size, np.float32)
        bans[list(ids)] = BANNED
        return self.xp.asarray(bans)

    def _among(self, tokens: Array) -> Array:
        """Return whether each of the vocabulary (B, K, V) is among tokens (B, K, N); -1: none."""
        size, hypotheses, _ = tokens.shape
        places = self.xp.where(tokens < 0, self.vocab_size, tokens).reshape(size * hypotheses, -1)
        return self.xp.marked(places, self.vocab_size + 1)[:, :-1].reshape(size, hypotheses, -1)


def _begun(batch: Batch, options: Options, config: TransformerConfig) -> np.ndarray:
    """Return what each output goes on from (B, L): the start token, or the prompt, -1 before it."""
    if config.has_encoder:
        start = config.bos_id if options.start_id is None else options.start_id
        return np.full((len(batch.sources), 1), start, np.int32)
    return aligned_right([row.tolist() for row in batch.sources]).astype(np.int32)


def take_sentences(xp: Arrays, live: np.ndarray, *arrays: Array) -> list[Array]:
    """Return the same sentences of each array (B, ...)."""
    rows = xp.asarray(live.astype(np.int32))
    return [xp.take(array, rows, axis=0) for array in arrays]


class History:
    """One array (B, ...) a step, kept on the device and brought together on the host once."""

    def __init__(self, xp: Arrays, size: int):
        self.xp, self.size = xp, size
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []  # sentences, steps x sentences x ...
        self.steps: list[Array] = []

    def append(self, x: Array) -> None:
        self.steps.append(x)

    def close(self, index: np.ndarray) -> None:
        """Bring the steps since the last call to the host; `index` are the sentences they were of."""
        if self.steps:
            self.parts.append((index, self.xp.numpy(self.xp.stack(self.steps, axis=0))))
            self.steps = []

    def numpy(self, fill: int) -> np.ndarray:
        """Return all steps (T, B, ...), `fill` where a sentence was no longer there."""
        length = sum(len(part) for _, part in self.parts)
        joined = np.full((length, self.size, *self.parts[0][1].shape[2:]), fill, np.int64)
        t = 0
        for index, part in self.parts:
            joined[t : t + len(part), index] = part
            t += len(part)
        return joined
