"""Checkpoints run by MLX: `load`, `Transformer` with methods for ids and text, and the search on MLX."""

from __future__ import annotations

from mlx_transformer.system.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .transformer import Transformer as Transformer
    from .transformer import load as load
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {"Transformer": ".transformer", "load": ".transformer"})
