"""How long work tells whoever started it how far it is; `progress.py` shows that to a person."""

from __future__ import annotations

from collections.abc import Callable

Watch = Callable[[float, str], None]
"""Told the share of the work that is done, in [0, 1], and what is being done."""


def unwatched(share: float, status: str) -> None:
    """The `Watch` of who wants to know nothing."""
