"""This project's single files, with the search in the graph. Apart from `ours.py`, whose process imports less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from export import SearchModel

from . import Rows


class Loop:
    def __init__(self, folder: Path, parts: list[str], threads: int):
        self.model = SearchModel(folder / "search.onnx", threads=threads)

    def translate(self, rows: Rows, beam: int, length: int | None, limit: int, prefix: Rows | None = None) -> Rows:
        options: dict[str, Any] = {"max_new_tokens": length or limit, "min_new_tokens": length or 0, "beam": beam}
        if not length:
            # See ours.py.
            options |= {"length_penalty": 1.0, "penalty_form": "length", "early_stopping": beam > 1}
        return self.model.generate(rows, prefix, **options)
