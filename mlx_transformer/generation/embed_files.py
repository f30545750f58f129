"""The vectors of a file's lines in a file (`line_files.py`): JSON, one line for each, or one array for NumPy (.npy).

An array says in its head how many rows it has, so that the lines of its text must be known beforehand.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from .line_files import JSON, LineWork, cut_at, json_lines, write_lines
from .lines import Told
from .options import EmbedOptions
from .verbs import TextVerbs

ARRAY = ".npy"


def embed_stream(
    model: TextVerbs,
    input: Path | None = None,
    output: Path | None = None,
    options: EmbedOptions | None = None,
    *,
    text: Sequence[str] = (),
    resume: bool = False,
    model_facts: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Write the vector of each line: {"text": ..., "embedding": [...]}, or to a file that ends in .npy an array
    (lines, W) of float32; arguments as for `write_lines`."""
    options = options or EmbedOptions()
    embedder = model.embedder(**asdict(options))
    _ = embedder.tokenizer
    as_array = output is not None and output.suffix.lower() == ARRAY

    def make(lines: Sequence[str], told: Told) -> bytes:
        rows = embedder.rows(lines, told.first_line, told.on_overlong)
        vectors = embedder.vectors(rows, told.done)
        if as_array:
            return vectors.astype("<f4").tobytes()
        pairs = zip(lines, vectors, strict=True)
        return json_lines({"text": line, "embedding": short_floats(vector)} for line, vector in pairs)

    work = LineWork(
        name="embed",
        make=make,
        overlong=cut_at(embedder.most),
        options=asdict(options),
        suffixes=(*JSON, ARRAY),
        head=(lambda rows: array_head(rows, embedder.dimensions)) if as_array else None,
    )
    write_lines(work, input, output, text=text, resume=resume, model_facts=model_facts)


def array_head(rows: int, width: int) -> bytes:
    """Return what a .npy file of float32 begins with."""
    head = io.BytesIO()
    npy.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})
    return head.getvalue()


def short_floats(vector: NDArray[np.float32]) -> list[float]:
    """Return numbers that JSON writes as briefly as float32 allows."""
    return [float(text) for text in vector.astype(str).tolist()]
