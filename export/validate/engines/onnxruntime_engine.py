"""ONNX Runtime as an engine: the exported files, as they are, on one execution provider.

Taps come from copies of the exported graphs, made in memory: same nodes, same data files, inner values as further
outputs. So a mistake in a file shows in its taps; and because outputs keep an optimiser from fusing what lies around
them, the files are also run untouched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import numpy_helper

from export.folder import ALONE, ENCODER, FIRST, MERGED, OnnxFolder, open_folder
from export.graphs import add_taps
from export.runtime import open_session, session_options
from export.sessions import CausalGraphs, EncoderDecoderGraphs, EncoderGraphs, Graph
from export.validate.cases import Case, slices
from export.validate.points import tap_names
from mlx_transformer.generation.search import search
from mlx_transformer.spec.checkpoint import Checkpoint
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.parameters import parameter_shapes

from . import Unavailable

Array = NDArray

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "coreml": "CoreMLExecutionProvider"}
LEVELS = {
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
# Without these two running on another model is no comparison at all; the others show in tokens and lengths.
SHAPES = "architecture vocab_size source_vocab_size d_model encoder_layers decoder_layers".split()


class OnnxRuntimeEngine:
    """An exported folder. `device` names an execution provider, `optimisation` a level of graph optimisation."""

    name = "onnxruntime"
    precision = "float32"

    def __init__(
        self,
        checkpoint: Checkpoint,
        onnx_folder: Path,
        device: str = "cpu",
        optimisation: str = "all",
        threads: int | None = None,
    ):
        if optimisation not in LEVELS:
            raise UserError(f"optimisation {optimisation!r} is not one of {', '.join(LEVELS)}")
        self.device, self.optimisation, self.threads = device, optimisation, threads
        self.provider = PROVIDERS.get(device, device)
        if self.provider not in ort.get_available_providers():
            there = ", ".join(ort.get_available_providers())
            raise Unavailable(f"onnxruntime:{device}: {self.provider} is not available (there are: {there})")
        self.folder = open_folder(onnx_folder)
        self.config = self.folder.config
        _check_same_model(self.folder, checkpoint)
        self.files = _all_graphs(self.folder)
        self.sessions: dict[str, Any] = {name: self._open(path) for name, path in self.files.items()}
        self.tapped: dict[str, Graph] = {}

    def details(self) -> dict[str, str]:
        session = next(iter(self.sessions.values()))
        return {
            "onnxruntime": ort.__version__,
            "providers": ", ".join(session.get_providers()),
            "graph optimisation": self.optimisation,
            "threads": str(self.threads or "default"),
        }

    def parameters(self) -> Iterator[tuple[str, str, Array]]:
        """Initializers of every file that are parameters; tables and shape constants are not."""
        table = parameter_shapes(self.config)
        for path in self.files.values():
            for tensor in onnx.load(path, load_external_data=False).graph.initializer:
                if tensor.name in table:
                    yield path.name, tensor.name, numpy_helper.to_array(tensor, str(path.parent))

    def taps(self, case: Case) -> dict[str, Array]:
        ids, mask = case.ids, case.source_real.astype(np.int64)
        if self.config.architecture == "encoder":
            return self._tapped(ALONE, input_ids=ids, attention_mask=mask)
        if case.target_ids is None:
            positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
            return self._tapped(ALONE, input_ids=ids, attention_mask=mask, position_ids=positions)
        found = self._tapped(ENCODER, input_ids=ids, attention_mask=mask)
        memory = found.pop("last_hidden_state")
        feeds = {"input_ids": case.target_ids, "encoder_hidden_states": memory, "encoder_attention_mask": mask}
        first = FIRST if FIRST in self.files else MERGED
        return found | self._tapped(first, use_cache_branch=np.array([False]), **feeds)

    def logits(self, case: Case) -> Array:
        model, mask = self._model(), case.source_real.astype(np.int64)
        if isinstance(model, EncoderDecoderGraphs):
            assert case.target_ids is not None
            return model.decode(case.target_ids, model.encode(case.ids, mask), mask)
        return model.logits(case.ids, mask)

    def cached_logits(self, case: Case) -> dict[str, Array]:
        if self.config.architecture != "encoder-decoder":
            return {"cached": self._cached(self._model(), case)} if self.config.has_decoder else {}
        found = {}
        if FIRST in self.files:
            found["cached"] = self._cached(self._model(), case)
        if MERGED in self.files:
            found["cached, merged"] = self._cached(self._merged(), case)
        return found

    def search(self, sources: Sequence[list[int]], beam: int, max_new_tokens: int) -> list[tuple[list[int], float]]:
        found = search(self._model(), list(sources), beam=beam, max_new_tokens=max_new_tokens)  # type: ignore[arg-type]
        return [(hypotheses[0].ids, hypotheses[0].score) for hypotheses in found]

    def _model(self) -> EncoderDecoderGraphs | CausalGraphs | EncoderGraphs:
        kinds = {"encoder-decoder": EncoderDecoderGraphs, "decoder": CausalGraphs, "encoder": EncoderGraphs}
        return kinds[self.config.architecture](self.config, self.sessions)

    def _merged(self) -> EncoderDecoderGraphs:
        return EncoderDecoderGraphs(self.config, {name: self.sessions[name] for name in (ENCODER, MERGED)})

    def _cached(self, model: EncoderDecoderGraphs | CausalGraphs | EncoderGraphs, case: Case) -> Array:
        assert not isinstance(model, EncoderGraphs)
        if isinstance(model, EncoderDecoderGraphs):
            assert case.target_ids is not None
            ids, mask = case.target_ids, case.source_real.astype(np.int64)
            cache = model.begin(model.encode(case.ids, mask), mask)
        else:
            ids, mask = case.ids, case.prompt_mask
            real = np.ones(ids.shape, np.int64) if mask is None else mask.astype(np.int64)
            cache = model.begin(real[:, : case.prefill])
        return np.concatenate([model.step(ids[:, part], cache) for part in slices(case.prefill, ids.shape[1])], axis=1)

    def _tapped(self, name: str, **feeds: Array) -> dict[str, Array]:
        """All taps of one graph, and its outputs other than keys and values."""
        if name not in self.tapped:
            copy = add_taps(onnx.load(self.files[name], load_external_data=False), tap_names(self.config))
            self.tapped[name] = Graph(self._open(self.files[name], copy))
        graph = self.tapped[name]
        outputs = [output for output in graph.outputs if output not in graph.presents]
        return graph(outputs, **feeds, **graph.empty_past(len(feeds["input_ids"])))

    def _open(self, path: Path, model: onnx.ModelProto | None = None) -> Any:
        options = session_options(self.threads)
        options.graph_optimization_level = LEVELS[self.optimisation]
        if model is None:
            return open_session(path, [self.provider], options)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        return ort.InferenceSession(model.SerializeToString(), options, providers=[self.provider])


def _check_same_model(folder: OnnxFolder, checkpoint: Checkpoint) -> None:
    pairs = {name: (getattr(folder.config, name), getattr(checkpoint.config, name)) for name in SHAPES}
    differing = [f"{name}={there!r}, not {here!r}" for name, (there, here) in pairs.items() if there != here]
    if differing:
        raise UserError(f"{folder.path}: not exported from {checkpoint.folder}: it has {'; '.join(differing)}")


def _all_graphs(folder: OnnxFolder) -> dict[str, Path]:
    """Every graph of the folder, those included that running it doesn't need."""
    place = next(iter(folder.graphs.values())).parent
    merged = {MERGED: place / f"{MERGED}.onnx"} if MERGED not in folder.graphs else {}
    return folder.graphs | {name: path for name, path in merged.items() if path.is_file()}
