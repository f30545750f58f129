"""Graphs that have been built already: each is built once, and copied for whoever asks for it again.

One package is built several times before it is written: for each precision, and for the measurements of int8 before
that. A copy takes a sixth of the time. Weights are no part of it: they are filled into the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import onnx_ir as ir

from export.nn.marks import ROWS_OF

KEPT = 20_000
"""The nodes of the graphs that are kept, those asked for last: some 100 MB. A graph of six layers has a few hundred."""
_BUILT: dict[Hashable, tuple[ir.Model, int]] = {}
"""Graphs with the numbers of their nodes, what was asked for last at the end."""


def built_once(key: Hashable, build: Callable[[], ir.Model]) -> ir.Model:
    """Return what `build` makes, a copy that is the caller's own; `key` tells one graph from every other."""
    entry = _BUILT.pop(key, None)
    if entry is None:
        model = build()
        entry = model, sum(1 for _ in model.graph.all_nodes())
    _BUILT[key] = entry
    while len(_BUILT) > 1 and sum(nodes for _, nodes in list(_BUILT.values())) > KEPT:
        _BUILT.pop(next(iter(_BUILT)), None)
    return _copied(entry[0])


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
