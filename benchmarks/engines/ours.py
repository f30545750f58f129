"""This project's exported folders in its own runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from export import OnnxTransformer

from . import Rows


class Folder:
    def __init__(self, folder: Path, parts: list[str], threads: int):
        self.model = OnnxTransformer(folder, threads=threads)

    def translate(self, rows: Rows, beam: int, length: int | None, limit: int, prefix: Rows | None = None) -> Rows:
        options: dict[str, Any] = {"max_new_tokens": length or limit, "min_new_tokens": length or 0, "beam": beam}
        if not length:
            # As CTranslate2 does by default: a sentence ends with as many finished hypotheses as beams.
            options |= {"length_penalty": 1.0, "penalty_form": "length", "early_stopping": beam > 1}
        return self.model.generate(rows, prefix, **options)
