"""What a validation found: as data, in the terminal, as JSON and as a page."""

from __future__ import annotations

from .data import Report

__all__ = ["Report"]
