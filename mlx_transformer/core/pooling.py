"""One vector of the vectors of a text's tokens. Sources: Devlin et al. 2019 (the first token's); Reimers and Gurevych
2019, "Sentence-BERT", section 3 (mean, maximum); Muennighoff 2022, "SGPT" (the weighted mean, the last token's).

D model. No import of NumPy: the choices are shown by the command line's help.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EMBEDDING, DENSE = "embedding.json", "embedding.safetensors"
"""The files of a folder that say how a text's vector is made (`text_embedding.py`), and hold the weights for it."""

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"]
"""The first token's row; the largest number of each column; the mean of all rows; their sum divided by the square root
of how many there are; their mean with weights 1, 2, 3, ... by their places; the last token's row."""
Kind = Literal["dense", "sparse", "multi"]
"""The kind of vector that is made of a text: one vector; a weight of each of its tokens; a vector of each of its
tokens."""


def pooled(rows: NDArray[np.float64], places: NDArray[np.intp], way: Pooling) -> NDArray[np.float64]:
    """Return a vector (D,) of the rows (tokens, D), which stand at `places` (tokens,); zeros of no rows."""
    count = len(rows)
    if not count:
        return rows.sum(axis=0)
    if way in ("cls", "last"):
        return rows[0] if way == "cls" else rows[-1]
    if way == "max":
        return rows.max(axis=0)
    if way == "weighted_mean":
        weights = places + 1.0
        return weights @ rows / weights.sum()
    return rows.sum(axis=0) / (count if way == "mean" else count**0.5)
