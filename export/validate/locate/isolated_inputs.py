"""The reference's values before every operation of one pass, and what each operation makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case, reference_logits, reference_memory, reference_started, reference_step
from export.validate.reference import Cache, Reference, Tap
from export.validate.reference.layers import Past
from mlx_transformer.core.config import TransformerConfig

Array = NDArray


@dataclass(frozen=True)
class IsolatedInputs:
    """One pass of the reference: the values at its points, which operations get as inputs, and what they make of them.

    `inputs`: {point: the reference's value, rounded to float32}. `truth64`, `truth32`: {point: what the operation
    before it makes of the inputs}, in float64 and in float32.
    """

    case: Case
    part: slice | None
    """The decoder's positions of this pass; None for a full pass without a cache."""
    before: Cache | None
    """The reference's cache before the pass, rounded to float32."""
    earlier: tuple[Mapping[str, Array], ...]
    """The inputs of the passes before it, for a runtime that has to fill its own cache."""
    memory: Array | None
    """The encoder's output (B,S,D), where both stacks exist."""
    inputs: Mapping[str, Array]
    truth64: Mapping[str, Array]
    truth32: Mapping[str, Array]


def isolated_inputs(
    config: TransformerConfig, weights: Mapping[str, Array], case: Case, part: slice | None
) -> IsolatedInputs:
    truth64 = Reference(config, weights, inner_points=True)
    truth32 = Reference(config, weights, np.float32, inner_points=True)
    inputs: dict[str, Array] = {}
    earlier: list[Mapping[str, Array]] = []
    before = None
    if part is not None:
        before = reference_started(truth64, case)
        source = dict(_source_points(before))
        for one in case.passes():
            if one.start == part.start:
                break
            earlier_inputs = dict(source)
            before = reference_step(truth64, case, one, before, _rounded_into(earlier_inputs))[1]
            earlier.append(earlier_inputs)
        before = _rounded(before)
        inputs |= source

    def run(reference: Reference, tap: Tap) -> None:
        if before is None or part is None:
            reference_logits(reference, case, tap)
        else:
            reference_step(reference, case, part, before, tap)

    run(truth64, _rounded_into(inputs))
    truths: list[dict[str, Array]] = []
    for reference in (truth64, truth32):
        made: dict[str, Array] = {}
        truths.append(made)

        def put_in(name: str, value: Array, made: dict[str, Array] = made, dtype: Any = reference.dtype) -> Array:
            made[name] = value
            return inputs[name].astype(dtype)

        run(reference, put_in)
    memory = reference_memory(truth64, case).astype(np.float32) if case.target_ids is not None else None
    return IsolatedInputs(case, part, before, tuple(earlier), memory, inputs, *truths)


def _rounded_into(values: dict[str, Array]) -> Tap:
    return lambda name, value: values.__setitem__(name, value.astype(np.float32))


def _rounded(cache: Cache) -> Cache:
    def rounded(past: Past | None) -> Any:
        return past and tuple(x.astype(np.float32) for x in past)

    own, cross = (tuple(map(rounded, pair)) for pair in (cache.self_attention, cache.cross))
    return replace(cache, self_attention=own, cross=cross)


def _source_points(cache: Cache) -> Iterator[tuple[str, Array]]:
    """Yield the keys and values of the source, which every pass is given and none makes."""
    for i, pair in enumerate(_rounded(cache).cross):
        if pair is not None:
            yield f"decoder.layers.{i}.cross_attention.keys", pair[0]
            yield f"decoder.layers.{i}.cross_attention.values", pair[1]
