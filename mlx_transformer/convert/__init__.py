"""Convert checkpoints: merge an adapter, quantise; and import and export published models (`families`)."""

from __future__ import annotations

from mlx_transformer.system.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mlx_transformer.families.conversion import import_huggingface as import_huggingface
    from mlx_transformer.families.conversion import pads_either_side as pads_either_side
    from mlx_transformer.families.conversion import to_huggingface as to_huggingface
    from mlx_transformer.families.conversion import to_peft as to_peft
    from mlx_transformer.families.marian_files.conversion import import_marian as import_marian
    from mlx_transformer.families.marian_files.conversion import to_marian as to_marian
    from mlx_transformer.families.to_gguf import to_gguf as to_gguf
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "import_huggingface": "mlx_transformer.families.conversion",
            "pads_either_side": "mlx_transformer.families.conversion",
            "to_huggingface": "mlx_transformer.families.conversion",
            "to_peft": "mlx_transformer.families.conversion",
            "to_gguf": "mlx_transformer.families.to_gguf",
            "import_marian": "mlx_transformer.families.marian_files.conversion",
            "to_marian": "mlx_transformer.families.marian_files.conversion",
        },
    )
