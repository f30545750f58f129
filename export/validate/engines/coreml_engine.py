"""Packages of fixed shape (target `coreml`) on whatever runs ONNX files: padded and split as `OnnxTransformer` does it.

The decoder takes one token a run, so each pass over a target is a cached one already. Inputs are no longer than the
graphs (`positions`).

Shapes: R rows, B rows of the graphs, L tokens of a row, D width of a tap, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.interface import DECODER_COREML, ENCODER_COREML
from export.targets.coreml.runtime import CoreMLEncoder, CoreMLModel, CoreMLSession, unpadded
from export.targets.session import Session
from export.validate.cases import Case
from export.validate.findings import PLAIN
from export.validate.points import tap_names

from .onnx_engine import NoCachedPath, OnnxEngine

Array = NDArray
Graphs = CoreMLEncoder | CoreMLModel


def fixed(engine_class: type[OnnxEngine]) -> type[OnnxEngine]:
    """A subclass of this engine class for packages of fixed shape."""
    return type(f"CoreML{engine_class.__name__}", (CoreMLEngine, engine_class), {})


class CoreMLEngine(NoCachedPath, OnnxEngine):
    """How an engine runs sessions of fixed shape; `fixed` combines it with a class that opens them."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.positions = self.config.max_positions
        self.graphs = self._over(self.sessions)
        self.tapped = self._over(self._tapping(*self.files))
        observed = {name for session in self._tapped.values() for name in session.taps}  # type: ignore[attr-defined]
        names = tap_names(self.config)[:-1]
        self.memory = next((name for name in reversed(names) if name.startswith("encoder.")), "")
        self.missing_taps = tuple(name for name in names if name not in observed | {self.memory})

    def logits(self, case: Case) -> Array:
        return _logits(self.graphs, case)

    def taps(self, case: Case) -> dict[str, Array]:
        """Taps in the places of the case's tokens, zeros elsewhere. The encoder's last tap is its output."""
        self._observed = {}
        taps = {"logits": _logits(self.tapped, case)}
        rows = len(case.ids)
        for name, values in self._observed.items():
            if name == "logits":
                continue
            decoder = name.startswith("decoder.")
            graph = self._session(DECODER_COREML if decoder else ENCODER_COREML)
            portions = -(-rows // graph.rows)
            runs = [np.concatenate(values[i : i + portions])[:rows] for i in range(0, len(values), portions)]
            joined = np.concatenate(runs, axis=1)
            taps[name] = joined if case.target_ids is not None and decoder else _placed(joined, case.source_real)
        if self.memory:
            taps[self.memory] = self.graphs.encode(case.inputs, case.source_real)
        return taps

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        """For rows without padding, or with padding on the right."""
        taps = {name: value for name, value in self.taps(case).items() if name in names}
        inside = [name for name in names if name.endswith(".weights")]
        self._observed = {}
        _logits(self._over({graph: self._showing(graph, inside) for graph in self.files}), case)
        rows, source = case.ids.shape
        target = source if case.target_ids is None else case.target_ids.shape[1]
        for name, values in self._observed.items():
            encoder = name.startswith("encoder.")
            graph = self._session(ENCODER_COREML if encoder else DECODER_COREML)
            portions = -(-rows // graph.rows)
            runs = [np.concatenate(values[i : i + portions])[:rows] for i in range(0, len(values), portions)]
            keys = source if encoder or "cross_attention" in name else target
            taps[name] = np.concatenate(runs, axis=2)[:, :, : source if encoder else target, :keys]
        return taps

    def attention(self, case: Case) -> dict[str, Array]:
        """As who runs the folder gets it: of the sources' tokens in their places, step by step."""
        assert isinstance(self.graphs, CoreMLModel)
        assert case.target_ids is not None
        return {PLAIN: self.graphs.attention(case.inputs, case.source_real, case.target_ids)}

    def _model(self, instead: Mapping[str, Session] | None = None, only: Sequence[str] | None = None) -> Any:
        return self.graphs

    def _over(self, sessions: Mapping[str, Session]) -> Graphs:
        make: Callable[..., Graphs] = CoreMLModel if self.config.has_decoder else CoreMLEncoder
        return make(self.folder.request, sessions)

    def _session(self, graph: str) -> CoreMLSession:
        return CoreMLSession(self.sessions[graph], graph, self.folder.request)


def _logits(graphs: Graphs, case: Case) -> Array:
    """Logits (R, L, V) of each target's tokens, or of each row's where there are no targets."""
    if isinstance(graphs, CoreMLEncoder):
        return graphs.logits(case.inputs, case.source_real)
    sources = unpadded(graphs.config, case.inputs, case.source_real)
    decoder = graphs.begin(sources)
    if case.target_ids is None:
        return _placed(np.stack(graphs.read(decoder, list(sources)), axis=1), case.source_real)
    return np.stack([decoder.step(column) for column in case.target_ids.T], axis=1)


def _placed(values: Array, real: NDArray[np.bool_]) -> Array:
    """Values of rows that begin with their tokens, moved to where `real` (R, L) has the tokens; zeros elsewhere."""
    placed = np.zeros((*real.shape, values.shape[-1]), np.float32)
    for i, is_token in enumerate(real):
        placed[i, is_token] = values[i, : is_token.sum()]
    return placed
