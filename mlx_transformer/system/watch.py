"""How long work tells whoever started it how far it is; `progress.py` shows that to a person."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float, str], None]
"""Called with the share of the work that is done, in [0, 1], and what is being done."""


def no_progress(share: float, status: str) -> None:
    """Show nothing: the `Progress` of callers who don't want to know."""
