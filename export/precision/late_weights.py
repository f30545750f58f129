"""Late weights: initializers that are made from a checkpoint's parameters while the weights are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from numpy.typing import NDArray

LATE = "late"
"""A key of an initializer's `meta`: (LateWeight, the index of its result)."""


@dataclass(frozen=True)
class LateWeight:
    """Makes initializers from parameters of the checkpoint: `make(*arrays) -> arrays`.

    It runs while the weights are written, so that the arrays of only one are in memory. `key`: the same for all
    initializers that one run makes. elementwise: of one parameter, each of whose numbers becomes one by itself; some
    are made, and written, after others.
    """

    parameters: tuple[str, ...]
    make: Callable[..., Sequence[NDArray]]
    key: str
    elementwise: bool = False


def late_initializer(name: str, late: LateWeight, index: int, shape: Sequence[int], dtype: ir.DataType) -> ir.Value:
    """Return result `index` as an initializer. Types that NumPy lacks are made as their bytes."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    value.meta[LATE] = late, index
    return value


def derived(
    weight: ir.Value, make: Callable[[NDArray], Sequence[NDArray]], kind: str, elementwise: bool = False
) -> LateWeight:
    """Return what makes further arrays from one initializer, be it a parameter or a late weight itself."""
    key = f"{weight.name}|{kind}"
    if LATE not in weight.meta:
        return LateWeight((str(weight.name),), make, key, elementwise)
    before, index = weight.meta[LATE]
    return LateWeight(before.parameters, lambda *arrays: make(before.make(*arrays)[index]), key)
