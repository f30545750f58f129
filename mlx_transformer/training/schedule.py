"""Learning rates: a warm-up, in steps or as a share of the run, and one of six curves after it.

    inverse-square-root    peak (warm-up / step)^0.5; section 5.3's curve, its peak bounded in short runs
    noam                   the same with the paper's own peak, (d_model * warm-up)^-0.5
    constant               peak
    linear, cosine         from the peak at the end of warm-up to 0 at the end of the run
    warmup-stable-decay    peak, then the falling end

The first two and the last may have a falling end: linear, to 0, over the last share `cooldown` of the run.
"""

from __future__ import annotations

import math

from .options import ENDLESS, TrainingOptions

# Where warm-up isn't given: a quarter of the run, at most the paper's steps.
WARMUP_SHARE, MOST_WARMUP_STEPS = 0.25, 4000
# The shorter the warm-up, the higher the paper's peak, (d_model * warm-up)^-0.5. Below this many steps for each unit of
# d_model it grows no more, but stays at 0.58 / d_model: at 0.93 / d_model a tiny model learned nothing, and what Adam
# takes falls with the width (Yang et al. 2021, "Tensor Programs V").
STEEPEST = 3


def learning_rate(options: TrainingOptions, d_model: int, step: int, share: float) -> float:
    """The rate of step `step` (counted from 1), before which the share `share` of the run was done, in [0, 1]."""
    warmup = options.warmup_steps or warmup_steps(step, share)
    if options.schedule in ("noam", "inverse-square-root"):
        rate = noam(step, d_model, warmup, _scale(options, d_model, warmup))
    else:
        rate = peak(options, d_model, warmup) * min(
            step / warmup, _after_warm_up(options.schedule, step, share, warmup)
        )
    return rate if options.schedule in ENDLESS else rate * cooldown(share, options.cooldown)


def _after_warm_up(schedule: str, step: int, share: float, warmup: float) -> float:
    """Factor on the peak. Of a run that ends by the clock the steps are estimated, as in `warmup_steps`."""
    if schedule in ("constant", "warmup-stable-decay"):
        return 1.0
    warm = warmup * share / step  # its share of the run
    done = 0.0 if share <= warm else min(1.0, (share - warm) / (1 - warm))
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def warmup_steps(step: int, share: float) -> float:
    """Warm-up steps of a run of which `step` steps are about the share `share`, where the recipe gives none.

    A run that ends by the clock doesn't know its number of steps before its end: it is estimated anew at every step,
    from these two numbers alone, so that the same shares give the same rates.
    """
    return min(MOST_WARMUP_STEPS, WARMUP_SHARE * step / share) if share > 0 else MOST_WARMUP_STEPS


def peak(options: TrainingOptions, d_model: int, warmup: float) -> float:
    """The rate at the end of a warm-up of `warmup` steps."""
    return noam(warmup, d_model, warmup, _scale(options, d_model, warmup))


def _scale(options: TrainingOptions, d_model: int, warmup: float) -> float:
    if options.learning_rate is not None:
        return options.learning_rate * (d_model * warmup) ** 0.5
    bounded = options.schedule != "noam" and options.warmup_steps is None
    short = min(1.0, warmup / (STEEPEST * d_model)) ** 0.5 if bounded else 1.0
    return options.learning_rate_scale * short


def noam(step: float, d_model: int, warmup_steps: float, scale: float = 1.0) -> float:
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
