"""Training (section 5 of the paper): loss, learning rate schedule, optimizer step, run folder, trainer.

>>> train("multi30k", out="runs/mine", source="train.en", target="train.de", steps=500)
"""

from __future__ import annotations

from mlx_transformer.system.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .trainer import train as train
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {"train": ".trainer"})
