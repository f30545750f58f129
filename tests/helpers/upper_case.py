"""A model that needs no weights: it writes what it reads in capitals."""

from __future__ import annotations

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.options import Hypothesis
from mlx_transformer.generation.verbs import TextVerbs
from mlx_transformer.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["one two three. four five six! " * 3], vocab_size=280)


class UpperCase(TextVerbs):
    """Translates by upper-casing; its n-th best output has n exclamation marks. calls: the rows of each search."""

    tokenizer = TOKENIZER

    def __init__(self, max_positions=64, calls=None, **config):
        sizes = {"vocab_size": 280, "max_positions": max_positions, "d_model": 8, "heads": 1}
        self.config, self.calls = TransformerConfig(**{**sizes, **config}), [] if calls is None else calls

    def search(self, rows, n_best=1, **options):
        self.calls.append(rows)
        assert all(len(row) <= self.config.max_positions and row[-1] == 2 for row in rows)
        texts = [TOKENIZER.decode(row).upper() for row in rows]
        return [[Hypothesis(TOKENIZER.encode(t + "!" * n)[:-1], -1.0 - n) for n in range(n_best)] for t in texts]

    def generate(self, rows, **options):
        return [best[0].ids for best in self.search(rows, **options)]
