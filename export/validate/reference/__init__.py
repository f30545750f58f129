"""The Transformer and its search in NumPy, float64: the third opinion in every comparison."""

from __future__ import annotations

from mlx_transformer.system.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .network import Cache as Cache
    from .network import Reference as Reference
    from .network import Tap as Tap
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {"Cache": ".network", "Reference": ".network", "Tap": ".network"})
