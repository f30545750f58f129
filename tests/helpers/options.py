"""What a `TransformerConfig` may be, read off its fields: every matrix of models in the tests is made of this.

An option is a field with few values, a Literal or a bool; all others are sizes, ids and rates.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import field_types

Values = dict[str, Any]
"""Fields of a config."""
Factors = dict[str, list[Values]]
"""Values of a factor are sets of fields, so that what belongs together (sizes that go with a shape) stays together."""
Choice = tuple[int, ...]
"""Of each factor, which value."""


def options_of(of: type) -> dict[str, tuple[Any, ...]]:
    """{field: its values}"""
    return {name: (*kind.choices, *[None] * kind.optional) for name, kind in field_types(of).items() if kind.choices}


OPTIONS = options_of(TransformerConfig)


def fitted(values: Mapping[str, Any]) -> Values:
    """The same, with what the architecture leaves: no layers of a stack that isn't there, no tie to its embedding, no
    choice of the decoder's."""
    fitting = {"tie_embeddings": "all", **values}
    architecture, tie = fitting.get("architecture"), fitting["tie_embeddings"]
    if architecture == "encoder":
        fitting |= dict(decoder_layers=0, tie_embeddings="none" if tie == "none" else "all")
    if architecture == "decoder":
        fitting |= dict(encoder_layers=0, tie_embeddings="none" if tie == "none" else "target-output")
    if architecture not in ("encoder", "decoder"):
        fitting.pop("score_cap", None)
    else:
        fitting.pop("decoder", None)
        fitting.pop("decoder_self_attention", None)
    if fitting.get("first_norm") is False:  # of an encoder alone, with norms in front
        fitting |= {"norm_placement": "pre"} if architecture == "encoder" else {"first_norm": True}
    if architecture != "encoder" and fitting.get("causal"):
        fitting["causal"] = False
    if fitting.get("norm") == "rmsnorm" and fitting.get("norm_bias") is False:
        fitting["norm_bias"] = True
    if architecture in ("encoder", "decoder") or tie in ("source-target", "all"):
        fitting.pop("source_vocab_size", None)
    return fitting


def completed(named: Mapping[str, Values], of: type = TransformerConfig) -> dict[str, Values]:
    """`named`, and one more for each value of an option that none of them has, so named."""
    defaults = {field.name: field.default for field in dataclasses.fields(of)}
    choices = dict(named)
    for name, values in options_of(of).items():
        held = {chosen.get(name, defaults[name]) for chosen in named.values()}
        choices |= {
            f"{name}={value}": {name: value} for value in values if name != "architecture" and value not in held
        }
    return choices


def factors_of(by_hand: Factors, of: type = TransformerConfig) -> Factors:
    """`by_hand`, of the fields that are no option or go together with others; and all other options."""
    held = {name for values in by_hand.values() for chosen in values for name in chosen}
    return by_hand | {
        name: [{name: value} for value in values] for name, values in options_of(of).items() if name not in held
    }


def merged(factors: Factors, choice: Choice) -> Values:
    return {name: x for values, i in zip(factors.values(), choice, strict=True) for name, x in values[i].items()}


def covering(factors: Factors, accepted: Callable[[Values], bool], seed: int = 0, draws: int = 6000) -> list[Choice]:
    """Accepted choices in which every pair of values that some accepted choice has occurs at least once (greedily)."""
    rng = random.Random(seed)
    counts = [len(values) for values in factors.values()]
    drawn = (tuple(map(rng.randrange, counts)) for _ in range(draws))
    pool = np.array([choice for choice in drawn if accepted(merged(factors, choice))])
    pairs = np.stack(list(_pairs(pool, counts)), axis=1)
    missing = np.zeros(pairs.max() + 1, bool)
    missing[pairs] = True
    chosen = []
    while missing.any():
        best = int(missing[pairs].sum(axis=1).argmax())
        missing[pairs[best]] = False
        chosen.append(tuple(pool[best].tolist()))
    return chosen


def _pairs(pool: np.ndarray, counts: list[int]) -> Iterator[np.ndarray]:
    """For every two factors, a number for the values that each choice has of them, another one for each pair."""
    start = 0
    for first in range(len(counts)):
        for second in range(first):
            yield start + pool[:, first] * counts[second] + pool[:, second]
            start += counts[first] * counts[second]


@st.composite
def options(draw: st.DrawFn) -> Values:
    """A value of every option."""
    return {name: draw(st.sampled_from(values)) for name, values in OPTIONS.items()}


def drawn(values: Mapping[str, Any]) -> TransformerConfig:
    """Within a strategy: the config of drawn values, drawn again if they make no sense together."""
    try:
        return TransformerConfig(**fitted(values))
    except UserError:
        reject()
