"""The inputs of golden files, made where they are written and again where they are read."""

import numpy as np

RATES = (1e-3, 2e-3, 3e-3, 1e-3, 5e-4)
"""Learning rates of five steps."""
ADAPTER_ALPHA = 5.0
"""Of an adapter of rank 3."""


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Standard normal, float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
