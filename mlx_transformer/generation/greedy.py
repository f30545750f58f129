"""Greedy search and sampling: one hypothesis a sentence.

Shapes: B sentences, V vocabulary.
"""

from __future__ import annotations

import numpy as np

from mlx_transformer.core.config import TransformerConfig

from .arrays import Array, Arrays
from .options import Hypothesis, Options
from .sampling import draw, likeliest, noise
from .steps import Batch, History, Rules, Strategy, take_sentences


class Greedy(Strategy):
    """The likeliest token at each step, or with `options.sample` a drawn one. A finished sentence writes pad.

    `scored`: log p of the output is wanted. Otherwise its score is only finite or not, as the logits are.
    """

    width = 1

    def __init__(self, xp: Arrays, batch: Batch, options: Options, config: TransformerConfig, scored: bool = True):
        size = len(batch.sources)
        self.xp, self.options, self.config, self.scored = xp, options, config, scored
        self.rules = Rules(xp, batch, options, config)
        self.index = np.arange(size)
        self.places = batch.places
        self.limits = xp.asarray(batch.limits.astype(np.int32))
        self.done = self.limits < 0
        self.total = xp.full((size,), 0.0)
        self.history = History(xp, size)
        self.scores = np.zeros(size, np.float64)

    def choose(self, logits: Array, t: int) -> tuple[Array, None]:
        xp = self.xp
        logits = xp.float32(logits)
        allowed = self.rules.apply(self.rules.penalised(logits[:, None]), t)[:, 0]
        if self.options.sample:
            drawn = noise(self.options.seed, t, self.places[self.index], self.config.vocab_size)
            token = draw(xp, likeliest(xp, allowed, self.options), xp.asarray(drawn))
        else:
            token = xp.argmax(allowed, axis=1)
        chosen = xp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        if self.scored:
            chosen = chosen - xp.logsumexp(logits, axis=-1)
        if (forced := self.rules.unscored(t, self.limits)) is not None:
            token, chosen = xp.where(forced >= 0, forced, token), xp.where(forced >= 0, 0.0, chosen)
        self.total = xp.where(self.done, self.total, self.total + chosen)
        token = xp.where(self.done, self.config.pad_id, token)
        self.history.append(token)
        self.rules.write(token[:, None])
        self.done = self.done | self.rules.is_end(token) | (self.limits <= t + 1)
        return token, None

    def arrays(self) -> list[Array]:
        return [self.done, self.total]

    def keep(self, live: np.ndarray) -> None:
        self._set_finished_aside()
        self.index = self.index[live]
        self.rules.keep(live)
        self.limits, self.done, self.total = take_sentences(self.xp, live, self.limits, self.done, self.total)

    def results(self) -> list[list[Hypothesis]]:
        self._set_finished_aside()
        tokens = self.history.numpy(self.config.pad_id).T  # (B, T)
        lengths = (tokens != self.config.pad_id).sum(axis=1)  # pad is never generated, it only follows the end
        results = []
        for row, length, total in zip(tokens, lengths, self.scores, strict=True):
            ids = row[:length].tolist()
            score = float(total / self.options.penalty(int(length)))
            results.append([Hypothesis(ids[:-1] if ids and ids[-1] in self.rules.ends else ids, score)])
        return results

    def _set_finished_aside(self) -> None:
        self.history.close(self.index)
        self.scores[self.index] = self.xp.numpy(self.total)
