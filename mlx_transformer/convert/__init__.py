"""A checkpoint made of others: merged with an adapter, averaged; and, handed on from `families`, of published ones."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mlx_transformer.families.conversion import import_huggingface, to_huggingface

__all__ = ["import_huggingface", "to_huggingface"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from mlx_transformer.families import conversion

        return getattr(conversion, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
