"""Search inside the graph: one ONNX file from source ids, or text, to the n best translations.

export_search(checkpoint, "model.onnx")      write a file
open_file("model.onnx")                      open any such file: a SearchModel, or an encoder's VectorModel
SearchModel("model.onnx")                    run it: .generate(list_of_id_lists), .translate(list_of_strings)
"""

from __future__ import annotations

from mlx_transformer.system.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .runtime import SearchModel as SearchModel
    from .runtime import open_file as open_file
    from .write import export_search as export_search
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__, {"SearchModel": ".runtime", "open_file": ".runtime", "export_search": ".write"}
    )
