"""Train a Transformer with MLX. The names below are resolved on first use: importing the package loads no MLX.

import mlx_transformer
model, tokenizer = mlx_transformer.load("quickstart/model")
source_ids = tokenizer.encode_batch(["May 3, 2024"])
ids = model.generate(source_ids, beam=4)
print(tokenizer.decode_batch(ids))
logits = model(source_ids, [[tokenizer.bos_id, *ids[0]]])  # (B, T, V); padded rows: a source mask, True on tokens
"""

from __future__ import annotations

from .system.lazy import find_old_names, lazy

find_old_names()

TYPE_CHECKING = False  # typing's own takes longer to import than all that is here
if TYPE_CHECKING:
    from .core.config import TransformerConfig as TransformerConfig
    from .core.tokenizer import Tokenizer as Tokenizer
    from .runtime.transformer import Transformer as Transformer
    from .runtime.transformer import load as load
    from .system.errors import UserError as UserError
    from .system.version import __version__ as __version__
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "load": ".runtime.transformer",
            "Transformer": ".runtime.transformer",
            "TransformerConfig": ".core.config",
            "Tokenizer": ".core.tokenizer",
            "UserError": ".system.errors",
            "__version__": ".system.version",
        },
    )
