"""A translator whose model needs no weights: it writes what it reads in capitals."""

from __future__ import annotations

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.generation.options import Hypothesis
from mlx_transformer.generation.translate import Translator

TOKENIZER = Tokenizer.train(["one two three. four five six! " * 3], vocab_size=280)


def translator(max_positions=64, calls=None, **config):
    """Translates by upper-casing; its n-th best output has n exclamation marks."""

    def search(rows, n_best=1, **options):
        if calls is not None:
            calls.append(rows)
        assert all(len(row) <= max_positions and row[-1] == 2 for row in rows)
        texts = [TOKENIZER.decode(row).upper() for row in rows]
        return [[Hypothesis(TOKENIZER.encode(t + "!" * n)[:-1], -1.0 - n) for n in range(n_best)] for t in texts]

    sizes = {"vocab_size": 280, "max_positions": max_positions, "d_model": 8, "heads": 1}
    return Translator(TransformerConfig(**{**sizes, **config}), TOKENIZER, search)
