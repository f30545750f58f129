"""Packages whose decoder takes one token a run, so that each pass over a target is a cached one already.

Operators that do several things at once leave values out: `missing_taps` names the taps that don't exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from export.runtime.transformer import graphs_of
from export.targets.session import Session
from export.validate.cases import Case
from export.validate.findings import PLAIN, tap_names

from .onnx_engine import OnnxEngine

Array = NDArray


class SteppingEngine(OnnxEngine):
    """The part of target cpu's engines that does not depend on how its graphs are run."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        tapped = self._tapping(*self.folder.graphs)
        request = self.folder.request
        self.graphs, self.tapped = graphs_of(request, self.sessions), graphs_of(request, tapped)
        names = tap_names(self.config)[:-1]
        self.memory = next((name for name in reversed(names) if name.startswith("encoder.")), "")
        observed = {self.memory}.union(*(session.taps for session in tapped.values()))
        missing = tuple(name for name in names if name not in observed)
        # Several operations are one node, and a tap names fewer points than the reference has.
        self.capabilities = replace(self.capabilities, missing_taps=missing, isolates=None)

    def logits(self, case: Case) -> Array:
        return self._logits_of(self.graphs, case)

    def taps(self, case: Case) -> dict[str, Array]:
        """Return what `Engine` says, in the places of the case's tokens. The encoder's last tap is its output."""
        self._observed = {}
        taps = {"logits": self._logits_of(self.tapped, case)}
        for name, runs in self._observed.items():
            if name != "logits":
                taps[name] = self._joined(name, runs, case)
        if self.memory:
            taps[self.memory] = self.graphs.encode(case.inputs, case.source_mask)
        return taps

    def _values_of(self, sessions: Mapping[str, Any], case: Case, way: Sequence[str]) -> dict[str, Array]:
        self._observed = {}
        self._logits_of(graphs_of(self.folder.request, {**self.sessions, **sessions}), case)
        side = {parameter: graph for graph in sessions for parameter in self._integers_of(graph)}
        return {
            name: self._joined("encoder." if side.get(name, name).startswith("encoder") else "decoder.", runs, case)
            for name, runs in self._observed.items()
            if name != "logits"
        }

    def attention(self, case: Case) -> dict[str, Array]:
        """Return the attention as who runs the folder gets it: of the sources' tokens in their places, step by step."""
        return {PLAIN: self.graphs.attention(case.inputs, case.source_mask, case.target_ids)}

    def _logits_of(self, graphs: Any, case: Case) -> Array:
        raise NotImplementedError

    def _joined(self, name: str, runs: Sequence[Array], case: Case) -> Array:
        """Join what all runs showed of a tap, (B, L, D)."""
        raise NotImplementedError

    def _model(self, instead: Mapping[str, Session] | None = None, only: Sequence[str] | None = None) -> Any:
        return self.graphs

    def _ways(self) -> dict[str, list[str]]:
        return {}
