"""Packages of fixed shape (target `coreml`) on whatever runs ONNX files: padded and split as `OnnxTransformer` does it.

Inputs are no longer than the graphs.

Shapes: R rows, B rows of the graphs, L tokens of a row, D width of a tap, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.interface import DECODER_COREML, ENCODER_COREML
from export.runtime.transformer import graphs_of
from export.targets.coreml.runtime import CoreMLEncoder, CoreMLModel, CoreMLSession, placed, unpadded
from export.validate.cases import Case

from .onnx_engine import OnnxEngine
from .stepping import SteppingEngine

Array = NDArray
Graphs = CoreMLEncoder | CoreMLModel


def fixed(engine_class: type[OnnxEngine]) -> type[OnnxEngine]:
    """Return a subclass of this engine class for packages of fixed shape."""
    return type(f"CoreML{engine_class.__name__}", (CoreMLEngine, engine_class), {})


class CoreMLEngine(SteppingEngine):
    """How an engine runs sessions of fixed shape; `fixed` combines it with a class that opens them."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.capabilities = replace(self.capabilities, longest=self.config.max_positions)

    def _joined(self, name: str, runs: Sequence[Array], case: Case) -> Array:
        whole = self._whole_runs(name, runs, len(case.ids))
        if name == "head" and self.config.head.per_row:
            return whole[0]
        joined = np.concatenate(whole, axis=1)
        targets = case.target_ids is not None and name.startswith("decoder.")
        return joined if targets else placed(joined, case.source_real)

    def _whole_runs(self, name: str, values: Sequence[Array], rows: int) -> list[Array]:
        """Join the portions of each run, as a graph takes so many rows at once."""
        graph = self._session(ENCODER_COREML if name.startswith(("encoder.", "head")) else DECODER_COREML)
        portions = -(-rows // graph.rows)
        return [np.concatenate(values[i : i + portions])[:rows] for i in range(0, len(values), portions)]

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        """Return what `Engine` says, for rows without padding, or with padding on the right."""
        taps = {name: value for name, value in self.taps(case).items() if name in names}
        inside = [name for name in names if name.endswith(".weights")]
        self._observed = {}
        sessions = {graph: self._showing(graph, inside) for graph in self.files}
        self._logits_of(graphs_of(self.folder.request, sessions), case)
        rows, source = case.ids.shape
        target = source if case.target_ids is None else case.target_ids.shape[1]
        for name, values in self._observed.items():
            encoder, runs = name.startswith("encoder."), self._whole_runs(name, values, rows)
            keys = source if encoder or "cross_attention" in name else target
            taps[name] = np.concatenate(runs, axis=2)[:, :, : source if encoder else target, :keys]
        return taps

    def _session(self, graph: str) -> CoreMLSession:
        return CoreMLSession(self.sessions[graph], graph, self.folder.request)

    def _logits_of(self, graphs: Graphs, case: Case) -> Array:
        """Return logits (R, L, V) of each target's tokens, or of each row's where there are no targets."""
        if isinstance(graphs, CoreMLEncoder):
            return graphs.logits(case.inputs, case.source_real)
        sources = unpadded(graphs.config, case.inputs, case.source_real)
        decoder = graphs.begin(sources)
        if case.target_ids is None:
            return placed(np.stack(graphs.read(decoder, list(sources)), axis=1), case.source_real)
        return np.stack([decoder.step(column) for column in case.target_ids.T], axis=1)
