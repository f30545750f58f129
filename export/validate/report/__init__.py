"""What a validation found: as data, in the terminal, as JSON and as a page."""

from __future__ import annotations

from mlx_transformer.system.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .data import EXIT_EQUAL as EXIT_EQUAL
    from .data import EXIT_MISMATCH as EXIT_MISMATCH
    from .report import Report as Report
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__, {"EXIT_EQUAL": ".data", "EXIT_MISMATCH": ".data", "Report": ".report"}
    )
