"""Greedy and beam search over the candidates that `decoder_cpu` chooses in its graph.

The searches are `decoding.greedy` and `decoding.beam`; only the choice among the logits is in the graph. A search that
needs all logits gets them: sampling, scores of greedy search, forced prefixes, rules about earlier tokens (e.g. no
repeated n-grams), several end tokens, tokens suppressed at the start or, in beam search, anywhere.

Shapes: B sentences, K = beam, R rows, V vocabulary, C candidates of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Sources
from mlx_transformer.decoding.arrays import Arrays, NumpyArrays
from mlx_transformer.decoding.beam import Beam
from mlx_transformer.decoding.greedy import Greedy
from mlx_transformer.decoding.options import Options
from mlx_transformer.decoding.steps import BANNED, Batch, Rules, Strategy


def strategy(batch: Batch, options: Options, config: TransformerConfig, scored: bool) -> Strategy:
    """The search for these options: over the graph's candidates if they suffice, else over all logits."""
    xp: Any = NumpyArrays()
    arguments = xp, batch, options, config
    forced = any(len(row) for row in batch.prefix)
    needs_all = forced or options.reads_history or options.end_ids or options.suppressed_first
    if options.beam > 1:  # its log p must be normalised over all tokens, suppressed tokens included
        return Beam(*arguments) if needs_all or options.suppressed else BeamOfCandidates(*arguments)
    return Greedy(*arguments, scored) if needs_all or scored or options.sample else NextToken(*arguments)


class InGraph:
    """A search whose candidates come from the graph; `decoder.bans` tells the graph which tokens to avoid."""

    width: int
    rules: Rules
    options: Options

    def start(self, model: Any, sources: Sources) -> tuple[Any, Any]:
        bans = self.rules.early_bans if self.options.min_new_tokens else self.rules.bans
        self.decoder, candidates = model.start(sources, ("candidate_scores", "candidate_tokens"), self.width, bans)
        return self.decoder, candidates

    def allow_end(self, t: int) -> None:
        """Stop banning the end token if token t + 1 may be the end, by `min_new_tokens`."""
        if t + 1 == self.options.min_new_tokens:
            self.decoder.bans[:] = self.rules.bans


class NextToken(InGraph, Greedy):
    """Greedy search with the argmax in the graph. It has no scores, only sums of logits that show if all are finite."""

    def __init__(self, xp: Arrays, batch: Batch, options: Options, config: TransformerConfig):
        super().__init__(xp, batch, options, config, scored=False)
        self.first_limit = int(batch.limits.min())
        self.some_done = False

    def choose(self, logits: Any, t: int) -> tuple[NDArray, None]:
        """Choose the next tokens. `logits`: the pair (sums of the logits (B, 1), likeliest tokens (B, 1))."""
        sums, tokens = logits
        self.allow_end(t)
        self.total += sums[:, 0]
        token = tokens[:, 0].copy()
        if (forced := self.rules.unscored(t, self.limits)) is not None:
            token = np.where(forced >= 0, forced, token)
        if self.some_done:
            token[self.done] = self.config.pad_id
        self.history.append(token)
        # With a small model every array operation between two steps counts, and most steps end no sentence.
        if t + 1 >= self.first_limit or self.config.eos_id in token.tolist():
            self.done = self.done | (token == self.config.eos_id) | (self.limits <= t + 1)
            self.some_done = True
        return token, None


class BeamOfCandidates(InGraph, Beam):
    """Beam search with the 2K best extensions found in the graph."""

    def __init__(self, xp: Arrays, batch: Batch, options: Options, config: TransformerConfig):
        super().__init__(xp, batch, options, config)
        self.first_limit = int(batch.limits.min())
        self.some_finished = False
        """Whether a hypothesis of any sentence has ended."""
        self.first_row = np.arange(len(batch.limits))[:, None] * options.beam

    def choose(self, logits: Any, t: int) -> tuple[NDArray, NDArray]:
        chosen = super().choose(logits, t)
        self.decoder.extend_from(self.live)
        self.allow_end(t)
        return chosen

    def keep(self, live: NDArray) -> None:
        super().keep(live)
        self.decoder.extend_from(self.live)

    def candidates(self, logits: Any, t: int) -> tuple[NDArray, NDArray, NDArray]:
        """The best extensions: (log p, parent, token), each (B, 2K).

        `logits`: the pair (log p, best first; hypothesis * V + token).
        """
        values, (parent, token) = logits[0].copy(), np.divmod(logits[1], self.config.vocab_size)
        if (missing := 2 * self.width - values.shape[1]) > 0:
            values = np.concatenate([values, np.full((len(values), missing), 2 * BANNED, np.float32)], axis=1)
            token, parent = (np.pad(x, ((0, 0), (0, missing))) for x in (token, parent))
        return values, parent, token

    def advance(self, values: NDArray, parent: NDArray, token: NDArray, t: int) -> tuple[NDArray, NDArray]:
        k, eos = self.width, token == self.config.eos_id
        if t + 1 >= self.first_limit or eos[:, :k].any():
            self.some_finished = True
            return super().advance(values, parent, token, t)
        # No sentence finishes in this step, and the candidates are sorted already.
        if eos.any():
            going = np.argsort(eos, axis=1, kind="stable")
            values, token, parent = (np.take_along_axis(x, going, axis=1) for x in (values, token, parent))
        self.live, token, parent = values[:, :k], token[:, :k], parent[:, :k]
        self.tokens.append(token)
        self.parents.append(parent)
        if self.some_finished:
            self.done = self.done | self._decided(t + 1)
        return token.reshape(-1), (parent + self.first_row[: len(parent)]).reshape(-1)
