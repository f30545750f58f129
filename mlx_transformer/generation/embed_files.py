"""The vectors of a file's lines in a file (`line_files.py`): JSON, one line for each, or one array for NumPy (.npy).

An array says in its head how many rows it has, so that the lines of its text must be known beforehand.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import UserError

from .line_files import JSON, LineWork, cut_at, json_lines, write_lines
from .lines import LineReport
from .text_options import EmbedOptions
from .verbs import TextVerbs

ARRAY = ".npy"


def embed_stream(
    model: TextVerbs,
    input: Path | None = None,
    output: Target | None = None,
    options: EmbedOptions | None = None,
    *,
    text: Sequence[str] = (),
    resume: bool = False,
    force: bool = False,
    model_facts: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Write the vector of each line: {"text": ..., "embedding": [...]}, or to a file that ends in .npy an array
    (lines, W) of float32; of another kind {"text": ..., "weights": {id: weight}} or {"text": ..., "embeddings":
    [[...], ...]}. Arguments as for `write_lines`."""
    options = options or EmbedOptions()
    embedder = model.embedder(**asdict(options))
    _ = embedder.tokenizer
    as_array = output is not None and os.fspath(output).lower().endswith(ARRAY)
    if as_array and embedder.kind != "dense":
        raise UserError(
            "{}: an array holds one vector of each line ({kind}); name a file that ends in .jsonl", output, kind="dense"
        )
    key, written = FORMS[embedder.kind]

    def make(lines: Sequence[str], report: LineReport) -> bytes:
        rows = embedder.rows(lines, report.first_line, report.on_overlong)
        vectors = embedder.made(rows, report.done)
        if as_array:
            return vectors.astype("<f4").tobytes()
        return json_lines({"text": line, key: written(each)} for line, each in zip(lines, vectors, strict=True))

    work = LineWork(
        name="embed",
        make=make,
        overlong=cut_at(embedder.most),
        options=asdict(options),
        suffixes=(*JSON, ARRAY),
        head=(lambda rows: array_head(rows, embedder.dimensions)) if as_array else None,
    )
    write_lines(work, input, output, text=text, resume=resume, force=force, model_facts=model_facts)


def array_head(rows: int, width: int) -> bytes:
    """Return what a .npy file of float32 begins with."""
    head = io.BytesIO()
    npy.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})
    return head.getvalue()


def _short_weights(weights: Mapping[int, float]) -> dict[str, float]:
    numbers = short_floats(np.array([*weights.values()], np.float32))
    return dict(zip(map(str, weights), numbers, strict=True))


def short_floats(vector: NDArray[np.float32]) -> list[float]:
    """Return numbers that JSON writes as briefly as float32 allows."""
    return [float(text) for text in vector.astype(str).tolist()]


FORMS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "dense": ("embedding", short_floats),
    "sparse": ("weights", _short_weights),
    "multi": ("embeddings", lambda vectors: [short_floats(vector) for vector in vectors]),
}
"""The keys of a line beside the text, and their form, by the kind."""
