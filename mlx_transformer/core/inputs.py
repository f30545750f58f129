"""Inputs of a model, for every runtime: check rows of any lengths once, select rows, and pad them to arrays.
Many texts of an encoder are split into forward passes of rows of one length (`Passes`).

`INPUTS` lists the inputs that a model's first stack can read. Shapes: B rows, S padded length, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlx_transformer.system.errors import UserError

from .config import TransformerConfig

Ids = Sequence[Sequence[int]]
Vectors = Sequence[Any]
"""For each row an array (S, D), or nested lists of its numbers."""
Rows = TypeVar("Rows", bound=Sequence[Any])


class Input(NamedTuple):
    """An input of a model's first stack.

    name: the argument of `Transformer.encode`, also used for ports of graphs (`export/interface.py`).
    argument: the argument of a search. published: the name in graphs and published models, e.g. "input_ids".
    size: number of ids, or width of vectors; 0 if the model doesn't have the input.
    """

    name: str
    argument: str
    published: str
    size: Callable[[TransformerConfig], int]
    vectors: bool = False
    fill: Callable[[TransformerConfig], int] = lambda config: 0
    """The value of padding."""

    def check(self, rows: Any, config: TransformerConfig, what: str) -> list[NDArray]:
        """Check rows and convert them to arrays, (S,) or (S, D) each. Raises `UserError` if they don't fit the model.

        what: the name of ids in its message, e.g. "source".
        """
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
"""{name: input}: ids, vectors in place of ids, and token types, which go with either."""
MASK = "attention_mask"
"""Name of the input's mask in graphs and published models."""


def companions(config: TransformerConfig) -> list[Input]:
    """The inputs that this model reads in addition to ids (or vectors) and their mask, e.g. token types."""
    return [entry for entry in INPUTS.values() if entry not in (SOURCE_IDS, VECTORS) and entry.size(config)]


class Sources:
    """Checked rows of any lengths. rows: {input: list of arrays (S,) or (S, D)}; start: the decoder's first token.

    >>> arrays, mask = Sources.of(config, ids=[[5, 17, 2], [8, 2]]).padded()
    >>> mask
    array([[1, 1, 1],
           [1, 1, 0]])
    """

    def __init__(self, config: TransformerConfig, rows: Mapping[str, list[NDArray]], start: int | None = None):
        """start: default `config.bos_id`."""
        self.config, self.rows = config, dict(rows)
        self.start = config.bos_id if start is None else start
        self.lengths = np.array([len(row) for row in self._first], np.int64)

    @classmethod
    def of(cls, config: TransformerConfig, what: str = "source", **arrays: Any) -> Sources:
        """Check the rows of each input, given by `Input.argument`: ids=rows, or inputs_embeds=rows in place of ids.

        Raises `UserError` with the row and position of the first value that doesn't fit the model. what: the name of
        ids in its message.
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
        """Iterate over the rows of ids, or of vectors."""
        return iter(self._first)

    def __getitem__(self, index: slice | NDArray) -> Sources:
        """Select rows, in the order of the index."""
        numbers = np.arange(len(self))[index]
        return Sources(self.config, {name: [rows[i] for i in numbers] for name, rows in self.rows.items()}, self.start)

    def padded(
        self, multiple: int = 1, most: int | None = None, left: bool = False
    ) -> tuple[dict[str, NDArray], NDArray[np.int64]]:
        """Pad the rows; returns {input: array (B, S) or (B, S, D)} and the mask (B, S), 1 on tokens, 0 on padding.

        S is the longest row, rounded up to a multiple of `multiple`. Rounding stops at `most`, e.g. the model's longest
        sequence. left: put the padding before the tokens.
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
        """Stack rows of equal length: {input: array (B, S) or (B, S, D)}.

        Raises `UserError` if lengths differ or exceed the model's `max_positions`.
        """
        check_equally_long(list(self), self.config, "ids")
        return {name: np.stack(rows) for name, rows in self.rows.items()}


def check_equally_long(rows: Sequence[NDArray], config: TransformerConfig, what: str) -> None:
    """Raise `UserError` unless all rows have the same length, at most `max_positions`."""
    if len({len(row) for row in rows}) != 1:
        raise UserError(f"{what}: rows have different lengths; pad them and pass a mask")
    if len(rows[0]) > config.max_positions:
        raise UserError(f"{what}: {len(rows[0])} tokens, the model takes at most {config.max_positions}")


def check_vectors(vectors: Vectors, width: int, what: str = "inputs_embeds") -> list[NDArray]:
    """Convert rows to float32 arrays (S, width). Raises `UserError` for the first row of another shape or type."""
    rows = []
    for i, row in enumerate(listed(vectors, what, "vectors")):
        try:
            array = np.asarray(row)
        except ValueError:  # vectors of unequal length
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
    """Convert rows to int64 arrays (S,). Raises `UserError` with row and position of the first id outside 0 to
    vocab_size - 1. empty: allow empty rows."""
    rows = []
    for i, row in enumerate(listed(ids, what)):
        try:
            array = np.asarray(row)
        except ValueError:  # nested lists of unequal length
            array = np.zeros((0, 0))
        if array.ndim != 1:
            raise UserError(f"{what} row {i}: expected a list of ids, found an array of shape {array.shape}")
        if array.size == 0:
            if not empty:
                raise UserError(f"{what} row {i} is empty: it must hold at least one id (eos)")
            array = array.astype(np.int64)
        if array.dtype.kind not in "iu" and all(type(id) is int for id in row):  # more than 64 bits
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
    """Return the rows unchanged. Raises `UserError` if they are no list or array."""
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence | np.ndarray):
        raise UserError(f"{what}: expected a list of lists of {kind}, found {type(rows).__name__}")
    return rows


T = TypeVar("T")
W = TypeVar("W")

BATCH_TOKENS = 4096
"""Tokens of a forward pass, padding included; a longer row has a pass to itself."""


class Passes:
    """Run passes one after the other. A runtime with threads to spare has its own subclass."""

    at_once = 1
    """How many passes run at the same time."""

    def in_parallel(self, compute: Callable[[W], T], work: Sequence[W]) -> Iterator[T]:
        """Call `compute` on each item of `work`; results may come in any order."""
        return map(compute, work)


ONE_AT_A_TIME = Passes()


def of_one_length(lengths: ArrayLike, tokens: int = BATCH_TOKENS) -> list[NDArray[np.intp]]:
    """Group rows by length: return lists of row indices, longest first, each with at most `tokens` tokens.

    >>> of_one_length([3, 5, 3])
    [array([1]), array([0, 2])]
    """
    counts = np.asarray(lengths, np.int64)
    order = np.argsort(-counts, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(counts[order])) + 1) if len(order) else []
    sizes = [max(1, tokens // int(counts[group[0]])) for group in groups]
    return [group[i : i + size] for group, size in zip(groups, sizes, strict=True) for i in range(0, len(group), size)]
