"""Engines for ONNX files without known inner values: a file with the search inside, and other exporters' files.

A file with the search inside (`export --search`) returns tokens and scores, and its weights can be read. It has no
logits. They aren't needed to judge its tokens: the largest allowed error of a logit, and so the size of a tie, depends
only on the inputs and the precision.

Other exporters' files (e.g. Optimum, torch) of the same checkpoint return logits. They are a folder with
encoder_model.onnx and decoder_model.onnx, or a single file with the whole network. Inputs and outputs have Hugging
Face's names; `names` maps these to the file's own, e.g. {"input_ids": "src", "logits": "output"}.

    input_ids, attention_mask (B,S) -> last_hidden_state (B,S,D)
    input_ids (B,T), encoder_attention_mask, encoder_hidden_states -> logits (B,T,V)          the decoder's file
    input_ids, attention_mask[, decoder_input_ids][, position_ids] -> logits                  the whole network

No value inside has a known name, so weights, taps, caches and searches aren't compared; the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from export.graph.protos import metadata_of, read_model
from export.interface import DECODER_FIRST, ENCODER, HUGGING_FACE, MODEL, SOURCE_NAMES
from export.precision.table import DEFAULT_ACTIVATIONS, IN_BLOCKS
from export.runtime.sessions import open_session, session_options
from export.search.metadata import ACTIVATIONS, CONFIG, PRECISION, int8_scales_of
from export.search.runtime import SearchModel
from export.validate.cases import Case
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.decoding.options import Hypothesis, Options
from mlx_transformer.system.errors import UserError

from .onnx_engine import check_same_model
from .onnxruntime_engine import (
    EXACT,
    PROVIDERS,
    integer_kernel,
    open_changed,
    provider_of,
    threads_in_words,
)
from .protocol import Capabilities, Engine, Placement
from .stored import OnnxFiles


class WholeEngine(Engine):
    """ONNX Runtime with files that don't show inner values."""

    name = "onnxruntime"
    provider = PROVIDERS["cpu"]
    threads: int | None
    compared: str
    """The compared results, in words."""

    def details(self) -> dict[str, str]:
        return {"onnxruntime": ort.__version__, "provider": self.provider, "compared": self.compared}

    def placement(self) -> Placement:
        libraries = {"onnxruntime": ort.__version__}
        return Placement(self.name, self.provider, "none", threads_in_words(self.threads), libraries)


def is_search(path: Path) -> bool:
    """Return whether `export_search` wrote this file."""
    try:
        return CONFIG in metadata_of(read_model(path))
    except UserError:
        return False


class SearchEngine(WholeEngine, OnnxFiles):
    """ONNX Runtime with a single file, the search inside."""

    compared = "weights, tokens, scores"

    def __init__(self, checkpoint: Checkpoint, path: Path, device: str = "cpu", threads: int | None = None):
        self.provider = provider_of(device)
        self.model = SearchModel(path, threads=threads, providers=[self.provider])
        self.model.shortlist = None  # searches are compared among all tokens
        if self.model.takes_text:
            raise UserError(f"{path}: takes text, but validate compares ids; export it without text for validate")
        check_same_model(self.model, checkpoint)
        self.checkpoint, self.config, self.device, self.threads = checkpoint, self.model.config, device, threads
        metadata = self.model.session.get_modelmeta().custom_metadata_map
        self.precision = metadata.get(PRECISION, "float32")
        if self.precision in IN_BLOCKS:
            self.activations = metadata.get(ACTIVATIONS, DEFAULT_ACTIVATIONS)
        if (scales := int8_scales_of(metadata, self.config, path)) is not None:
            self.int8_scales = scales
        among = "candidates" in self.model.ports.input_names
        self.capabilities, self._round_trips = Capabilities(shows="tokens", files={"search": path}, among=among), {}

    @property
    def sums_in_16_bits(self) -> bool:
        return self.device == "cpu" and self.int8_scales.may_overflow and integer_kernel() != EXACT  # in its loop

    def open(self, path: Path, model: onnx.ModelProto | None = None) -> ort.InferenceSession:
        """Open a changed model (e.g. a part) of the file; without a model, return the session of the whole file."""
        if model is None:
            return self.model.session
        options = session_options(self.threads, activations=self.activations)
        return open_changed(model, path, options, [self.provider])

    def _hypotheses(
        self, sources: Sequence[Any], options: Options, candidates: Sequence[Sequence[int]] | None
    ) -> list[list[Hypothesis]]:
        # All options are given, so the file's own settings have no effect.
        if options.max_new_tokens is None and not options.max_length_factor and candidates is None:
            return self.model.without_limit(list(sources), options)
        return self.model.search(list(sources), candidates=candidates, **vars(options))


