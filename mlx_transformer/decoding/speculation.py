"""Speculative decoding: guess the next tokens, read all guesses in one step, and keep those that are right.

A search asks for logits token by token and chooses by its own rules. `Speculating` reads a token together with guesses
of the following tokens. As long as the search chooses the guesses, it returns the logits already computed; at the first
other choice it removes the wrong guesses from the cache. So each choice sees the same logits as without guesses, up to
rounding, whatever the rules. Random draws depend only on seed, row and place.

Guesses come from the text so far (prompt lookup: Saxena 2023), or from a smaller model with the same vocabulary
(Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from mlx_transformer.core.inputs import SOURCE_IDS, Sources
from mlx_transformer.core.positions import borders
from mlx_transformer.system.errors import UserError

from .arrays import Array, Arrays
from .options import Options
from .steps import BANNED, Batch, Decoder, Model, PromptDecoder, Rewinding, banned_ids, common

Guess = Callable[[list[int], int], list[int]]
"""(text, most) -> at most `most` tokens that may follow it."""

NGRAMS = (3, 2)
"""Lengths of the n-grams to look up, the longest first."""


class Lookup:
    """Prompt lookup: finds an earlier occurrence of the text's last n-gram, and guesses that it continues the same way.

    >>> Lookup()([7, 8, 9, 5, 7, 8], 3)
    [9, 5, 7]
    """

    def __init__(self) -> None:
        self.behind: dict[tuple[int, ...], int] = {}
        """{n-gram: the place after its last occurrence before the text's end}"""
        self.known = 0

    def __call__(self, text: list[int], most: int) -> list[int]:
        for end in range(self.known, len(text)):
            self.behind |= {tuple(text[end - n : end]): end for n in NGRAMS if end >= n}
        self.known = len(text)
        place = next((p for n in NGRAMS if (p := self.behind.get(tuple(text[-n:]))) is not None), None)
        if place is None:
            return []
        guesses: list[int] = []
        for at in range(place, place + most):  # the occurrence may run into the guesses themselves
            guesses.append(text[at] if at < len(text) else guesses[at - len(text)])
        return guesses


class Draft:
    """Guesses a smaller model's greedy continuation."""

    def __init__(self, model: Model):
        self.model, self.xp = model, model.arrays
        bans = np.zeros(model.config.vocab_size, np.float32)
        bans[[*banned_ids(model.config), model.config.eos_id]] = BANNED  # nothing follows an end token
        self.bans = self.xp.asarray(bans)
        self.decoder: Rewinding | None = None
        self.read: list[int] = []
        """The tokens in the decoder's cache."""

    def __call__(self, text: list[int], most: int) -> list[int]:
        config = self.model.config
        if not self.model.extends_positions:
            most = min(most, config.max_positions - len(text))
        if most < 1:
            return []
        if self.decoder is None:
            decoder, logits = self.model.start(Sources(config, {SOURCE_IDS.name: [np.array(text)]}))
            self.decoder = cast(Rewinding, decoder)
        else:
            same = common(self.read, text)
            if same < len(self.read):
                self.decoder.take_back(len(self.read) - same)
            logits = self.decoder.read_each(self._row(text[same:]))[:, -1]
        self.read, guesses = list(text), []
        while True:
            likeliest = self.xp.argmax(self.xp.float32(logits) + self.bans, axis=1)
            guesses.append(int(self.xp.numpy(likeliest)[0]))
            if len(guesses) == most:
                return guesses
            logits = self.decoder.read_each(self._row(guesses[-1:]))[:, -1]
            self.read.append(guesses[-1])

    def _row(self, ids: list[int]) -> Array:
        return self.xp.asarray(np.array([ids], np.int32))


class Speculating(Decoder):
    """Decodes a text, with several tokens per step if guesses are right."""

    def __init__(self, xp: Arrays, decoder: Rewinding, guess: Guess, text: list[int], most: int, limit: int):
        """text: the tokens read so far. most: guesses of a step. limit: most tokens still to be read."""
        self.xp, self.decoder, self.guess, self.text, self.most, self.left = xp, decoder, guess, text, most, limit
        self.guesses: list[int] = []
        self.logits: Array = None
        """Logits (1, G + 1, V) after the last chosen token, and after each of G guesses."""
        self.right = 0
        """Guesses chosen so far."""

    def step(self, ids: Array) -> Array:
        token = int(self.xp.numpy(ids)[0])
        self.text.append(token)
        self.left -= 1
        if self.right < len(self.guesses) and self.guesses[self.right] == token:
            self.right += 1
            return self.logits[:, self.right]
        if wrong := len(self.guesses) - self.right:
            self.decoder.take_back(wrong)
        most = min(self.most, self.left)
        self.guesses, self.right = (self.guess(self.text, most) if most > 0 else []), 0
        self.logits = self.decoder.read_each(self.xp.asarray(np.array([[token, *self.guesses]], np.int32)))
        return self.logits[:, 0]

    def extend(self, ids: Array) -> Array | None:
        """Read a further part of the prompt (1, L); see `steps.PromptDecoder`."""
        self.text += self.xp.numpy(ids)[0].tolist()
        return cast(PromptDecoder, self.decoder).extend(ids)

    def repeat(self, times: int) -> None:
        self.decoder.repeat(times)

    def reorder(self, rows: Array) -> None:
        self.decoder.reorder(rows)

    def keep(self, rows: Array) -> None:
        self.decoder.keep(rows)


class Speculated(Model):
    """A `steps.Model` that decodes a single text speculatively."""

    def __init__(self, model: Model, batch: Batch, options: Options):
        self.model, self.most, self.limit = model, options.speculate, int(batch.limits[0])
        self.config, self.arrays, self.extends_positions = model.config, model.arrays, model.extends_positions
        self.own_lengths = model.own_lengths

    def start(self, sources: Sources) -> tuple[Decoder, Array]:
        decoder, logits = self.model.start(sources)
        return self._speculating(decoder, next(iter(sources)).tolist(), self.limit - 1), logits

    def reader(self) -> Any:
        decoder = self.model.reader()
        return None if decoder is None else self._speculating(decoder, [], self.limit)

    def _speculating(self, decoder: Any, text: list[int], limit: int) -> Speculating:
        guess = Lookup() if self.model.draft is None else Draft(self.model.draft)
        return Speculating(self.arrays, decoder, guess, text, self.most, limit)


def check_speculation(model: Model, options: Options, narrowed: bool) -> None:
    """Raise `UserError` if this search can't speculate. narrowed: whether outputs have candidates."""
    reasons = [_lack(model)]
    if narrowed:
        reasons.append("can't be used with candidates")
    if options.beam > 1:
        reasons.append("can't be used with a beam")
    if model.draft is not None and (lack := _lack(model.draft)):
        reasons.append(f"has a draft model that {lack}")
    elif model.draft is not None and model.draft.config.vocab_size != model.config.vocab_size:
        sizes = model.draft.config.vocab_size, model.config.vocab_size
        reasons.append("has a draft model with another vocabulary: {} tokens, not {}".format(*sizes))
    for reason in filter(None, reasons):
        raise UserError("{speculate} {}; leave it out", reason, speculate=options.speculate)


def _lack(model: Model) -> str | None:
    """The reason why a model can't check guesses, or guess; None if it can."""
    if model.config.has_encoder:
        return "is for decoder-only models, and this model has an encoder"
    if borders(model.config):
        return "can't be used with longrope, whose long texts are read again"
    return None if model.takes_back else "needs a graph that reads several tokens per step, as in an exported folder"
