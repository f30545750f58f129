"""Packages of the target `cpu` as an engine: `CpuModel`, as it translates, held against the same reference.

A product that starts from the residual (`targets/cpu/gemm.py`) leaves no value of the sub-layer's own output.

The decoder's operators keep their attention weights to themselves; they are computed from what these read.

Shapes: N tokens of the sources, B sentences, S source, T target tokens decoded one a run, D model, V vocabulary,
H heads, d one head as the operators take it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from export.graph.protos import add_taps
from export.interface import CROSS_ATTENTION, DECODER_CPU, ENCODER_CPU
from export.targets.cpu.runtime import CpuModel
from export.validate.cases import Case, search_inputs
from export.validate.findings import PLAIN
from export.validate.locate.isolate_onnx import points_of
from export.validate.reference.layers import softmax
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.generation.search import generate
from mlx_transformer.system.errors import UserError

from .onnx_engine import TappedSession
from .onnxruntime_engine import OnnxRuntimeEngine
from .stepping import SteppingEngine

Array = NDArray
OPERATORS = {"self_attention": "DecoderMaskedMultiHeadAttention", "cross_attention": "MultiHeadAttention"}


@dataclass(frozen=True)
class Read:
    """What one operator reads, names of values: its queries, its new keys (or the source's) and, of relative
    positions, what is added to the scores."""

    queries: str
    keys: str
    added: str
    scale: float
    of_source: bool
    """The keys are the source's, an input of the graph."""

    @property
    def values(self) -> list[str]:
        """Those that the graph computes."""
        return [name for name in (self.queries, self.added, "" if self.of_source else self.keys) if name]


Attention = tuple[dict[str, TappedSession], dict[str, str], dict[str, Read]]
"""Sessions that show what weights are made of, the encoder's {point: value}, the decoder's {point: values}."""


class CpuEngine(SteppingEngine, OnnxRuntimeEngine):
    """ONNX Runtime on the CPU over encoder_cpu and decoder_cpu."""

    def __init__(
        self, checkpoint: Checkpoint | None, onnx_folder: Path, device: str = "cpu", *options: Any, **named: Any
    ):
        if device != "cpu":
            raise UserError(f"{onnx_folder}: was exported for target cpu, onnxruntime:{device} can't run it")
        super().__init__(checkpoint, onnx_folder, device, *options, **named)
        self._attending: dict[tuple[str, ...], Attention] = {}

    def _joined(self, name: str, runs: Sequence[Array], case: Case) -> Array:
        """Put rows of the encoder's tokens (N, D) back to their places (B, S, D), zeros on padding."""
        if not name.startswith("encoder."):
            return np.stack(runs, axis=1)
        tap = np.zeros((*case.ids.shape, runs[0].shape[-1]), runs[0].dtype)
        tap[case.source_real] = runs[0]
        return tap

    def _encode(self, case: Case) -> Array:
        return self.graphs.encode(case.inputs, case.source_real.astype(np.int64))

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        """As `Engine` says: the decoder's attention weights are computed from what its operators read."""
        inside = tuple(name for name in names if name.endswith(".weights"))
        points = {}
        if len(inside) < len(names):
            points = {name: value for name, value in self.taps(case).items() if name in names}
        if inside not in self._attending:
            self._attending[inside] = self._attention(inside)
        sessions, encoder_values, read = self._attending[inside]
        self._observed = {}
        self._logits_of(self._over(sessions), case)
        source = self.graphs.begin(case.inputs, case.source_real.astype(np.int64)).source
        cross = {self.graphs.inputs[value]: source[value] for value in self.graphs.cross}
        points |= {point: self._observed[value][0] for point, value in encoder_values.items()}
        return points | decoder_weights(read, self._observed, cross, self.config.of("decoder").heads, case.source_real)

    def attention(self, case: Case) -> dict[str, Array]:
        """As `Engine` says: each step's row, of the graph as it translates."""
        self._observed = {}
        decoder = TappedSession(self.sessions[DECODER_CPU], [CROSS_ATTENTION], self._observe)
        self._logits_of(self._over({**self.sessions, DECODER_CPU: decoder}), case)
        return {PLAIN: np.stack(self._observed[CROSS_ATTENTION], axis=1)}

    def _attention(self, inside: Sequence[str]) -> Attention:
        models = {graph: onnx.load(path, load_external_data=False) for graph, path in self.files.items()}
        encoder_values = points_of(models[ENCODER_CPU].graph, inside)
        read = values_read(models[DECODER_CPU].graph, inside)
        values = {
            ENCODER_CPU: list(encoder_values.values()),
            DECODER_CPU: sorted({v for r in read.values() for v in r.values}),
        }
        sessions = {}
        for graph, names in values.items():
            session = self.open(self.files[graph], add_taps(models[graph], names))
            sessions[graph] = TappedSession(session, names, self._observe)
        return sessions, encoder_values, read

    def search(
        self, sources: Sequence[list[int]], beam: int, max_new_tokens: int, sample: int | None = None
    ) -> list[tuple[list[int], float]]:
        """As `Engine` says. Greedy tokens are those of `generate`, where the graph chooses them; their score isn't
        known."""
        if beam == 1 and sample is None:
            rows = generate(self.graphs, max_new_tokens=max_new_tokens, **search_inputs(sources))  # type: ignore[arg-type]
            return [(ids, 0.0) for ids in rows]
        return super().search(sources, beam, max_new_tokens, sample)

    def _over(self, sessions: Mapping[str, Any]) -> CpuModel:
        return CpuModel(self.folder.request, sessions[ENCODER_CPU], sessions[DECODER_CPU])

    def _logits_of(self, graphs: CpuModel, case: Case) -> Array:
        assert case.target_ids is not None
        return graphs.logits(case.inputs, case.source_real.astype(np.int64), case.target_ids)


def values_read(graph: onnx.GraphProto, points: Sequence[str]) -> dict[str, Read]:
    """Return {point: what its operator reads} of those `points`, NAME.weights, that are of the decoder."""
    return dict(_read(graph, points))


def _read(graph: onnx.GraphProto, points: Sequence[str]) -> Iterator[tuple[str, Read]]:
    for point in points:
        module = point.rpartition(".")[0]
        scope = module.replace(".", "/").replace("layers/", "layers.")
        operator = OPERATORS[module.rpartition(".")[2]]
        nodes = [node for node in graph.node if node.name.startswith(f"{scope}/") and node.op_type == operator]
        for node in nodes[:1]:
            scale = next(attribute.f for attribute in node.attribute if attribute.name == "scale")
            added = node.input[4] if operator == OPERATORS["self_attention"] else ""
            of_source = node.input[1] in {value.name for value in graph.input}
            yield point, Read(node.input[0], node.input[1], added, scale, of_source)


def decoder_weights(
    read: Mapping[str, Read],
    observed: Mapping[str, Sequence[Array]],
    cross: Mapping[str, Array],
    heads: int,
    real: NDArray[np.bool_],
) -> dict[str, Array]:
    """Return {point: weights (B, H, T, T or S)}.

    observed: each value, run by run. cross: keys (B, H, S, d) and values of the source, by the names of the
    graph's inputs. real (B, S): True
    on its tokens.
    """
    weights = {}
    for point, each in read.items():
        q = _by_head(observed[each.queries], heads)
        if each.of_source:
            k = cross[each.keys]
            hidden = np.where(real, np.float32(0), np.float32(-np.inf))[:, None, None]
        else:
            k = _by_head(observed[each.keys], heads)
            length = q.shape[2]
            hidden = np.where(np.tri(length, dtype=bool), np.float32(0), np.float32(-np.inf))[None, None]
            if each.added:
                hidden = hidden + _added(observed[each.added], length)
        weights[point] = softmax(q @ k.swapaxes(-1, -2) * np.float32(each.scale) + hidden)
    return weights


def _by_head(runs: Sequence[Array], heads: int) -> Array:
    """Join the rows of all runs, (B, 1, H*d) or (1, B, H*d) each -> (B, H, T, d)."""
    return np.stack([run.reshape(-1, heads, run.shape[-1] // heads) for run in runs], axis=2)


def _added(runs: Sequence[Array], length: int) -> Array:
    """Join what is added to the scores of each run, (1, H, 1, t + 1) -> (1, H, T, T), 0 where no key is."""
    added = np.zeros((1, runs[0].shape[1], length, length), np.float32)
    for t, run in enumerate(runs):
        added[:, :, t, : t + 1] = run[:, :, 0]
    return added
