"""The facts that graphs of the target `coreml` and the code that runs them share: extents, names, what hides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

MOST_ROWS = 1024
HIDDEN = -3e4
"""Added to masked scores. Softmax gives them exactly 0, as with -1e9, and it is finite in float16 too."""


class FixedShape(NamedTuple):
    """Rows, source positions and target positions. An encoder alone has no target, a decoder alone no source: 0."""

    rows: int
    source: int
    target: int

    @classmethod
    def parse(cls, text: str, config: TransformerConfig) -> FixedShape:
        """Read "1x64x48" for an encoder-decoder, "1x64" for the others. `UserError` says what is expected."""
        both = config.architecture == "encoder-decoder"
        parts = text.lower().split("x")
        if len(parts) != 2 + both or not all(re.fullmatch("0*[1-9][0-9]{0,8}", part) for part in parts):
            raise UserError(f"fixed shape {text[:60]!r}: give {cls.expected(config)}")
        rows, length, *target = map(int, parts)
        if rows > MOST_ROWS:
            raise UserError(f"fixed shape {text!r}: {rows} rows, at most {MOST_ROWS} can be computed together")
        longest = max([length, *target])
        if longest > config.max_positions:
            raise UserError(f"fixed shape {text!r}: the model has {config.max_positions} positions, not {longest}")
        if both:
            return cls(rows, length, target[0])
        return cls(rows, length, 0) if config.has_encoder else cls(rows, 0, length)

    @staticmethod
    def expected(config: TransformerConfig) -> str:
        """Return the form of a fixed shape for such a model, for messages."""
        both = config.architecture == "encoder-decoder"
        return "ROWSxSOURCExTARGET, such as 1x64x64" if both else "ROWSxLENGTH, such as 1x64"

    @property
    def positions(self) -> int:
        """Longest sequence on either side."""
        return min(n for n in (self.source, self.target) if n)


def part_name(name: str, k: int) -> str:
    """Return the name of part k of a tensor that is split by rows (`rows.py`)."""
    return f"{name}.rows_{k}"


def part_of(name: str) -> tuple[str, int] | None:
    """Return (name of the tensor that was split, k), if `name` is that of a part; else None."""
    match = re.fullmatch(r"(.+)\.rows_(\d+)", name)
    return (match[1], int(match[2])) if match else None


def parts_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return {name of a tensor that was split: names of its parts, in order}."""
    grouped: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if (part := part_of(name)) is not None:
            grouped.setdefault(part[0], []).append((part[1], name))
    return {tensor: [name for _, name in sorted(parts)] for tensor, parts in grouped.items()}


def joined(tensors: Mapping[str, NDArray], axis: int) -> dict[str, NDArray]:
    """Return the same tensors, those that were split joined along `axis`."""
    split = parts_of(tensors)
    complete = {name: np.concatenate([tensors[part] for part in parts], axis) for name, parts in split.items()}
    return {name: tensor for name, tensor in tensors.items() if part_of(name) is None} | complete
