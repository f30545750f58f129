"""The run's folder as the processes have it that don't lead: nothing is read, and nothing written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .run import Run


class Follower(Run):
    """Of a process whose rank isn't 0."""

    def __init__(self, folder: Path):
        self.folder = folder

    def begin(self, texts: Mapping[str, str]) -> None: ...

    def note_model(self, said: dict[str, Any]) -> None: ...

    def close(self) -> None: ...

    def metric(self, kind: str, step: int, **values: Any) -> None: ...

    def checkpoints(self) -> list[Path]:
        return []


class Silent:
    """A `Reporter` for them: rank 0 tells how far all are."""

    def line(self, text: str) -> None: ...

    columns = 0

    def update(self, share: float, text: str, below: str = "") -> None: ...

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None: ...
