"""The loop that every kind of search shares: choose tokens, run the decoder one step, until all sentences are finished.

Shapes: B sentences, K hypotheses of a sentence, R = B*K rows (hypothesis r % K of sentence r // K), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Sources

from .arrays import Array, Arrays
from .options import Hypothesis, Options

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
        """Each row so many times, side by side."""
        ...

    def reorder(self, rows: Array) -> None:
        """Row i goes on from row rows[i], one of the same sentence."""
        ...

    def keep(self, rows: Array) -> None:
        """Only these rows (R',) go on, whole sentences, in this order."""
        ...


class Model(Protocol):
    """What `search` needs of a model."""

    config: TransformerConfig
    arrays: Arrays
    extends_positions: bool
    """Sequences may be longer than `config.max_positions`."""

    def start(self, sources: Sources) -> tuple[Decoder, Array]:
        """Sources (decoder-only: prompts) of any lengths -> the decoder and the first tokens' logits (B, V)."""
        ...


@dataclass(frozen=True)
class Batch:
    """The inputs that are decoded together: their indices in the caller's list, what is read of them, forced tokens,
    limits (B,) and places (B,), on which drawn tokens depend."""

    index: np.ndarray
    sources: Sources
    prefix: list[np.ndarray]
    limits: np.ndarray
    places: np.ndarray


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
        ...

    def choose(self, logits: Array, t: int) -> tuple[Array, Array | None]:
        """Logits (R, V) of new token number t -> next ids (R,), and the rows (R,) they follow (None: their own)."""
        ...

    def held(self) -> list[Array]:
        """The arrays that `choose` changes."""
        ...

    def keep(self, live: np.ndarray) -> None:
        """Put the results of all other sentences aside and go on with these."""
        ...

    def results(self) -> list[list[Hypothesis]]:
        """Hypotheses of all sentences that were in the batch, best first."""
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
            xp.queue(ids, *strategy.held())
        if t + 1 == steps:
            break
        if t == 0 and strategy.width > 1:
            decoder.repeat(strategy.width)
        elif rows is not None:
            decoder.reorder(rows)
        if (t + 1) % xp.check_every == 0:
            # On a device that works ahead: the step before, which it has finished while this one was being queued.
            finished = xp.numpy(earlier if xp.lazy else strategy.done)
            running = len(finished) - np.count_nonzero(finished)
            if running == 0:
                break
            if running <= xp.drop_below * len(finished):
                live = np.flatnonzero(~finished)
                kept_rows = (live[:, None] * strategy.width + np.arange(strategy.width)).reshape(-1).astype(np.int32)
                strategy.keep(live)
                decoder.keep(xp.asarray(kept_rows))
                ids = xp.take(ids, xp.asarray(kept_rows), axis=0)
        if stopped():
            raise Stopped
        logits = decoder.step(ids)
    return strategy.results()


class Rules:
    """Which tokens are allowed: none of `never_generated`, no eos too early, forced prefixes."""

    def __init__(self, xp: Arrays, batch: Batch, options: Options, config: TransformerConfig):
        self.xp, self.min_new_tokens = xp, options.min_new_tokens
        bans = np.zeros(config.vocab_size, np.float32)
        bans[config.never_generated] = BANNED
        self.bans = xp.asarray(bans)
        bans = bans.copy()
        bans[config.eos_id] = BANNED
        self.early_bans = xp.asarray(bans)
        self.token = xp.arange(config.vocab_size)[None, None]
        longest = max((len(row) for row in batch.prefix), default=0)
        self.forced = np.full((len(batch.prefix), longest), -1, np.int32)
        for i, row in enumerate(batch.prefix):
            self.forced[i, : len(row)] = row

    def apply(self, scores: Array, t: int) -> Array:
        """Add BANNED to the scores (B, K, V) of tokens that may not be number t."""
        xp = self.xp
        scores = scores + (self.early_bans if t < self.min_new_tokens else self.bans)
        if t < self.forced.shape[1]:
            forced = xp.asarray(self.forced[:, t])[:, None, None]
            scores = xp.where((forced >= 0) & (self.token != forced), scores + BANNED, scores)
        return scores

    def keep(self, live: np.ndarray) -> None:
        self.forced = self.forced[live]


def take_sentences(xp: Arrays, live: np.ndarray, *arrays: Array) -> list[Array]:
    """The same sentences of each array (B, ...)."""
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
        """All steps (T, B, ...), `fill` where a sentence was no longer there."""
        length = sum(len(part) for _, part in self.parts)
        joined = np.full((length, self.size, *self.parts[0][1].shape[2:]), fill, np.int64)
        t = 0
        for index, part in self.parts:
            joined[t : t + len(part), index] = part
            t += len(part)
        return joined
