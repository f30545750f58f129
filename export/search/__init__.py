"""Search inside the graph: one ONNX file that takes source ids, or text, and returns the n best translations.

export_search(checkpoint, "model.onnx")      write one
open_file("model.onnx")                      open either kind: SearchModel, or VectorModel of an encoder
SearchModel("model.onnx")                    run it: .generate(list_of_id_lists), .translate(list_of_strings)
"""

from __future__ import annotations

from mlx_transformer.system.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .files import open_file as open_file
    from .runtime import SearchModel as SearchModel
    from .write import export_search as export_search
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__, {"SearchModel": ".runtime", "open_file": ".files", "export_search": ".write"}
    )
