"""Write an ONNX folder: weights, files for other programs, and the quality gate. Start with `export_onnx`."""

from __future__ import annotations

from mlx_transformer.system.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .write import export_onnx as export_onnx
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {"export_onnx": ".write"})
