"""The inputs of a model, for every runtime: rows of any lengths, checked once, taken apart and padded.

`INPUTS` lists all that a first stack can read of one row. Shapes: B rows, S their padded length, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError

from .config import TransformerConfig

Ids = Sequence[Sequence[int]]
Vectors = Sequence[Any]
"""For each input an array (S, D), or lists of its numbers."""
Rows = TypeVar("Rows", bound=Sequence[Any])


class Input(NamedTuple):
    """One input of a model's first stack. `name`: the argument of `Transformer.encode`, and the value of a graph's port
    (`export/interface.py`); `argument`: as a search takes it; `published`: what graphs and published models call it;
    `size`: how many ids there are, or the width of vectors; 0 in a model that doesn't read it.
    """

    name: str
    argument: str
    published: str
    size: Callable[[TransformerConfig], int]
    vectors: bool = False
    fill: Callable[[TransformerConfig], int] = lambda config: 0
    """The value on padding."""

    def check(self, rows: Any, config: TransformerConfig, what: str) -> list[NDArray]:
        """Return the rows as arrays. `UserError` for what doesn't fit the model; what: the ids' name in its message."""
        if not self.size(config):
            raise UserError(f"{self.argument}: the model reads none; leave them out")
        if self.vectors:
            return check_vectors(rows, self.size(config), self.argument)
        return check_ids(rows, self.size(config), what if self.argument == "ids" else self.argument)


SOURCE_IDS = Input(
    "source_ids",
    "ids",
    "input_ids",
    lambda c: c.source_vocab_size if c.has_encoder else c.vocab_size,
    fill=lambda c: c.pad_id,
)
VECTORS = Input("inputs_embeds", "inputs_embeds", "inputs_embeds", lambda c: c.d_model, vectors=True)
TOKEN_TYPES = Input("token_types", "token_types", "token_type_ids", lambda c: c.token_types)
INPUTS = {entry.name: entry for entry in (SOURCE_IDS, VECTORS, TOKEN_TYPES)}
"""By name: ids, vectors in their place, and what goes with either."""
MASK = "attention_mask"
"""The name that graphs and published models have for the mask of their input."""


def companions(config: TransformerConfig) -> list[Input]:
    """Return what such a model reads besides ids, or vectors, and their mask."""
    return [entry for entry in INPUTS.values() if entry not in (SOURCE_IDS, VECTORS) and entry.size(config)]


class Sources:
    """Rows of any lengths, checked. `rows`: by input, an array for each row, (S,) or (S, D). `start`: the token that a
    decoder begins with."""

    def __init__(self, config: TransformerConfig, rows: Mapping[str, list[NDArray]], start: int | None = None):
        """start: in place of the model's own."""
        self.config, self.rows = config, dict(rows)
        self.start = config.bos_id if start is None else start
        self.lengths = np.array([len(row) for row in self._first], np.int64)

    @classmethod
    def of(cls, config: TransformerConfig, what: str = "source", **arrays: Any) -> Sources:
        """Check what a caller gives, by argument: ids=rows, or inputs_embeds=rows in their place.

        `UserError` names the row and the position of what doesn't fit the model. what: the ids' name in its messages.
        """
        entries = {name: entry for name, entry in INPUTS.items() if arrays.get(entry.argument) is not None}
        if SOURCE_IDS.name in entries and VECTORS.name in entries:
            raise UserError("ids and inputs_embeds: give one of them; the vectors stand in place of the ids")
        if VECTORS.name in entries and not config.has_encoder:
            raise UserError("inputs_embeds: a decoder alone goes on from ids; an encoder takes vectors in their place")
        if not entries.keys() & {SOURCE_IDS.name, VECTORS.name}:
            raise UserError(f"{what}: expected a list of lists of ids, or vectors in their place as inputs_embeds")
        rows = {name: entry.check(arrays[entry.argument], config, what) for name, entry in entries.items()}
        lengths = [len(row) for row in next(iter(rows.values()))]
        for entry in companions(config):
            own = rows.setdefault(entry.name, [np.zeros(length, np.int64) for length in lengths])
            if [len(row) for row in own] != lengths:
                raise UserError(f"{entry.argument}: give one for each position of each row")
        return cls(config, rows)

    @property
    def _first(self) -> list[NDArray]:
        return next(iter(self.rows.values()))

    def __len__(self) -> int:
        return len(self._first)

    def __iter__(self) -> Iterator[NDArray]:
        """Return the rows of ids, or of vectors."""
        return iter(self._first)

    def __getitem__(self, index: slice | NDArray) -> Sources:
        """These rows, in this order."""
        numbers = np.arange(len(self))[index]
        return Sources(self.config, {name: [rows[i] for i in numbers] for name, rows in self.rows.items()}, self.start)

    def padded(
        self, multiple: int = 1, most: int | None = None, left: bool = False
    ) -> tuple[dict[str, NDArray], NDArray[np.int64]]:
        """Return each input as one array (B, S) or (B, S, D), by name, and the mask (B, S), 1 on tokens.

        S: the longest row, rounded up to a multiple, but to no more than `most` if that is enough. left: the padding
        stands before the rows.
        """
        longest = int(self.lengths.max(initial=0))
        rounded = -(-longest // multiple) * multiple
        length = max(longest, rounded if most is None else min(rounded, most))
        spans = [slice(length - count, length) if left else slice(count) for count in self.lengths.tolist()]
        arrays = {name: self._array(name, rows, length, spans) for name, rows in self.rows.items()}
        mask = np.zeros((len(self), length), np.int64)
        for row, span in zip(mask, spans, strict=True):
            row[span] = 1
        return arrays, mask

    def _array(self, name: str, rows: list[NDArray], length: int, spans: list[slice]) -> NDArray:
        array = np.empty((len(rows), length, *rows[0].shape[1:]), rows[0].dtype)
        array.fill(INPUTS[name].fill(self.config))
        for own, row, span in zip(array, rows, spans, strict=True):
            own[span] = row
        return array

    def stacked(self) -> dict[str, NDArray]:
        """Return each input as one array. `UserError` for rows of several lengths, and of more than the model takes."""
        check_equally_long(list(self), self.config, "ids")
        return {name: np.stack(rows) for name, rows in self.rows.items()}


def check_equally_long(rows: Sequence[NDArray], config: TransformerConfig, what: str) -> None:
    """Raise `UserError` unless the rows are of one length that the model takes."""
    if len({len(row) for row in rows}) != 1:
        raise UserError(f"{what}: rows have different lengths; pad them and pass a mask")
    if len(rows[0]) > config.max_positions:
        raise UserError(f"{what}: {len(rows[0])} tokens, the model takes at most {config.max_positions}")


def check_vectors(vectors: Vectors, width: int, what: str = "inputs_embeds") -> list[NDArray]:
    """Return the rows as float32 arrays (S, `width`); `UserError` names the first row that is none."""
    rows = []
    for i, row in enumerate(listed(vectors, what, "vectors")):
        try:
            array = np.asarray(row)
        except ValueError:  # vectors of unequal length within it
            array = np.zeros((0, 0))
        if array.ndim != 2 or array.shape[1] != width or not len(array):
            raise UserError(
                f"{what} row {i}: expected (length, {width}), a vector of d_model={width} numbers for each position,"
                f" found shape {array.shape}"
            )
        if array.dtype.kind not in "fiu":
            raise UserError(f"{what} row {i}: expected numbers, found {array.dtype}")
        rows.append(array.astype(np.float32))
    return rows


def check_ids(ids: Ids, vocab_size: int, what: str = "source", empty: bool = False) -> list[NDArray]:
    """Return the rows as int64 arrays; `UserError` names the row and position of the first id outside
    0..vocab_size-1."""
    rows = []
    for i, row in enumerate(listed(ids, what)):
        try:
            array = np.asarray(row)
        except ValueError:  # lists of unequal length within it
            array = np.zeros((0, 0))
        if array.ndim != 1:
            raise UserError(f"{what} row {i}: expected a list of ids, found an array of shape {array.shape}")
        if array.size == 0:
            if not empty:
                raise UserError(f"{what} row {i} is empty: it must hold at least one id (eos)")
            array = array.astype(np.int64)
        if array.dtype.kind not in "iu" and all(type(id) is int for id in row):  # beyond 64 bits
            array = np.array([min(max(id, -1), vocab_size) for id in row])
        if array.dtype.kind not in "iu":
            raise UserError(f"{what} row {i}: ids must be whole numbers, found {array.dtype}")
        if array.size and (array.min() < 0 or array.max() >= vocab_size):
            bad = np.flatnonzero((array < 0) | (array >= vocab_size))[0]
            id = row[bad] if -(2**63) <= row[bad] < 2**64 else "of more than 64 bits"
            raise UserError(
                f"{what} row {i}, position {bad}: id {id} is outside the vocabulary (0 to {vocab_size - 1})"
            )
        rows.append(array.astype(np.int64))
    return rows


def listed(rows: Rows, what: str, kind: str = "ids") -> Rows:
    """Return the rows. `UserError` for what is no list of rows."""
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence | np.ndarray):
        raise UserError(f"{what}: expected a list of lists of {kind}, found {type(rows).__name__}")
    return rows
