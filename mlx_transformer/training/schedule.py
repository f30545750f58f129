"""The learning rate of section 5.3, with an optional falling end."""

from __future__ import annotations


def noam(step: int, d_model: int, warmup_steps: int, scale: float = 1.0) -> float:
    """scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), formula 3 of the paper; step counts from 1."""
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def cooldown(progress: float, share: float) -> float:
    """Factor that falls linearly from 1 to 0 over the last `share` of the run; `progress` in [0, 1]. Share 0: always 1.

    The paper stops training at a high rate and averages checkpoints instead; a falling rate does the same for short
    runs.
    """
    if share <= 0 or progress <= 1 - share:
        return 1.0
    return max(0.0, (1 - progress) / share)
