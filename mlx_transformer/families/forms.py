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
    """A count of heads that share d_model, which is read before."""

    def read(self, given: Given, fields: Values) -> list[str]:
        if problems := super().read(given, fields):
            return problems
        heads, width = fields[str(self.ours)], fields.get("d_model")
        if isinstance(width, int) and heads > 0 and width % heads:
            return [f"d_model={width} is not a multiple of {self.theirs}={heads}"]
        return []


@dataclass(frozen=True)
class Twin(Key):
    """A size that they have for each stack and we once: equal to that of `first`, which is read before."""

    first: str = ""

    def read(self, given: Given, fields: Values) -> list[str]:
        own: Values = {}
        if problems := super().read(given, own):
            return problems
        size, other = own[str(self.ours)], fields.get(str(self.ours))
        return [] if other in (None, size) else [f"{self.first}={other} and {self.theirs}={size} are not equal"]


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
