"""The network in MLX. Each file has a twin in `export/nn` that builds the same part as ONNX."""

from mlx_transformer.device import use_fast_blas

use_fast_blas()

from .cache import Cache  # noqa: E402
from .model import Transformer  # noqa: E402

__all__ = ["Cache", "Transformer"]
