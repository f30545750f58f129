"""Marks and numbers in a graph by which those who change or judge it later know what the network meant.

Nothing here imports onnxscript: who judges a graph, as `validate` does, builds none.
"""

from __future__ import annotations

from enum import Enum

import onnx_ir as ir

HIDDEN = -1e9
"""Added to the scores of what a query may not see (`masks.py`)."""


class Role(Enum):
    """The role of a matrix in the network: lower precisions treat each of them in its own way."""

    WEIGHT = "multiplied with activations"
    UNBOUNDED = "the same, and results may be beyond float16's range"
    CLASSIFIER = "multiplied with the last activations"
    EMBEDDING = "rows looked up by tokens, and in a classifier that is tied to it multiplied too"
    LOOKED_UP = "rows that an encoder alone looks up by tokens, and no classifier multiplies with"
    ADDED = "rows or numbers looked up by positions or kinds of tokens: few, added to what has a meaning already"


ROLE, FULL_PRECISION = "role", "full precision"
"""Keys of `meta`: a parameter's Role, and a node's mark that it stays float32 in any precision."""
ROWS_OF, IS_BIAS = "rows of", "is a bias"
"""Keys of `meta` (`rows.py`): of some rows of a classifier, the parameter (V, D) that they are of; and of what is added
to its product."""


def extent(x: ir.Value, axis: int) -> int:
    """Return the extent of one fixed axis, known while building."""
    length = None if x.shape is None else x.shape[axis]
    if not isinstance(length, int):
        raise ValueError(f"{x.name}: axis {axis} of shape {x.shape} is not fixed")
    return length
