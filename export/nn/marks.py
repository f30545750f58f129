"""Marks on the nodes and values of a graph, for the passes and checks that read it later, e.g. the role of a matrix.

Nothing here imports onnxscript: `validate` judges graphs without building any.
"""

from __future__ import annotations

from enum import Enum

import onnx_ir as ir

HIDDEN = -1e9
"""Added to the scores of keys that a query may not see (`masks.py`)."""


class Role(Enum):
    """The role of a matrix in the network; each lower precision treats the roles differently."""

    WEIGHT = "multiplied with activations"
    UNBOUNDED = "multiplied with activations, with results that may exceed float16's range"
    CLASSIFIER = "multiplied with the last activations"
    EMBEDDING = "rows looked up by tokens, and multiplied too if a classifier is tied to it"
    LOOKED_UP = "rows looked up by tokens in an encoder-only model, and never multiplied"
    ADDED = "few rows or numbers, looked up by positions or token types and added to embeddings or scores"


ROLE, FULL_PRECISION = "role", "full precision"
"""Keys of `meta`: a parameter's Role; and marks a node that stays float32 in any precision."""
FEW_ROWS = "few rows"
"""Key of `meta`: marks a matrix that is multiplied only with the rows whose logits are asked for."""
ROWS_OF, IS_BIAS = "rows of", "is a bias"
"""Keys of `meta` (`rows.py`): for chosen rows of a classifier, their parameter (V, D); and marks the bias added to the
product with them."""


def extent(x: ir.Value, axis: int) -> int:
    """The length of an axis; ValueError if it isn't fixed while the graph is built."""
    length = None if x.shape is None else x.shape[axis]
    if not isinstance(length, int):
        raise ValueError(f"{x.name}: axis {axis} of shape {x.shape} is not fixed")
    return length
