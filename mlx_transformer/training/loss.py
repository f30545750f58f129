"""Label-smoothed cross entropy (section 5.4; Szegedy et al. 2015), fused with the classifier.

N target positions (B*T flattened), V vocabulary, D model. With z = h W^T + b, smoothing e and lse = logsumexp(z):

    nll_i = lse_i - (1 - e) z_i[y_i] - e mean_v z_i[v]

No one-hot matrix is built and each logit is exponentiated once: the backward pass reuses the softmax of the forward
pass, which is what costs time on CPUs. dz = softmax(z) - (1 - e) onehot(y) - e/V, of which only the softmax is ever
(N, V).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

from mlx_transformer.device import choices


def label_smoothed_loss(
    hidden: mx.array, weight: mx.array, bias: mx.array | None, targets: mx.array, smoothing: float, pad_id: int
) -> mx.array:
    """Sum of nll over the positions whose target is not `pad_id`; a scalar in nats, float32.

    hidden (..., D), weight (V, D), bias (V,) or None, targets (...) of ids. Divide by the number of target tokens for
    the mean; a batch of only padding gives 0.
    """
    hidden = hidden.reshape(-1, hidden.shape[-1])
    targets = targets.reshape(-1)
    counted = (targets != pad_id).astype(mx.float32)
    if bias is None:
        bias = mx.zeros((weight.shape[0],), dtype=hidden.dtype)
    return _function(smoothing)(hidden, weight, bias, targets, counted)[0]


def _function(smoothing: float) -> Callable[..., tuple[mx.array, mx.array]]:
    """The loss for one smoothing as an `mx.custom_function` of (h, W, b, y, counted) -> (sum of nll, softmax)."""

    @mx.custom_function
    def loss(h, W, b, y, counted):
        z = (h @ W.T + b).astype(mx.float32)  # (N, V)
        top = mx.max(z, axis=-1, keepdims=True)
        e = _exp(z - top)
        total = mx.sum(e, axis=-1, keepdims=True)
        lse = (top + mx.log(total))[:, 0]  # (N,)
        picked = mx.take_along_axis(z, y[:, None], axis=-1)[:, 0]
        nll = lse - (1 - smoothing) * picked - smoothing * mx.mean(z, axis=-1)
        return mx.sum(nll * counted), e / total

    @loss.vjp
    def loss_vjp(primals, cotangents, outputs):
        h, W, _, y, counted = primals
        V = W.shape[0]
        g = (cotangents[0] * counted)[:, None]  # (N, 1)
        p = outputs[1] * g  # (N, V)
        low = p.astype(h.dtype)
        hit, rest = (1 - smoothing) * g, smoothing / V * g
        # Products add up in float32 by themselves; sums and scatters would add up in their terms' type.
        dh = (low @ W).astype(mx.float32) - hit * W[y] - rest * mx.sum(W.astype(mx.float32), axis=0)
        dW = (low.T @ h).astype(mx.float32).at[y].add(-hit * h) - mx.sum(rest * h, axis=0)
        db = mx.sum(p, axis=0).at[y].add(-hit[:, 0]) - mx.sum(rest)
        return dh.astype(h.dtype), dW.astype(W.dtype), db.astype(h.dtype), mx.zeros_like(y), mx.zeros_like(counted)

    return cast(Callable[..., tuple[mx.array, mx.array]], loss)


def _exp(x: mx.array) -> mx.array:
    if choices().exp_as_power:
        return mx.power(mx.array(2.0), x * 1.4426950408889634)
    return mx.exp(x)
