"""The objects that all endpoints of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from export.settings import ServeSettings

from .access import KeyRing
from .batching import OverloadError
from .metrics import Metrics
from .models import Models


@dataclass
class Shared:
    """Its settings, who may ask, what is counted, and the models once they are loaded."""

    settings: ServeSettings
    keys: KeyRing
    metrics: Metrics = field(default_factory=Metrics)
    loaded: Models | None = None

    @property
    def models(self) -> Models:
        """The loaded models; `OverloadError` before they are."""
        if self.loaded is None:
            raise OverloadError("the model is being loaded", 1)
        return self.loaded
