"""Guess the mistake in an operation: change the reference in a typical way and compare with the runtime's values.

E.g. another epsilon, or a missing bias. A guess is reported only if it explains the error: the remaining error is at
most a hundredth of the original, or twice float32's own error (twice, as the guess is computed differently).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from export.validate.points import makers
from export.validate.reference import Parameters
from export.validate.reference.layers import activation, norm
from mlx_transformer.core.config import Activation, TransformerConfig

Array = NDArray
EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
EXPLAINED = 0.01  # largest share of the error that may remain


def explain(
    point: str,
    config: TransformerConfig,
    weights: Parameters,
    inputs: Mapping[str, Array],
    got: Array,
    truth: Array,
    natural: float,
    valid: NDArray[np.bool_],
) -> str:
    """Describe the likely mistake, e.g. "gate and up exchanged"; "" if no guess explains the error.

    `inputs`: the reference's values at all points. `got`, `truth` (B,L,...): values at `point`, positions before heads.
    `natural`: the sum of float32's own absolute errors. `valid` (B,L): the positions to compare.
    """
    if got.shape != truth.shape:
        return f"shape {got.shape}, expected {truth.shape}"
    if not np.isfinite(got[valid]).all():
        return "not finite"
    last = point.rpartition(".")[2]
    if last == "weights":
        masked = _mask(np.where(valid[..., None, None], got, truth), truth)
        if masked:
            return masked
    config = config.at(point)
    tolerance = max(EXPLAINED * float(np.abs(got - truth)[valid].sum()), 2 * natural)
    for words, changed in _changed(point, last, config, weights, inputs, truth):
        if changed.shape == got.shape and np.abs(got - changed)[valid].sum() <= tolerance:
            return words
    return _factor(got[valid], truth[valid], tolerance)


def _changed(
    point: str,
    last: str,
    config: TransformerConfig,
    weights: Parameters,
    inputs: Mapping[str, Array],
    truth: Array,
) -> Iterator[tuple[str, Array]]:
    """Yield (mistake in words, the point's value with it) for typical mistakes in this kind of operation."""
    if last.endswith("_norm") or last == "norm":
        x = {after: inputs[before] for before, after in pairwise(inputs)}.get(point)  # a norm's input
        if x is not None and x.size == truth.size:
            gamma, beta = np.asarray(weights[f"{point}.weight"]), weights.get(f"{point}.bias")
            beta = None if beta is None else np.asarray(beta)
            for epsilon in EPSILONS:
                with np.errstate(divide="ignore", invalid="ignore"):
                    changed = norm(x.astype(np.float64).reshape(truth.shape), gamma, beta, epsilon)
                yield f"epsilon {epsilon:g}, not {config.norm_epsilon:g}", changed
    elif last == "inner":
        place = point.rpartition(".")[0]
        up = inputs[f"{place}.up_proj"].astype(np.float64)
        for name in get_args(Activation):
            if config.gated:
                gate = inputs[f"{place}.gate_proj"].astype(np.float64)
                yield f"{name}, not {config.activation}", activation(name, gate) * up
                yield "gate and up exchanged", activation(name, up) * gate
            else:
                yield f"{name}, not {config.activation}", activation(name, up)
        yield "not gated", up
    elif last in ("queries", "keys", "values", "context"):
        heads = truth if truth.ndim == 4 else truth.reshape(*truth.shape[:2], config.heads, -1)
        for first in range(heads.shape[2]):
            for second in range(first):
                order = list(range(heads.shape[2]))
                order[first], order[second] = second, first
                yield f"heads {second} and {first} exchanged", heads[:, :, order].reshape(truth.shape)
        for k in range(1, min(truth.shape[1], 4)):
            yield f"rows moved by {k}", np.roll(truth, k, axis=1)
            yield f"rows moved by -{k}", np.roll(truth, -k, axis=1)
    elif last == "residual":
        sub = inputs.get(point.removesuffix(".residual"))
        if sub is not None:
            yield "the input isn't added", sub.astype(np.float64)
            yield "the sub-layer's output isn't added", truth - sub
            yield "the sub-layer's output is added twice", truth + sub
            yield "the sub-layer's output is added to itself", 2.0 * sub
    module = "output_proj" if point == "logits" else makers(inputs, weights).get(point, point)
    bias = weights.get(f"{module}.bias")
    if bias is not None and bias.shape == truth.shape[-1:]:
        yield "the bias is missing", truth - np.asarray(bias)


def _mask(got: Array, truth: Array) -> str:
    """Describe the first query in attention weights (B,L,H,S) that sees a masked key or misses a visible key."""
    visible = np.argwhere((truth == 0) & (got > 1e-6))
    hidden = np.argwhere((truth > 1e-6) & (got == 0))
    for places, words in (
        (visible, "sees key {} of row {}, which is masked"),
        (hidden, "doesn't see key {} of row {}"),
    ):
        if len(places):
            row, query, _, key = (int(i) for i in places[0])
            return f"mask: query {query} {words.format(key, row)}"
    return ""


def _factor(got: Array, truth: Array, tolerance: float) -> str:
    """Guess that every value was multiplied by a constant."""
    square = float((truth * truth).sum())
    if not square:
        return ""
    factor = float((got * truth).sum()) / square
    rest = np.abs(got - factor * truth).sum()
    return f"every value times {factor:.6g}" if rest <= tolerance else ""
