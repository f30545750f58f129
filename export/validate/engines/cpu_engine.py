"""Engines for exports with target `cpu`. Their decoder reads a token per run, so every pass over a target is cached.

`CpuModel` runs the graphs as in a translation, and the same reference judges it. Fused operators leave out values, e.g.
a sub-layer's own output if its product adds the residual (`targets.cpu.network.use_gemm`); `missing_taps` lists such
taps.

Shapes: N tokens of all sources, B sentences, S source, T target tokens (a run each), D model, H heads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from export.interface import DECODER_CPU, ENCODER_CPU, LISTED_CPU, MODEL, ROWS_CPU
from export.runtime.transformer import graphs_of
from export.targets.cpu.runtime import CpuModel
from export.targets.session import Session
from export.validate.cases import Case, search_inputs
from export.validate.findings import PLAIN
from export.validate.points import tap_names
from export.validate.reference.layers import softmax
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.decoding.candidates import Candidates
from mlx_transformer.decoding.options import Options
from mlx_transformer.decoding.search import generate
from mlx_transformer.system.errors import UserError

from .onnx_engine import TappedSession, cached
from .onnxruntime_engine import OnnxRuntimeEngine

Array = NDArray
OPERATORS = {"self_attention": "DecoderMaskedMultiHeadAttention", "cross_attention": "MultiHeadAttention"}
SCORES = 3
"""Index of an operator's output with the masked and biased scores; optional, since ONNX Runtime 1.22."""


class CpuEngine(OnnxRuntimeEngine):
    """ONNX Runtime on the CPU with encoder_cpu and decoder_cpu."""

    def __init__(
        self, checkpoint: Checkpoint | None, onnx_folder: Path, device: str = "cpu", *options: Any, **named: Any
    ):
        if device != "cpu":
            raise UserError(f"{onnx_folder}: was exported for target cpu, onnxruntime:{device} can't run it")
        super().__init__(checkpoint, onnx_folder, device, *options, **named)
        tapped, request = self._tapping(*self.folder.graphs), self.folder.request
        pair = (self.sessions[ROWS_CPU], self.sessions[LISTED_CPU]) if self.folder.listed else None
        self.graphs = graphs_of(request, self.sessions, listed=lambda: pair)
        self.tapped = graphs_of(request, tapped)
        names = tap_names(self.config)[:-1]
        self.memory = next((name for name in reversed(names) if name.startswith("encoder.")), "")
        observed = {self.memory}.union(*(session.taps for session in tapped.values()))
        missing = tuple(name for name in names if name not in observed)
        # isolates=None: nodes combine several operations, so there are fewer points than in the reference.
        self.capabilities = replace(self.capabilities, missing_taps=missing, isolates=None, among=pair is not None)

    def logits(self, case: Case) -> Array:
        return self._logits_of(self.graphs, case)

    def taps(self, case: Case) -> dict[str, Array]:
        """See `Engine`. The encoder's tokens are put back to their places; its last tap is its output."""
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
        """See `Engine`. Computed step by step, as for users of the folder."""
        return {PLAIN: self.graphs.attention(case.inputs, case.source_mask, case.target_ids)}

    def _model(self, instead: Mapping[str, Session] | None = None, only: Sequence[str] | None = None) -> Any:
        return self.graphs

    def _ways(self) -> dict[str, list[str]]:
        return {}

    def _joined(self, name: str, runs: Sequence[Array], case: Case) -> Array:
        """Put the encoder's tokens (N, D) back to their places (B, S, D), 0 on padding; stack the decoder's runs."""
        if not name.startswith("encoder."):
            return np.stack(runs, axis=1)
        tap = np.zeros((*case.ids.shape, runs[0].shape[-1]), runs[0].dtype)
        tap[case.source_real] = runs[0]
        return tap

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        """See `Engine`. The decoder's attention weights are computed from its operators' scores."""
        inside = [name for name in names if name.endswith(".weights")]
        points = {}
        if len(inside) < len(names):
            points = {name: value for name, value in self.taps(case).items() if name in names}
        sessions = {ENCODER_CPU: self._showing(ENCODER_CPU, inside), DECODER_CPU: self._scoring(inside)}
        self._observed = {}
        self._logits_of(graphs_of(self.folder.request, sessions), case)
        for point, runs in self._observed.items():
            points[point] = runs[0] if point.startswith("encoder.") else weights_of(runs)
        return points

    def _scoring(self, points: Sequence[str]) -> TappedSession:
        """Open a copy of the decoder with its operators' scores as outputs, named like their weights."""
        if (key := (DECODER_CPU, *points)) not in self._tapped_sessions:
            model = onnx.load(self.files[DECODER_CPU], load_external_data=False)
            outputs = show_scores(model.graph, points)
            self._tapped_sessions[key] = TappedSession(
                self.open(self.files[DECODER_CPU], model), outputs, self._observe
            )
        return self._tapped_sessions[key]

    def search(
        self, sources: Sequence[list[int]], options: Options, candidates: Sequence[Sequence[int]] | None = None
    ) -> list[tuple[list[int], float]]:
        """See `Engine`. Greedy search uses `generate`, as the graph may choose the tokens itself; scores are then 0."""
        if options.beam == 1 and not options.sample:
            inputs = {**search_inputs(sources), "candidates": candidates, **vars(options)}
            rows = generate(self.graphs, **inputs)  # type: ignore[arg-type]
            return [(ids, 0.0) for ids in rows]
        return super().search(sources, options, candidates)

    def logits_among(self, case: Case, ids: Array) -> Array:
        assert case.target_ids is not None
        among = self.graphs.among(Candidates.whole(ids, None, self.config))
        decoder = self.graphs.decoder_of(among.step, case.inputs, case.source_mask, ["logits"], 1)
        places = np.searchsorted(ids, case.target_ids)
        return np.stack([decoder.step(column).copy() for column in places.T], axis=1)

    def _logits_of(self, graphs: CpuModel, case: Case) -> Array:
        assert case.target_ids is not None
        return graphs.logits(case.inputs, case.source_mask, case.target_ids)


