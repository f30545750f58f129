"""This project's exported folders in its own runtime, and checkpoints of decoders in MLX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import Rows

LARGEST = 2**30
"""Tokens of a batch: all prompts are one."""


class Folder:
    def __init__(self, folder: Path, parts: list[str], threads: int):
        self.options = {name: int(value) for name, _, value in (part.partition("=") for part in parts[3:]) if value}
        self.settle: Callable[[], None] = lambda: None
        self.steps = 0
        """Steps of the last outputs, of which one may write several tokens."""
        if self.options.get("speculate"):
            self._count_lookups()
        if parts[1] == "mlx":
            from .decoders import pin  # before MLX, which counts the cores it may use

            pin(threads)
            import mlx.core as mx

            from mlx_transformer import Transformer

            self.model: Any = Transformer.load(folder)
            self.settle = mx.synchronize
        else:
            from export import OnnxTransformer

            self.model = OnnxTransformer(folder, threads=threads)

    def translate(self, rows: Rows, beam: int, length: int | None, limit: int, prefix: Rows | None = None) -> Rows:
        options: dict[str, Any] = {"max_new_tokens": length or limit, "min_new_tokens": length or 0, "beam": beam}
        if not length:
            # As CTranslate2 does by default: a sentence ends with as many finished hypotheses as beams.
            options |= {"length_penalty": 1.0, "penalty_form": "length", "early_stopping": beam > 1}
        return self.model.generate(rows, prefix, **options)

    def continued(self, prompts: Rows, count: int, reached: Callable[[], None]) -> Rows:
        from mlx_transformer.decoding.search import SharedSearch

        asked, self.steps = 0, 0

        def stopped() -> bool:  # asked before the prompt is read, and then after every choice
            nonlocal asked
            asked += 1
            if asked == 2:
                self.settle()
                reached()
            return False

        return self.model.generate(
            prompts,
            max_new_tokens=count,
            min_new_tokens=count,
            batch_tokens=LARGEST,
            share=SharedSearch(stopped=stopped),
            **self.options,
        )

    def _count_lookups(self) -> None:
        from mlx_transformer.decoding import speculation

        lookup = speculation.Lookup.__call__

        def counted(lookup_self: Any, text: list[int], most: int) -> list[int]:
            self.steps += 1
            return lookup(lookup_self, text, most)

        speculation.Lookup.__call__ = counted  # type: ignore[method-assign]
