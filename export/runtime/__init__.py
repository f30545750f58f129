"""Opens an exported folder and runs it with ONNX Runtime: `OnnxTransformer`. Nothing here imports onnx."""

from __future__ import annotations

from mlx_transformer.system.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .transformer import OnnxTransformer as OnnxTransformer
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {"OnnxTransformer": ".transformer"})
