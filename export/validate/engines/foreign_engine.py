"""ONNX files that others exported from the same checkpoint (Optimum, torch), judged by their logits alone.

A folder with encoder_model.onnx and decoder_model.onnx, or one file with the whole network. Inputs and outputs are
found by Hugging Face's names; `names` maps these to those of the file: {"input_ids": "src", "logits": "output"}.

    input_ids, attention_mask (B,S) -> last_hidden_state (B,S,D)
    input_ids (B,T), encoder_attention_mask, encoder_hidden_states -> logits (B,T,V)          the decoder's file
    input_ids, attention_mask[, decoder_input_ids][, position_ids] -> logits                  the whole network

Nothing inside is known, so weights, taps, caches and searches aren't compared, and the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.interface import DECODER_FIRST, ENCODER, HUGGING_FACE, MODEL, SOURCE_NAMES
from export.runtime.sessions import open_session, session_options
from export.validate.cases import Case
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.system.errors import UserError

from .onnxruntime_engine import WholeEngine
from .protocol import Capabilities
from .search_engine import is_search

Array = NDArray
TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_, "tensor(float)": np.float32}
INPUT_ROLES, OUTPUT_ROLES = HUGGING_FACE


def is_foreign(path: Path) -> bool:
    """Return whether a path is an ONNX file, or a folder of them, that this project didn't export."""
    if path.suffix == ".onnx":
        return path.is_file() and not is_search(path)
    has_config = any((place / ONNX_CONFIG).is_file() for place in (path, path / "onnx", path.parent))
    return not has_config and any(_file(path, name) is not None for name in (DECODER_FIRST, MODEL))


class ForeignEngine(WholeEngine):
    """ONNX Runtime on the CPU over files that this project didn't export."""

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
                f"{path}: input {strange[0]!r} is none of {', '.join(INPUT_ROLES)}; map it: --names input_ids=NAME"
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
                raise UserError(f"{self.path}: input {entry.name!r} is of no such model")
            inputs[entry.name] = np.ascontiguousarray(array).astype(TYPES[entry.type])
        outputs = [entry.name for entry in session.get_outputs()]
        role = next(role for role, value in OUTPUT_ROLES.items() if value == output)
        name = self.names.get(role, role)
        if name not in outputs:
            raise UserError(f"{self.path}: no output {name!r} (there are: {', '.join(outputs)}); map it with names")
        return session.run([name], inputs)[0]


def parse_names(text: str | Mapping[str, str] | None) -> dict[str, str]:
    """Read "input_ids=src,logits=output" as a dictionary; one that is a dictionary stays it."""
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
