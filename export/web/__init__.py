"""A static page for running exported models in the browser with onnxruntime-web: `mlx-transformer web ONNX --out SITE`.

write_site("onnx-folder", out="site")        write a page
"""

from __future__ import annotations

from mlx_transformer.system.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .write import write_site as write_site
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {"write_site": ".write"})
