"""Packages of the target `cpu` as an engine: `CpuModel`, as it translates, held against the same reference.

The decoder takes one token a run, so each pass over a target is a cached one already. A product that starts from the
residual (`targets/cpu/gemm.py`) leaves no value of the sub-layer's own output: `missing_taps` names the taps that don't
exist.

Shapes: N tokens of the sources, B sentences, S source, T target, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from export.interface import CROSS_ATTENTION, DECODER_CPU, ENCODER_CPU
from export.targets.cpu.runtime import CpuModel
from export.targets.session import Session
from export.validate.cases import Case, search_inputs
from export.validate.findings import PLAIN
from export.validate.locate.isolate_onnx import points_of
from export.validate.points import tap_names
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.generation.search import generate
from mlx_transformer.system.errors import UserError

from .cpu_attention import Read, decoder_weights, values_read
from .onnx_engine import NoCachedPath
from .onnxruntime_engine import OnnxRuntimeEngine, ProfiledSession
from .taps import add_taps

Array = NDArray
Attention = tuple[dict[str, "TappedCpuSession"], dict[str, str], dict[str, Read]]
"""Sessions that show what weights are made of, the encoder's {point: value}, the decoder's {point: values}."""


class ProfiledCpuSession(ProfiledSession):
    """A profiled session with the further methods that `CpuModel` calls."""

    def run(self, output_names: Any, input_feed: Any, options: Any = None) -> list[Any]:
        outputs = self.session.run(output_names, input_feed, options)
        self.ran()
        return outputs

    def io_binding(self) -> Any:
        return self.session.io_binding()

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self.session.run_with_iobinding(binding, options)
        self.ran()


class TappedCpuSession:
    """A session of a tapped copy, used like a session of the untapped graph: each run hands the taps to `observe`."""

    def __init__(self, session: Any, taps: Sequence[str], observe: Callable[[str, Array], None]):
        self.session, self.taps, self.observe = session, list(taps), observe

    def get_inputs(self) -> list[Any]:
        return self.session.get_inputs()

    def get_outputs(self) -> list[Any]:
        return [entry for entry in self.session.get_outputs() if entry.name not in self.taps]

    def run(self, output_names: Sequence[str], input_feed: Any, options: Any) -> list[Any]:
        values = self.session.run([*output_names, *self.taps], input_feed, options)
        self._observe_all(values[len(output_names) :])
        return values[: len(output_names)]

    def io_binding(self) -> Any:
        binding = self.session.io_binding()
        self._bind(binding)
        return binding

    def _bind(self, binding: Any) -> None:
        for name in self.taps:
            binding.bind_output(name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self._bind(binding)  # again: what the run before left there may be shorter
        self.session.run_with_iobinding(binding, options)
        # The next run writes to the same memory.
        self._observe_all([value.numpy().copy() for value in binding.get_outputs()[: len(self.taps)]])

    def _observe_all(self, values: Sequence[Array]) -> None:
        for name, value in zip(self.taps, values, strict=True):
            self.observe(name, value)


class CpuEngine(NoCachedPath, OnnxRuntimeEngine):
    """ONNX Runtime on the CPU over encoder_cpu and decoder_cpu."""

    profiled = ProfiledCpuSession

    def __init__(
        self, checkpoint: Checkpoint | None, onnx_folder: Path, device: str = "cpu", *options: Any, **named: Any
    ):
        if device != "cpu":
            raise UserError(f"{onnx_folder}: was exported for target cpu, onnxruntime:{device} can't run it")
        super().__init__(checkpoint, onnx_folder, device, *options, **named)
        self._attending: dict[tuple[str, ...], Attention] = {}
        self.graphs = self._over(self.sessions)
        names = tap_names(self.config)[:-1]
        self._copies = {name: self._copy(name, names) for name in (ENCODER_CPU, DECODER_CPU)}
        observed = {tap for copy in self._copies.values() for tap in copy.taps}
        self.missing_taps = tuple(name for name in names if name not in observed)

    def logits(self, case: Case) -> Array:
        return self._logits(self.graphs, case)

    def taps(self, case: Case) -> dict[str, Array]:
        """Rows of tokens (N, D) are put back to their places (B, S, D), zeros on padding. The encoder's last tap is its
        output as `encode` gives it."""
        self._observed = {}
        taps = {"logits": self._logits(self._over(self._copies), case)}
        for name, values in self._observed.items():
            if name.startswith("encoder."):
                taps[name] = np.zeros((*case.ids.shape, values[0].shape[-1]), np.float32)
                taps[name][case.source_real] = values[0]
            else:
                taps[name] = np.stack(values, axis=1)
        memory = [name for name in tap_names(self.config) if name.startswith("encoder.")][-1]
        taps[memory] = self.graphs.encode(case.inputs, case.source_real.astype(np.int64))
        return taps

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        """The decoder's attention weights are computed from what its operators read."""
        inside = tuple(name for name in names if name.endswith(".weights"))
        points = {}
        if len(inside) < len(names):
            points = {name: value for name, value in self.taps(case).items() if name in names}
        if inside not in self._attending:
            self._attending[inside] = self._attention(inside)
        sessions, shown, read = self._attending[inside]
        self._observed = {}
        self._logits(self._over(sessions), case)
        source = self.graphs.begin(case.inputs, case.source_real.astype(np.int64)).source
        cross = {self.graphs.inputs[value]: source[value] for value in self.graphs.cross}
        points |= {point: self._observed[value][0] for point, value in shown.items()}
        return points | decoder_weights(read, self._observed, cross, self.config.of("decoder").heads, case.source_real)

    def attention(self, case: Case) -> dict[str, Array]:
        """Each step's row, of the graph as it translates."""
        self._observed = {}
        decoder = TappedCpuSession(self.sessions[DECODER_CPU], [CROSS_ATTENTION], self._observe)
        self._logits(self._over({**self.sessions, DECODER_CPU: decoder}), case)
        return {PLAIN: np.stack(self._observed[CROSS_ATTENTION], axis=1)}

    def _attention(self, inside: Sequence[str]) -> Attention:
        models = {graph: onnx.load(path, load_external_data=False) for graph, path in self.files.items()}
        shown = points_of(models[ENCODER_CPU].graph, inside)
        read = values_read(models[DECODER_CPU].graph, inside)
        values = {ENCODER_CPU: list(shown.values()), DECODER_CPU: sorted({v for r in read.values() for v in r.values})}
        sessions = {}
        for graph, names in values.items():
            session = self.open(self.files[graph], add_taps(models[graph], names))
            sessions[graph] = TappedCpuSession(session, names, self._observe)
        return sessions, shown, read

    def search(
        self, sources: Sequence[list[int]], beam: int, max_new_tokens: int, sample: int | None = None
    ) -> list[tuple[list[int], float]]:
        """Greedy tokens are those of `generate`, where the graph chooses them; their score isn't known."""
        if beam == 1 and sample is None:
            rows = generate(self.graphs, max_new_tokens=max_new_tokens, **search_inputs(sources))  # type: ignore[arg-type]
            return [(ids, 0.0) for ids in rows]
        return super().search(sources, beam, max_new_tokens, sample)

    def _model(self, instead: Mapping[str, Session] | None = None, only: Sequence[str] | None = None) -> Any:
        return self.graphs

    def _over(self, sessions: Any) -> CpuModel:
        return CpuModel(self.folder.request, sessions[ENCODER_CPU], sessions[DECODER_CPU])

    def _copy(self, graph: str, names: Sequence[str]) -> TappedCpuSession:
        model = onnx.load(self.files[graph], load_external_data=False)
        computed = {output for node in model.graph.node for output in node.output}
        taps = [name for name in names if name in computed]
        return TappedCpuSession(self.open(self.files[graph], add_taps(model, taps)), taps, self._observe)

    def _logits(self, graphs: CpuModel, case: Case) -> Array:
        assert case.target_ids is not None
        return graphs.logits(case.inputs, case.source_real.astype(np.int64), case.target_ids)
