"""The JavaScript network of `explain`'s page (export/explain/live/twin.js) as an engine: float64, run by Node.

It has no padding: rows are computed separately, and their values put in the tokens' places.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from export.validate.points import tap_names
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.inputs import Sources
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.decoding.steps import Model
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import write_tensors

from .protocol import ModelEngine, Placement, Unavailable

Array = NDArray

HOST = Path(__file__).with_name("js_host.js")
SCRIPTS = Path(__file__).parents[2] / "explain" / "live"
ENDING = 5  # seconds for Node to end by itself


class JsEngine(ModelEngine):
    """The page's network in Node. Raises UserError if the page can't compute the config, Unavailable without Node."""

    name = "js"

    def __init__(self, checkpoint: Checkpoint):
        if shutil.which("node") is None:
            raise Unavailable("runtime js needs Node.js: there is no program `node` (https://nodejs.org)")
        self.config = checkpoint.config
        command = ["node", str(HOST), str(SCRIPTS)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        with tempfile.TemporaryDirectory(prefix="validate-") as folder:
            file = Path(folder) / "model.safetensors"
            write_tensors(file, {name: array.astype(np.float32) for name, array in checkpoint.tensors()})
            try:
                self.node = self.ask("open", config=self.config.to_dict(), file=str(file))["node"]
            except RuntimeError as error:
                self.close()
                raise UserError(f"{checkpoint.folder}: {error}") from error

    def ask(self, kind: str, **request: Any) -> Any:
        """Send Node a request and return its answer. Raises RuntimeError with the script's message if it failed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"kind": kind, **request}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "Node ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """End Node by closing its input."""
        self.process.communicate(timeout=ENDING)

    def details(self) -> dict[str, str]:
        return {"node": self.node, "computed in": "float64"}

    def placement(self) -> Placement:
        return Placement(self.name, "CPU", "none on a CPU", "one", {"node": self.node})

    def parameters(self) -> Iterator[tuple[str, str, Array]]:
        shapes = parameter_shapes(self.config)
        for name, array in self.ask("weights").items():
            yield "arrays in JavaScript", name, _array(array).reshape(shapes[name]).astype(np.float32)

    def logits(self, case: Case) -> Array:
        return self.taps(case)["logits"]

    def taps(self, case: Case) -> dict[str, Array]:
        return self._points_of(case, tap_names(self.config), [slice(None)])

    def _cached(self, case: Case, tap: Any) -> Array:
        names = [name for name in tap_names(self.config) if not name.startswith("encoder.")]
        arrays = self._points_of(case, names, case.passes())
        if tap is not None:
            for name, value in arrays.items():
                tap(name, value)
        return arrays["logits"]

    def _points_of(self, case: Case, names: Sequence[str], passes: Sequence[slice]) -> dict[str, Array]:
        """Compute these points (B,L,D) row by row, the decoder's in these passes; 0 on padding."""
        arrays: dict[str, Array] = {}
        for row in range(len(case.ids)):
            answers = self.ask("points", **_row(self.config.architecture, case, row, passes))
            for name in names:
                value = np.concatenate([_array(part) for part in answers[name]])
                real = case.valid(name)
                arrays.setdefault(name, np.zeros((*real.shape, value.shape[1])))[row, real[row]] = value
        return arrays

    @contextmanager
    def searching(self) -> Iterator[JsModel]:
        yield JsModel(self)


def _row(architecture: str, case: Case, row: int, passes: Sequence[slice]) -> dict[str, Any]:
    """Make the request for a row: its source without padding, and its target in chunks."""
    real = case.source_real[row]
    source = case.ids[row, real].tolist()
    if architecture == "encoder":
        return {"source": source}
    if case.target_ids is not None:
        return {"source": source, "chunks": [case.target_ids[row, part].tolist() for part in passes]}
    chunks = [case.ids[row, part][real[part]].tolist() for part in passes]
    return {"chunks": [chunk for chunk in chunks if chunk]}


def _array(packed: dict[str, Any]) -> Array:
    return np.frombuffer(base64.b64decode(packed["data"]), np.float64).reshape(packed["shape"])


class JsModel(Model):
    """The engine as a `decoding.steps.Model`; rows may have any lengths."""

    def __init__(self, engine: JsEngine):
        self.engine, self.config = engine, engine.config

    def start(self, rows: Sources) -> tuple[JsDecoder, Array]:
        ids = [row.tolist() for row in rows]
        encodes = self.config.has_encoder
        number = self.engine.ask("start", sources=ids if encodes else [[] for _ in ids])["decoder"]
        decoder = JsDecoder(self.engine, number, len(ids))
        return decoder, decoder.read([[rows.start] for _ in ids] if encodes else ids)


class JsDecoder:
    """A `decoding.steps.Decoder` in the other process."""

    def __init__(self, engine: JsEngine, number: int, rows: int):
        self.engine, self.number, self.rows = engine, number, rows

    def read(self, ids: list[list[int]]) -> Array:
        """Read tokens of each row; return the logits (R,V) after each row's last token."""
        return _array(self.engine.ask("step", decoder=self.number, ids=ids))

    def step(self, ids: Array) -> Array:
        return self.read([[int(id)] for id in ids])

    def repeat(self, times: int) -> None:
        self.keep(np.repeat(np.arange(self.rows), times))

    def keep(self, rows: Array) -> None:
        self.engine.ask("reorder", decoder=self.number, order=rows.tolist())
        self.rows = len(rows)

    reorder = keep