class CpuEncoderEngine(CpuEngine):
    """ONNX Runtime on the CPU with an encoder without a decoder."""

    def _joined(self, name: str, runs: Sequence[Array], case: Case) -> Array:
        if self.config.head.per_row and not name.startswith("encoder."):
            return runs[0]
        return super()._joined(f"encoder.{name}", runs, case)

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        self._observed = {}
        self._logits_of(graphs_of(self.folder.request, {MODEL: self._showing(MODEL, names)}), case)
        of_rows = {name: not name.endswith(".weights") for name in self._observed}
        return {n: self._joined(n, runs, case) if of_rows[n] else runs[0] for n, runs in self._observed.items()}

    def _logits_of(self, graphs: Any, case: Case) -> Array:
        return graphs.logits(case.inputs, case.source_mask)


class CpuDecoderEngine(CpuEngine):
    """ONNX Runtime on the CPU with a decoder-only model: step_cpu, in int4 with prompt_cpu."""

    def cached_logits(self, case: Case) -> dict[str, Array]:
        return {"cached": cached(self.graphs, case), "side by side": self._side_by_side(case)}

    def cached_taps(self, case: Case) -> dict[str, dict[str, Array]]:
        passes: dict[str, list[Array]] = {}

        def step(ids: Array, cache: Any) -> Array:
            self._observed, real = {}, np.ones_like(ids) if len(cache.texts) else cache.mask
            logits = self.tapped.step(ids, cache)
            for name, runs in {**self._observed, "logits": [logits[real.astype(bool)]]}.items():
                passes.setdefault(name, []).append(_placed(real, runs))
            return logits

        cached(SimpleNamespace(begin=self.tapped.begin, step=step), case)
        return {"cached": {name: np.concatenate(parts, axis=1) for name, parts in passes.items()}}

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        return {name: value for name, value in self.taps(case).items() if name in names}

    def _side_by_side(self, case: Case) -> Array:
        """Logits of texts in a shared batch: each joins after two parts of its prompt, is continued token by token, and
        leaves. Positions of the prompts, for which the graphs give no logits, have those of a full pass.
        """
        logits, real = self.logits(case), case.source_mask.astype(bool)
        tokens = [row[there].tolist() for row, there in zip(case.ids, real, strict=True)]
        places = [np.flatnonzero(there) for there in real]
        waiting, running = deque(range(len(tokens))), list[int]()
        together = self.graphs.texts()
        while waiting or running:
            if waiting:
                running.append(row := waiting.popleft())
                begun, text = len(tokens[row]) // 2, self.graphs.texts()
                text.add(tokens[row][: begun // 3])
                text.read(tokens[row][begun // 3 : begun])
                together.join(text)
            at = together.lengths.tolist()
            steps = together.step([tokens[row][i] for row, i in zip(running, at, strict=True)])
            for row, i, values in zip(running, at, steps, strict=True):
                logits[row, places[row][i]] = values
            for k in reversed(range(len(running))):
                if together.lengths[k] == len(tokens[running[k]]):
                    together.leave(k)
                    running[k] = running[-1]
                    running.pop()
        return logits

    def _joined(self, name: str, runs: Sequence[Array], case: Case) -> Array:
        return _placed(case.source_mask, runs)

    def _logits_of(self, graphs: Any, case: Case) -> Array:
        return graphs.logits(case.inputs, case.source_mask)


def _placed(real: Array, runs: Sequence[Array]) -> Array:
    """Put rows (N, D) of several runs to the tokens' places, 1 in `real` (B, T): (B, T, D), 0 elsewhere."""
    placed = np.zeros((*real.shape, runs[0].shape[-1]), runs[0].dtype)
    placed[real.astype(bool)] = np.concatenate(runs)
    return placed


def show_scores(graph: onnx.GraphProto, points: Sequence[str]) -> list[str]:
    """Make attention operators' scores outputs of a graph, named by their points (NAME.weights); returns the names."""
    nodes = {(node.name.rpartition("/")[0], node.op_type): node for node in graph.node}
    names = []
    for point in points:
        module = point.removesuffix(".weights")
        scope = module.replace(".", "/").replace("layers/", "layers.")
        operator = OPERATORS[module.rpartition(".")[2]]
        if (node := nodes.get((scope, operator))) is None:
            continue
        node.output.extend([""] * (SCORES - len(node.output)) + [point])
        if operator == OPERATORS["self_attention"]:
            node.attribute.append(onnx.helper.make_attribute("output_qk", 1))
        graph.output.append(onnx.helper.make_tensor_value_info(point, onnx.TensorProto.FLOAT, None))
        names.append(point)
    return names


def weights_of(runs: Sequence[Array]) -> Array:
    """Compute the weights (B, H, T, S) from each run's scores (B, H, 1, S); self-attention gains a key per run."""
    scores = np.full((*runs[-1].shape[:2], len(runs), runs[-1].shape[-1]), -np.inf, np.float32)
    for t, run in enumerate(runs):
        scores[:, :, t, : run.shape[-1]] = run[:, :, 0]
    return softmax(scores)
