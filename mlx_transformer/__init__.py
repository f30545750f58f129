"""Train a Transformer with MLX. The names below are resolved on first use: importing the package loads no MLX.

import mlx_transformer
model, tokenizer = mlx_transformer.load("quickstart/model")
source_ids = tokenizer.encode_batch(["May 3, 2024"])
ids = model.generate(source_ids, beam=4)
print(tokenizer.decode_batch(ids))
logits = model(source_ids, [[tokenizer.bos_id, *ids[0]]])  # (B, T, V); padded rows: a source mask, True on tokens
"""

from __future__ import annotations

from .system.moved import find_old_names

find_old_names()

TYPE_CHECKING = False  # typing's own takes longer to import than all that is here
if TYPE_CHECKING:
    from typing import Any

    from .core.config import TransformerConfig
    from .core.tokenizer import Tokenizer
    from .nn import Transformer
    from .nn.loading import load
    from .system.errors import UserError
    from .training import train

    __version__: str

_HOMES = {
    "Transformer": "nn",
    "load": "nn.loading",
    "TransformerConfig": "core.config",
    "Tokenizer": "core.tokenizer",
    "UserError": "system.errors",
    "train": "training",
}
__all__ = ["load", "train", "Transformer", "TransformerConfig", "Tokenizer", "UserError"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, "__version__"])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # a mail parser and what that needs, 3 MB

    try:
        return version("mlx-transformer")
    except PackageNotFoundError:  # a source tree that was not installed
        return "0+unknown"