Array = NDArray
TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_, "tensor(float)": np.float32}
INPUT_ROLES, OUTPUT_ROLES = HUGGING_FACE


def is_foreign(path: Path) -> bool:
    """Return whether a path is another exporter's ONNX file or folder."""
    if path.suffix == ".onnx":
        return path.is_file() and not is_search(path)
    has_config = any((place / ONNX_CONFIG).is_file() for place in (path, path / "onnx", path.parent))
    return not has_config and any(_file(path, name) is not None for name in (DECODER_FIRST, MODEL))


class ForeignEngine(WholeEngine):
    """ONNX Runtime on the CPU with another exporter's files."""

    compared = "logits of one full pass alone"
    capabilities = Capabilities(shows="logits")

    def __init__(self, checkpoint: Checkpoint, path: Path, names: Mapping[str, str], threads: int | None = None):
        self.config, self.path, self.names, self.threads = checkpoint.config, path, dict(names), threads
        split = path.suffix != ".onnx" and self.config.architecture == "encoder-decoder" and _file(path, DECODER_FIRST)
        graphs = [ENCODER, DECODER_FIRST] if split else [MODEL]
        files = {name: path if path.suffix == ".onnx" else _file(path, name) for name in graphs}
        missing = [f"{name}.onnx" for name, file in files.items() if file is None]
        if missing:
            raise UserError(f"{path}: {' and '.join(missing)} missing")
        options = session_options(threads)
        self.sessions = {name: open_session(file, options=options) for name, file in files.items() if file}
        entries = {entry.name for s in self.sessions.values() for entry in [*s.get_inputs(), *s.get_outputs()]}
        unknown = [name for name in self.names.values() if name not in entries]
        if unknown:
            raise UserError(f"{path}: has no input or output {unknown[0]!r} (there are: {', '.join(sorted(entries))})")
        known = {self.names.get(role, role) for role in INPUT_ROLES}
        strange = [e.name for s in self.sessions.values() for e in s.get_inputs() if e.name not in known]
        if strange:
            raise UserError(
                f"{path}: input {strange[0]!r} is not one of {', '.join(INPUT_ROLES)}; map it: --names input_ids=NAME"
            )

    def logits(self, case: Case) -> Array:
        mask = case.source_real
        values: dict[str, Array] = {**case.inputs, "source_mask": mask}
        values["positions"] = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
        if case.target_ids is not None:
            values["target_ids"] = case.target_ids
        if ENCODER not in self.sessions:
            return self._run(MODEL, "logits", values)
        values["memory"] = self._run(ENCODER, "memory", values)
        return self._run(DECODER_FIRST, "logits", values)

    def _run(self, graph: str, output: str, values: Mapping[str, Array]) -> Array:
        session: Any = self.sessions[graph]
        roles = INPUT_ROLES | ({SOURCE_NAMES["source_ids"]: "target_ids"} if graph == DECODER_FIRST else {})
        arrays = {self.names.get(role, role): values.get(value) for role, value in roles.items()}
        inputs = {}
        for entry in session.get_inputs():
            if (array := arrays[entry.name]) is None:
                raise UserError(f"{self.path}: input {entry.name!r} doesn't fit this kind of model")
            inputs[entry.name] = np.ascontiguousarray(array).astype(TYPES[entry.type])
        outputs = [entry.name for entry in session.get_outputs()]
        role = next(role for role, value in OUTPUT_ROLES.items() if value == output)
        name = self.names.get(role, role)
        if name not in outputs:
            raise UserError(f"{self.path}: no output {name!r} (there are: {', '.join(outputs)}); map it with names")
        return session.run([name], inputs)[0]


def parse_names(text: str | Mapping[str, str] | None) -> dict[str, str]:
    """Parse e.g. "input_ids=src,logits=output" to a dictionary; a mapping is copied."""
    if isinstance(text, Mapping):
        return dict(text)
    pairs = [part.partition("=") for part in (text or "").split(",") if part.strip()]
    for role, sign, name in pairs:
        if not sign or not name.strip() or role.strip() not in {**INPUT_ROLES, **OUTPUT_ROLES}:
            roles = ", ".join((*INPUT_ROLES, *OUTPUT_ROLES))
            raise UserError(f"--names {text!r}: give ROLE=NAME, separated by commas; roles are {roles}")
    return {role.strip(): name.strip() for role, _, name in pairs}


def _file(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / f"{name}.onnx", folder / "onnx" / f"{name}.onnx") if p.is_file()), None)
