"""Recipes: initializers that are made from a checkpoint's parameters while the weights are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from numpy.typing import NDArray

RECIPE = "recipe"
"""In an initializer's `meta`: (Recipe, which of its results)."""

ROWS = "rows"
"""In an initializer's `meta`: (parameter or table, slice of its first axis), where it is no more than that."""


@dataclass(frozen=True)
class Recipe:
    """How initializers that aren't parameters of the checkpoint are made from such: `make(*arrays) -> arrays`.

    Evaluated while the weights are written, so that no more than one recipe's arrays are in memory. `key`: the same for
    all initializers of one evaluation.
    """

    parameters: tuple[str, ...]
    make: Callable[..., Sequence[NDArray]]
    key: str


def recipe_value(name: str, recipe: Recipe, index: int, shape: Sequence[int], dtype: ir.DataType) -> ir.Value:
    """Result `index` of a recipe as an initializer. Types that NumPy lacks come from the recipe as their bytes."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    value.meta[RECIPE] = recipe, index
    return value


def then(weight: ir.Value, make: Callable[[NDArray], Sequence[NDArray]], kind: str) -> Recipe:
    """The recipe that makes further arrays from one initializer, be it a parameter or made itself."""
    key = f"{weight.name}|{kind}"
    if RECIPE not in weight.meta:
        return Recipe((str(weight.name),), make, key)
    before, index = weight.meta[RECIPE]
    return Recipe(before.parameters, lambda *arrays: make(before.make(*arrays)[index]), key)
