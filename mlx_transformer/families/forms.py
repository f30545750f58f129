"""Keys of config.json with rules of their own, and words that several families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .keys import Given, Key, Values

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
ACTIVATIONS |= {"swish": "silu", "gelu_new": "gelu_tanh"}
"""{their word: ours}; of several for one of ours the first is written."""


def their_activation(ours: str) -> str:
    """The word of `transformers` for an activation of ours."""
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


@dataclass(frozen=True)
class Heads(Key):
    """A count of heads that share d_model, which is read before; so are the encoder's."""

    def read(self, given: Given, fields: Values) -> list[str]:
        if problems := super().read(given, fields):
            return problems
        heads, width = fields[str(self.ours)], fields.get("d_model")
        said = self.ours != "heads" and heads == fields.get("heads")
        if isinstance(width, int) and heads > 0 and width % heads and not said:
            return [f"d_model={width} is not a multiple of {self.theirs}={heads}"]
        return []


@dataclass(frozen=True)
class TargetVocabulary(Key):
    """The size of the decoder's vocabulary, read after which embeddings are shared: one that both share has one size.

    Written equal to the encoder's: version 4 of transformers makes both embeddings of one size.
    """

    def read(self, given: Given, fields: Values) -> list[str]:
        if problems := super().read(given, fields):
            return problems
        size, own = fields.get("source_vocab_size"), fields["vocab_size"]
        if fields.get("tie_embeddings") in ("all", "source-target") and own != size:
            return [f"{self.theirs}={own!r:.60} is not vocab_size={size!r:.60}, but both share"]
        return []

    def write(self, config: Any) -> Values:
        return {str(self.theirs): config.source_vocab_size}
