"""A language model small enough to enumerate: next-token scores are a table looked up by a hash of all tokens so far.

It runs on any `Arrays`, so the same search can be followed on NumPy and on MLX; its rows' states are moved by `repeat`,
`reorder` and `keep` exactly as a cache is, and a wrong move changes the tokens.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.arrays import NumpyArrays
from mlx_transformer.decoding.steps import Model

STATES = 997


def advance(state, ids):
    return (state * 31 + ids * 7 + 1) % STATES


class Toy(Model):
    def __init__(self, vocab_size=8, seed=0, eos_bias=0.0, arrays=None, spread=2.0, **config):
        sizes = dict(encoder_layers=1, decoder_layers=1, d_model=8, heads=1, d_ff=8, max_positions=64)
        self.config = TransformerConfig(vocab_size=vocab_size, **{**sizes, **config})
        self.arrays = arrays or NumpyArrays()
        self.extends_positions = False
        table = np.random.default_rng(seed).normal(scale=spread, size=(STATES, vocab_size))
        table[:, self.config.eos_id] += eos_bias
        self.table = table.astype(np.float32)
        self.device_table = self.arrays.asarray(self.table)
        self.joins = not self.config.has_encoder
        self.steps, self.batches, self.read = 0, [], 0

    def first_state(self, row):
        state = 0
        for id in row:
            state = advance(state, int(id))
        return state

    def start(self, rows):
        self.batches.append(len(rows))
        self.read += sum(map(len, rows))
        states = np.array([self.first_state(row) for row in rows], np.int32)
        texts = [[int(id) for id in row] for row in rows] if self.joins else None
        decoder = ToyDecoder(self, self.arrays.asarray(states), texts)
        return decoder, decoder.logits()

    def log_probabilities(self, row, tokens):
        """log p of every next token after `tokens`, float64."""
        state = self.first_state(row)
        for id in tokens:
            state = advance(state, id)
        x = self.table[state].astype(np.float64)
        return x - np.log(np.exp(x - x.max()).sum()) - x.max()


class ToyDecoder:
    def __init__(self, toy, states, texts=None):
        """texts: of a decoder-only model, what each row has read."""
        self.toy, self.xp, self.states, self.width, self.texts = toy, toy.arrays, states, 1, texts

    def logits(self):
        return self.xp.take(self.toy.device_table, self.states, axis=0)

    def step(self, ids):
        assert ids.shape == self.states.shape
        self.toy.steps += 1
        return self._after(ids)

    def _after(self, ids):
        self.states = advance(self.states, ids)
        if self.texts is not None:
            self.texts = [[*text, id] for text, id in zip(self.texts, self.xp.numpy(ids).tolist(), strict=True)]
        return self.logits()

    def extend(self, ids):
        self.toy.read += int(np.prod(ids.shape))
        return [self._after(ids[:, i]) for i in range(ids.shape[1])][-1]

    def join(self, other):
        self.states = self.xp.concatenate([self.states, other.states], axis=0)
        self.texts += other.texts

    def part(self, row, length, of):
        assert len(self.texts[row]) == of
        text = self.texts[row][:length]
        return ToyDecoder(self.toy, self.xp.asarray(np.array([self.toy.first_state(text)], np.int32)), text and [text])

    def shrink(self, lengths):
        assert [len(text) for text in self.texts] == [*lengths]

    def repeat(self, times):
        self.width *= times
        self.keep(self.xp.asarray(np.repeat(np.arange(self.states.shape[0]), times).astype(np.int32)))

    def reorder(self, rows):
        host = self.xp.numpy(rows)
        assert (host // self.width == np.arange(len(host)) // self.width).all(), "a row left its sentence"
        self.keep(rows)

    def keep(self, rows):
        self.states = self.xp.take(self.states, rows, axis=0)
        if self.texts is not None:
            self.texts = [[*self.texts[i]] for i in self.xp.numpy(rows).tolist()]


def penalty(length, alpha, form="gnmt"):
    """Wu et al. 2016, equation 14; length: a power of it alone."""
    return (5 + length) ** alpha / (5 + 1) ** alpha if form == "gnmt" else length**alpha


def allowed_tokens(toy, step, min_new, prefix):
    c = toy.config
    if step < len(prefix):
        return [prefix[step]]
    banned = {c.pad_id, c.bos_id} | ({c.eos_id} if step < min_new else set())
    return [id for id in range(c.vocab_size) if id not in banned]


def exhaustive(toy, row, limit, alpha, min_new=0, prefix=(), form="gnmt"):
    """Every possible output (ids, score), best first: all endings by eos, and all of `limit` tokens without it."""
    eos, outputs = toy.config.eos_id, []
    normal = [id for id in range(toy.config.vocab_size) if id not in {eos, toy.config.pad_id, toy.config.bos_id}]
    for length in range(1, limit + 1):
        for body in itertools.product(normal, repeat=length - 1):
            for last in [*normal, eos] if length == limit else [eos]:
                ids = [*body, last]
                if any(id not in allowed_tokens(toy, t, min_new, prefix) for t, id in enumerate(ids)):
                    continue
                total = sum(toy.log_probabilities(row, ids[:t])[id] for t, id in enumerate(ids))
                outputs.append((ids[:-1] if last == eos else ids, total / penalty(length, alpha, form)))
    return sorted(outputs, key=lambda pair: -pair[1])


def plain_beam(toy, row, k, limit, alpha, min_new=0, prefix=(), early=False, form="gnmt"):
    """Beam search of one sentence in lists: the rules of `decoding/beam.py`, written down a second time."""
    eos, live, finished = toy.config.eos_id, [(0.0, [])], []
    for t in range(limit):
        candidates = []
        for total, ids in live:
            logp = toy.log_probabilities(row, ids)
            candidates += [(total + logp[id], [*ids, id]) for id in allowed_tokens(toy, t, min_new, prefix)]
        candidates.sort(key=lambda pair: -pair[0])
        for total, ids in candidates[:k]:
            if ids[-1] == eos or t + 1 == limit:
                finished.append((total / penalty(t + 1, alpha, form), ids))
        finished = sorted(finished, key=lambda pair: -pair[0])[:k]
        live = [pair for pair in candidates if pair[1][-1] != eos][:k]
        if t + 1 == limit or not live:
            break
        if len(finished) == k:
            reach = max(total / penalty(n, alpha, form) for total, _ in live for n in range(t + 2, limit + 1))
            if early or finished[-1][0] >= reach:
                break
    return [(ids[:-1] if ids[-1] == eos else ids, score) for score, ids in finished]


def close(hypotheses, expected):
    """Same ids in the same order, scores to float32."""
    assert [h.ids for h in hypotheses] == [ids for ids, _ in expected]
    for h, (_, score) in zip(hypotheses, expected, strict=True):
        assert math.isclose(h.score, score, rel_tol=1e-4, abs_tol=1e-4)
