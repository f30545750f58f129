"""Train, run and export Transformers. Names are imported on first use: `import mlx_transformer` doesn't load MLX.

import mlx_transformer as mt
model, tokenizer = mt.load("quickstart/model")
print(model.translate("May 3, 2024", beam=4))
logits = model([[5, 17, 2]], [[1, 9]])  # (B, T, V) of ids; padded rows: a source mask, True on tokens
mt.export("quickstart/model", "quickstart-onnx")
print(mt.OnnxTransformer("quickstart-onnx").translate(["May 3, 2024"], beam=4))  # needs no MLX
"""

from __future__ import annotations

from .system.lazy import lazy

TYPE_CHECKING = False  # importing typing takes longer than this whole module
if TYPE_CHECKING:
    from export import OnnxTransformer as OnnxTransformer
    from export import SearchModel as SearchModel
    from export import export_onnx as export_onnx
    from export import export_search as export_search
    from export.validate.compare import compare as _compare_points

    from .commands.models import compare as compare
    from .commands.models import export as export
    from .commands.models import load as load
    from .commands.models import open_model as open_model
    from .commands.models import serve as serve
    from .core.config import TransformerConfig as TransformerConfig
    from .runtime.transformer import Transformer as Transformer
    from .system.errors import UserError as UserError
    from .system.machine import __version__ as __version__
    from .text.tokenizer import Tokenizer as Tokenizer
    from .training.trainer import train as train

    validate = _compare_points
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "load": ".commands.models",
            "open_model": ".commands.models",
            "train": ".training.trainer",
            "export": ".commands.models",
            "export_onnx": "export.package",
            "export_search": "export.search",
            "validate": "export.validate:compare",
            "compare": ".commands.models",
            "serve": ".commands.models",
            "Transformer": ".runtime.transformer",
            "OnnxTransformer": "export.runtime",
            "SearchModel": "export.search",
            "TransformerConfig": ".core.config",
            "Tokenizer": ".text.tokenizer",
            "UserError": ".system.errors",
            "__version__": ".system.machine",
        },
    )
