"""The settings of a search that are inputs of its graph, and the defaults that a file has; see `options.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

from mlx_transformer.generation.options import ID_FIELDS, PENALTY_OFFSETS, Options


class Setting(NamedTuple):
    """A setting of a search that is an input of its graph, with the default that the file has."""

    dtype: str
    default: Any
    axes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    """The shape of the default; each of its axes may be longer in a run."""


_USUAL = Options()
KINDS = {
    "int64": ("beam", "n_best", "min_new_tokens", "top_k", "seed", "no_repeat_ngram"),
    "float32": ("length_penalty", "temperature", "top_p", "repetition_penalty", "max_length_factor"),
    "bool": ("early_stopping", "sample", "heuristic_stop", "forced_end"),
}
SETTINGS = {
    **{name: Setting(dtype, getattr(_USUAL, name)) for dtype, names in KINDS.items() for name in names},
    **{name: Setting("int64", getattr(_USUAL, name), (name,), (0,)) for name in ID_FIELDS},
    "start_id": Setting("int64", -1),
    "max_new_tokens": Setting("int64", 0, ("max_new_tokens",), (1,)),
    "penalty_offset": Setting("float32", PENALTY_OFFSETS[_USUAL.penalty_form]),
    "rows": Setting("int64", -1, ("rows",), (1,)),
    "prefix": Setting("int64", -1, ("prefixes", "prefix"), (1, 0)),
    "candidates": Setting("int64", -1, ("candidate_rows", "candidates"), (1, 0)),
    "banned_sequences": Setting("int64", -1, ("banned_sequences", "banned_length"), (0, 1)),
}
"""Their meaning is in `search/options.py`."""
TEXT_SETTINGS = {name: Setting("int64", 0, (name,), (0,)) for name in ("source_prefix", "source_suffix")}
"""More of a graph that takes text: ids before and behind those of each line, such as its language's."""
