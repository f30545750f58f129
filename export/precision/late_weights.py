"""Late weights: initializers computed from a checkpoint's parameters while the weights are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from numpy.typing import NDArray

LATE = "late"
"""Key in an initializer's `meta`; the entry is (LateWeight, index of its result)."""


@dataclass(frozen=True)
class LateWeight:
    """Computes initializers from parameters of the checkpoint: `make(*arrays) -> arrays`.

    It runs while the weights are written, so only the arrays of a single call are in memory. `key`: the same for all
    initializers from a call of `make`. `elementwise`: `make` changes each number of a single parameter by itself. The
    parameter may then be computed and written in parts.
    """

    parameters: tuple[str, ...]
    make: Callable[..., Sequence[NDArray]]
    key: str
    elementwise: bool = False


def late_initializer(name: str, late: LateWeight, index: int, shape: Sequence[int], dtype: ir.DataType) -> ir.Value:
    """Result `index` of `late` as an initializer. For types NumPy lacks, e.g. INT4, `make` returns bytes."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    value.meta[LATE] = late, index
    return value


def derived(
    weight: ir.Value, make: Callable[[NDArray], Sequence[NDArray]], kind: str, elementwise: bool = False
) -> LateWeight:
    """A late weight computed by `make` from an initializer: a parameter, or a late weight itself."""
    key = f"{weight.name}|{kind}"
    if LATE not in weight.meta:
        return LateWeight((str(weight.name),), make, key, elementwise)
    before, index = weight.meta[LATE]
    return LateWeight(before.parameters, lambda *arrays: make(before.make(*arrays)[index]), key)
