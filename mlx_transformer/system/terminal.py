"""rich's console as commands use it."""

from __future__ import annotations

from typing import Any

from rich import console


class Console(console.Console):
    """rich's own ends the process with status 1 when nobody reads its output, which to `validate` is a mismatch."""

    def __init__(self, **options: Any):
        super().__init__(**{"highlight": False, **options})

    def on_broken_pipe(self) -> None:
        """Called while the BrokenPipeError is handled, which passes on to `process.run`."""
        raise
