"""The extents that the target `coreml` fixes."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError


@dataclass(frozen=True)
class FixedShape:
    """Rows, source positions and target positions. An encoder alone has no target, a decoder alone no source: 0."""

    rows: int
    source: int
    target: int

    @classmethod
    def parse(cls, text: str, config: TransformerConfig) -> FixedShape:
        """ "1x64x48" for an encoder-decoder, "1x64" for the others. `UserError` says what is expected."""
        both = config.architecture == "encoder-decoder"
        parts = text.lower().split("x")
        if len(parts) != 2 + both or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise UserError(f"fixed shape {text!r}: give {cls.said(config)}")
        rows, length, *target = map(int, parts)
        longest = max([length, *target])
        if longest > config.max_positions:
            raise UserError(f"fixed shape {text!r}: the model has {config.max_positions} positions, not {longest}")
        if both:
            return cls(rows, length, target[0])
        return cls(rows, length, 0) if config.has_encoder else cls(rows, 0, length)

    @staticmethod
    def said(config: TransformerConfig) -> str:
        """What to write for such a model."""
        both = config.architecture == "encoder-decoder"
        return "ROWSxSOURCExTARGET, such as 1x64x64" if both else "ROWSxLENGTH, such as 1x64"

    @property
    def positions(self) -> int:
        """Longest sequence on either side."""
        return min(n for n in (self.source, self.target) if n)
