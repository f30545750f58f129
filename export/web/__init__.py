"""A static page that runs exported models in the browser with onnxruntime-web: `mlx-transformer web ONNX --out SITE`.

write_site("onnx-folder", out="site")        write one
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .write import write_site

__all__ = ["write_site"]


def __getattr__(name: str) -> Any:
    """Loaded on first use."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.write"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
