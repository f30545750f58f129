"""Export to ONNX and run the result: NumPy, onnxscript and onnx_ir, never MLX.

export_onnx(checkpoint, out)      write a folder of ONNX models for ONNX Runtime, Optimum and transformers.js
export_search(checkpoint, file)   write one ONNX file with the search inside, and the tokenizer too if wanted
marian_scales(checkpoint, text)   compute Marian's int8 activation scales from a text
OnnxTransformer(folder)           run a folder: .generate(list_of_id_lists), .translate(list_of_strings)
SearchModel(file)                 run a file with the search
"""

from __future__ import annotations

import os

from mlx_transformer.system.lazy import defer, lazy

# From 1.31 on, ONNX Runtime's wheels for Linux report each session to Microsoft, and warn if there is no home folder to
# keep an identifier in. This must be set before the import; set it to 0 to allow the reports.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
defer()

# Loaded on first use: building needs no ONNX Runtime, and running needs no onnx.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from mlx_transformer.system.machine import __version__ as __version__

    from .package import export_onnx as export_onnx
    from .package.write import marian_scales as marian_scales
    from .runtime import OnnxTransformer as OnnxTransformer
    from .search import SearchModel as SearchModel
    from .search import export_search as export_search
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "export_onnx": ".package",
            "marian_scales": ".package.write",
            "export_search": ".search",
            "OnnxTransformer": ".runtime",
            "SearchModel": ".search",
            "__version__": "mlx_transformer.system.machine",
        },
    )
