"""Beam search with GNMT length penalty (Wu et al. 2016, section 7), for all sentences of a batch at once.

Shapes: B sentences, K = beam, V vocabulary, C candidates per step: 2K, plus K for each additional end token.

At each step, the candidates of a sentence are the C best extensions of its K live hypotheses. At most K candidates end
with the same end token, so K live hypotheses always remain. Among the K best candidates, those that end or reach the
length limit move to the finished set, which keeps the K best by log p / lp(length). An ending candidate below the K
best is dropped, as in fairseq and transformers. A sentence stops when no live hypothesis can beat its worst finished
hypothesis, or with `early_stopping` as soon as K hypotheses are finished.
"""

from __future__ import annotations

import numpy as np

from mlx_transformer.core.config import TransformerConfig

from .arrays import Array, Arrays, first_of, top_k
from .options import Hypothesis, Options
from .steps import BANNED, DEAD, Batch, History, Rules, Strategy, take_sentences


class Beam(Strategy):
    """The beam search of a batch.

    The tokens and parent slots of each step are stored. A finished hypothesis is a step and a slot, from which
    `results` follows the parents back.
    """

    def __init__(self, xp: Arrays, batch: Batch, options: Options, config: TransformerConfig):
        size, k = len(batch.sources), options.beam
        self.xp, self.options, self.config, self.width = xp, options, config, k
        self.rules = Rules(xp, batch, options, config)
        self.index = np.arange(size)
        self.limits = xp.asarray(batch.limits.astype(np.int32))
        self.limit_penalty = xp.asarray(np.asarray(options.penalty(batch.limits), np.float32))
        self.done = self.limits < 0
        self.live = xp.full((size, 1), 0.0)  # log p (B, K) of live hypotheses; (B, 1) before the first step
        self.scores = xp.full((size, k), BANNED)  # (B, K) of finished hypotheses, best first; BANNED: none yet
        none = xp.asarray(np.zeros((size, k), np.int32))
        self.ends = {"step": none, "slot": none, "token": none}  # last step, slot before it, last token
        self.tokens, self.parents = History(xp, size), History(xp, size)
        self.finished = {name: np.zeros((size, k), np.float64) for name in ("score", *self.ends)}

    def choose(self, logits: Array, t: int) -> tuple[Array, Array]:
        candidates, forced = self.candidates(logits, t), self.rules.unscored(t, self.limits)
        return self.advance(*(candidates if forced is None else self._forced(forced, *candidates)), t)

    def advance(self, values: Array, parent: Array, token: Array, t: int) -> tuple[Array, Array]:
        """Move finished candidates (B, C) to the finished set, and continue with the K best others."""
        xp, k, size = self.xp, self.width, len(self.live)
        eos = self.rules.is_end(token)
        at_limit = self.limits <= t + 1
        self._finish(values, parent, token, eos | at_limit[:, None], t)
        self.live, pick = first_of(xp, xp.where(eos, 4 * BANNED, values), k)
        token, parent = (xp.take_along_axis(x, pick, axis=1) for x in (token, parent))
        self.tokens.append(token)
        self.parents.append(parent)
        self.rules.write(token, parent)
        self.done = self.done | at_limit | self._decided(t + 1)
        rows = (parent + xp.arange(size)[:, None] * k).reshape(-1)
        return token.reshape(-1), rows

    def candidates(self, logits: Array, t: int) -> tuple[Array, Array, Array]:
        """The C best extensions of each sentence, best first: log p, parent slot and token, each (B, C)."""
        xp, count, v = self.xp, self.options.candidates, logits.shape[-1]
        size, hypotheses = self.live.shape
        logits = xp.float32(logits).reshape(size, hypotheses, v)
        # log p of hypothesis and token = logit - logsumexp(logits) + log p of the hypothesis so far
        normaliser = xp.logsumexp(logits, axis=-1)
        if self.options.repetition_penalty == 1:
            scores = logits + (self.live - normaliser)[:, :, None]
        else:
            scores = self.rules.penalised(logits - normaliser[:, :, None]) + self.live[:, :, None]
        scores = self.rules.apply(scores, t).reshape(size, hypotheses * v)
        if hypotheses * v < count:
            scores = xp.concatenate([scores, xp.full((size, count - hypotheses * v), 2 * BANNED)], axis=1)
        values, flat = top_k(xp, scores, count)  # (B, C)
        parent, token = flat // v, flat % v
        return values, xp.where(parent < hypotheses, parent, 0), token  # padding of the scores has no parent

    def _forced(self, forced: Array, values: Array, parent: Array, token: Array) -> tuple[Array, Array, Array]:
        """Replace the candidates (B, C) of sentences with a forced token. Each live hypothesis is extended by it and
        keeps its log p. forced (B,): the token, or -1."""
        xp, (size, live), count = self.xp, self.live.shape, values.shape[1]
        own = xp.concatenate([self.live, xp.full((size, count - live), 2 * BANNED)], axis=1)
        slots, forced_ids = xp.arange(count)[None], forced[:, None]
        parent = xp.where(forced_ids < 0, parent, xp.where(slots < live, slots, 0))
        return xp.where(forced_ids < 0, values, own), parent, xp.where(forced_ids < 0, token, forced_ids)

    def _finish(self, values: Array, parent: Array, token: Array, ends: Array, t: int) -> None:
        """Merge the ending candidates among the K best into the finished set."""
        xp, k = self.xp, self.width
        fits = ends[:, :k] & (values[:, :k] > DEAD) & ~self.done[:, None]
        new = xp.where(fits, values[:, :k] / float(self.options.penalty(t + 1)), BANNED)
        self.scores, pick = first_of(xp, xp.concatenate([self.scores, new], axis=1), k)
        ended = {"step": xp.where(fits, t, 0), "slot": parent[:, :k], "token": token[:, :k]}
        for name, x in ended.items():
            self.ends[name] = xp.take_along_axis(xp.concatenate([self.ends[name], x], axis=1), pick, axis=1)

    def _decided(self, length: int) -> Array:
        """(B,): K hypotheses are finished, and (unless `early_stopping`) no live hypothesis can beat the worst of them.

        log p only falls, so a live hypothesis can reach at most its log p / the largest penalty ahead: the penalty at
        the length limit, or with a negative alpha that of the next length.
        """
        worst = self.scores[:, -1]
        full = worst > DEAD
        if self.options.early_stopping:
            return full
        if self.options.heuristic_stop:
            return full & (worst >= self.live[:, 0] / float(self.options.penalty(length)))
        ahead = self.limit_penalty if self.options.length_penalty >= 0 else float(self.options.penalty(length + 1))
        return full & (worst >= self.live[:, 0] / ahead)

    def arrays(self) -> list[Array]:
        return [
            self.done,
            self.live,
            self.scores,
            *self.ends.values(),
            *self.tokens.steps[-1:],
            *self.parents.steps[-1:],
        ]

    def keep(self, live: np.ndarray) -> None:
        self._set_finished_aside()
        self.index = self.index[live]
        self.rules.keep(live)
        arrays = take_sentences(
            self.xp, live, self.limits, self.limit_penalty, self.done, self.live, self.scores, *self.ends.values()
        )
        self.limits, self.limit_penalty, self.done, self.live, self.scores = arrays[:5]
        self.ends = dict(zip(self.ends, arrays[5:], strict=True))

    def _set_finished_aside(self) -> None:
        self.tokens.close(self.index)
        self.parents.close(self.index)
        for name, x in {"score": self.scores, **self.ends}.items():
            self.finished[name][self.index] = self.xp.numpy(x)

    def results(self) -> list[list[Hypothesis]]:
        self._set_finished_aside()
        tokens, parents = self.tokens.numpy(0), self.parents.numpy(0)  # (T, B, K)
        count = self.options.n_best
        step, slot, last = (np.asarray(self.finished[name][:, :count], np.int64) for name in ("step", "slot", "token"))
        paths = np.zeros((*step.shape, len(tokens)), np.int64)
        sentence = np.arange(len(step))[:, None]
        for t in reversed(range(len(tokens))):
            before = t < step
            paths[..., t] = np.where(before, tokens[t][sentence, slot], last)
            slot = np.where(before, parents[t][sentence, slot], slot)
        results = []
        for i, scores in enumerate(self.finished["score"][:, :count]):
            # A hypothesis that ended at step s has s tokens and a last token, which may be eos.
            ended = [
                (paths[i, j, : step[i, j] + 1].tolist(), float(score)) for j, score in enumerate(scores) if score > DEAD
            ]
            ends = self.rules.ends
            results.append([Hypothesis(ids[:-1] if ids[-1] in ends else ids, score) for ids, score in ended])
        return results
