"""The optional output `cross_attention` of exported graphs, judged as every tensor is, and MLX's in its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from export.interface import CROSS_ATTENTION
from export.validate.cases import Case, weights_name
from export.validate.engines.protocol import Engine
from export.validate.findings import TAPPED

from .free_running import attempt

Array = NDArray


def attention_layer(engines: Iterable[Engine]) -> int | None:
    """Return the layer whose weights the graphs return, or None."""
    layers = (engine.capabilities.attention_layer for engine in engines)
    return next((layer for layer in layers if layer is not None), None)


def attention_of(engine: Engine, case: Case, layer: int | None) -> Iterator[tuple[str, str, Array | None, str]]:
    """Yield (path, tap, tensor, why there is none) of what graphs return on each way of running them; for another
    runtime, of the mean of what it computes inside."""
    if layer is None or engine.capabilities.shows != "everything":
        return
    if engine.capabilities.attention_layer is not None:
        values, why = attempt(lambda: engine.attention(case))
        for path, value in {"plain": None}.items() if values is None else values.items():
            yield path, CROSS_ATTENTION, value, why
        return
    name = weights_name(layer)
    value, why = attempt(lambda: np.mean(engine.points(case, [name])[name], axis=1))
    yield TAPPED, CROSS_ATTENTION, value, why
