"""Graphs that have been built already: each is built once, and copied for whoever asks for it again.

One package is built several times before it is written: for each precision, and for the measurements of int8 before
that. A copy takes a sixth of the time. Weights are no part of it: they are filled into the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import onnx_ir as ir

from export.nn.marks import ROWS_OF

KEPT = 24
"""The number of graphs that are kept, those asked for last; a package has up to four."""
_BUILT: dict[Hashable, ir.Model] = {}


def built_once(key: Hashable, build: Callable[[], ir.Model]) -> ir.Model:
    """Return what `build` makes, a copy that is the caller's own; `key` tells one graph from every other."""
    model = _BUILT.pop(key, None)
    if model is None:
        model = build()
    _BUILT[key] = model
    while len(_BUILT) > KEPT:
        _BUILT.pop(next(iter(_BUILT)), None)
    return _copied(model)


def forget() -> None:
    """Let the next graph be built anew: what builds it has been changed."""
    _BUILT.clear()


def _copied(model: ir.Model) -> ir.Model:
    copy = model.clone()
    for value in _values(copy):
        if ROWS_OF in value.meta:
            parameter = value.meta[ROWS_OF]  # which stays the same where another graph holds it
            value.meta[ROWS_OF] = copy.graph.initializers.get(str(parameter.name), parameter)
    return copy


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from graph.inputs
        for node in graph:
            yield from node.outputs
