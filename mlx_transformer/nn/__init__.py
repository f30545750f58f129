"""The network in MLX, file by file the twin of `export/nn`."""

from mlx_transformer.device import use_fast_blas

use_fast_blas()

from .cache import Cache  # noqa: E402
from .model import Transformer  # noqa: E402

__all__ = ["Cache", "Transformer"]
