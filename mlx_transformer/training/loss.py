"""Label-smoothed cross entropy (section 5.4; Szegedy et al. 2015), fused with the classifier.

N target positions (B*T flattened), V vocabulary, D model. The classifier's three steps (`nn/classifier.py`) are in it:
h = before(hidden), u = h W^T + b and the logits z = after(u), so that an option of logits needs no line here. With
smoothing e and lse = logsumexp(z):

    nll_i = lse_i - (1 - e) z_i[y_i] - e mean_v z_i[v]

No one-hot matrix is built and each logit is exponentiated once: the backward pass reuses the softmax of the forward
pass, which is what costs time on CPUs. dz = softmax(z) - (1 - e) onehot(y) - e/V, of which only the softmax is ever
(N, V). Where `after` changes something, du = dz after'(u), and the derivative after'(u) is kept too.

Many positions times a large vocabulary don't fit (25,000 times 37,000: 3.7 GB, three times over). They are taken in
chunks of rows, one after another, and each leaves its part of the gradient, which is known but for a factor when the
loss is computed. This costs no product more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

from mlx_transformer.device import tuning
from mlx_transformer.nn.classifier import Classifier

After = Callable[[mx.array], mx.array]
"""`Classifier.after`: changes each product by itself."""
MAX_LOGITS = 1 << 26
"""The most logits of one chunk: 256 MiB in float32."""
BYTES_PER_LOGIT = 16
"""The memory of a chunk: logits, their exponentials, the softmax and its gradient."""
BYTES_PER_CHANGED_LOGIT = 32
"""The same where `Classifier.after` changes logits: its steps and its derivative are kept too."""
CHUNK_SHARE = 1 / 8
"""The share of a step's memory that a chunk may take."""


def logits_within(memory: float | None) -> int:
    """Return the most logits of a chunk where a step may take `memory` GB; None: as much as it likes."""
    return MAX_LOGITS if memory is None else min(MAX_LOGITS, int(memory * 1e9 * CHUNK_SHARE / BYTES_PER_LOGIT))


def bytes_per_logit(after: After) -> int:
    return BYTES_PER_LOGIT if _changes_nothing(after) else BYTES_PER_CHANGED_LOGIT


def label_smoothed_loss(
    hidden: mx.array,
    classifier: Classifier,
    targets: mx.array,
    smoothing: float,
    pad_id: int,
    max_logits: int | None = None,
) -> mx.array:
    """Sum nll over the positions whose target is not `pad_id`; a scalar in nats, float32.

    hidden (..., D), targets (...) of ids. Divide by the number of target tokens for the mean; a batch of only padding
    gives 0. `max_logits`: the most of one chunk; None: `MAX_LOGITS`.
    """
    h, targets, counted = _flat(classifier.before(hidden), targets, pad_id)
    weights = classifier.weights
    rows = _rows(weights[0], classifier.after, max_logits)
    function = _function(smoothing, classifier.after)
    if len(targets) > rows:
        function = _in_chunks(function, rows)
    return function(h, targets, counted, *weights)[0]


def losses(
    hidden: mx.array,
    classifier: Classifier,
    targets: mx.array,
    smoothing: float,
    pad_id: int,
    max_logits: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Return (`label_smoothed_loss`, the same without smoothing, whose mean is the logarithm of perplexity).

    Neither has a gradient.
    """
    h, targets, counted = _flat(classifier.before(hidden), targets, pad_id)
    smoothed = plain = mx.array(0.0)
    weight, *bias = classifier.weights
    rows = _rows(weight, classifier.after, max_logits)
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        (inputs,) = mx.depends([h[part]], [smoothed, plain])
        z = classifier.after(_product(inputs, weight, *bias))
        nll, picked = _nll(z, targets[part])
        plain = plain + mx.sum(nll * counted[part])
        even = nll + picked - mx.mean(z, axis=-1)
        smoothed = smoothed + mx.sum(((1 - smoothing) * nll + smoothing * even) * counted[part])
    return smoothed, plain


def _flat(hidden: mx.array, targets: mx.array, pad_id: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return (hidden (N, D), targets (N,), 1 where a target counts). Others become 0: padding may have no row."""
    targets = targets.reshape(-1)
    counted = targets != pad_id
    return hidden.reshape(-1, hidden.shape[-1]), mx.where(counted, targets, 0), counted.astype(mx.float32)


def _rows(weight: mx.array, after: After, max_logits: int | None) -> int:
    """The rows of one chunk: fewer where a logit takes more memory."""
    most = MAX_LOGITS if max_logits is None else max_logits
    return max(1, most * BYTES_PER_LOGIT // bytes_per_logit(after) // weight.shape[0])


def _product(h: mx.array, W: mx.array, *bias: mx.array) -> mx.array:
    """h W^T + b (N, V), summed in the type of h, then float32."""
    u = h @ W.T
    for b in bias:
        u = u + b
    return u.astype(mx.float32)


def _changes_nothing(after: After) -> bool:
    u = mx.array(0.0)
    return after(u) is u


def _in_chunks(function: Callable[..., tuple[mx.array, ...]], rows: int) -> Callable[..., tuple[mx.array, ...]]:
    """Return a function as `_function`'s, (h, y, counted, W, b) -> (sum of nll, dh, dW, db), that never takes more than
    `rows` rows at a time."""

    @mx.custom_function
    def loss(h, y, counted, *weights):
        loss_of_rows = mx.value_and_grad(lambda *inputs: function(*inputs)[0], (0, *range(3, 3 + len(weights))))
        total, dh, sums = mx.array(0.0), [], [mx.zeros(weight.shape) for weight in weights]
        for start in range(0, len(y), rows):
            part = slice(start, start + rows)
            # The next chunk begins when nothing of this one is left but its gradients.
            (inputs,) = mx.depends([h[part]], [total, *sums, *dh[-1:]])
            nll, (part_dh, *gradients) = loss_of_rows(inputs, y[part], counted[part], *weights)
            total, sums = total + nll, [sum + gradient for sum, gradient in zip(sums, gradients, strict=True)]
            dh.append(part_dh)
        return total, mx.concatenate(dh), *(sum.astype(weight.dtype) for sum, weight in zip(sums, weights, strict=True))

    @loss.vjp
    def loss_vjp(primals, cotangents, outputs):
        dh, *gradients = [(cotangents[0] * gradient).astype(gradient.dtype) for gradient in outputs[1:]]
        return dh, mx.zeros_like(primals[1]), mx.zeros_like(primals[2]), *gradients

    return cast(Callable[..., tuple[mx.array, ...]], loss)


def _function(smoothing: float, after: After) -> Callable[..., tuple[mx.array, ...]]:
    """Return the loss for one smoothing as an `mx.custom_function`: (h, y, counted, W, b) -> (sum of nll, and for the
    gradient exponentials (N, V), 1 / their sums (N, 1), and the sum of W's rows (D,) or after'(u) (N, V)). It takes no
    b where the classifier has none. Each pass over all logits counts on a CPU, so there are few."""
    linear = _changes_nothing(after)

    @mx.custom_function
    def loss(h, y, counted, W, *bias):
        z = _product(h, W, *bias)  # (N, V)
        if linear:  # the mean over V without a pass over the logits
            more = mx.sum(W.astype(mx.float32), axis=0)  # (D,)
            mean = mx.sum(h.astype(mx.float32) * (more / W.shape[0]), axis=-1)  # (N,)
            for b in bias:
                mean = mean + mx.mean(b.astype(mx.float32))
        else:
            (z,), (more,) = mx.vjp(after, [z], [mx.ones_like(z)])  # logits, their derivatives
            mean = mx.mean(z, axis=-1)
        top = mx.max(z, axis=-1, keepdims=True)
        e = _exp(z - top)
        total = mx.sum(e, axis=-1, keepdims=True)
        lse = (top + mx.log(total))[:, 0]  # (N,)
        picked = mx.take_along_axis(z, y[:, None], axis=-1)[:, 0]
        nll = lse - (1 - smoothing) * picked - smoothing * mean
        return mx.sum(nll * counted), e, 1 / total, more

    @loss.vjp
    def loss_vjp(primals, cotangents, outputs):
        h, y, counted, W, *bias = primals
        V = W.shape[0]
        g = (cotangents[0] * counted)[:, None]  # (N, 1)
        p = outputs[1] * (outputs[2] * g)  # (N, V)
        hit, rest = (1 - smoothing) * g, smoothing / V * g
        if not linear:
            p = (p - rest) * outputs[3]
            hit = hit * mx.take_along_axis(outputs[3], y[:, None], axis=-1)
        low = p.astype(h.dtype)
        # Products add up in float32 by themselves; sums and scatters would add up in their terms' type.
        dh = (low @ W).astype(mx.float32) - hit * W[y]
        dW = (low.T @ h).astype(mx.float32).at[y].add(-hit * h)
        db = [mx.sum(p, axis=0).at[y].add(-hit[:, 0]) for _ in bias]
        if linear:  # the even part, the same for all v, which p lacks
            dh, dW, db = dh - rest * outputs[3], dW - mx.sum(rest * h, axis=0), [d - mx.sum(rest) for d in db]
        gradients = [dW.astype(W.dtype), *(d.astype(b.dtype) for d, b in zip(db, bias, strict=True))]
        return dh.astype(h.dtype), mx.zeros_like(y), mx.zeros_like(counted), *gradients

    return cast(Callable[..., tuple[mx.array, ...]], loss)


def _nll(z: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Return (logsumexp(z) - z[target], z[target]), (N,) each."""
    picked = mx.take_along_axis(z, targets[:, None], axis=-1)[:, 0]
    fused = getattr(mx.fast, "cross_entropy", None)  # MLX 0.31 has none
    if fused is not None and not tuning().exp_as_power:
        return fused(z, targets), picked  # a GPU reads the logits once; a CPU takes 1.8 times as long with it
    top = mx.max(z, axis=-1, keepdims=True)
    lse = (top + mx.log(mx.sum(_exp(z - top), axis=-1, keepdims=True)))[:, 0]
    return lse - picked, picked


def _exp(x: mx.array) -> mx.array:
    if tuning().exp_as_power:
        return mx.power(mx.array(2.0), x * 1.4426950408889634)
    return mx.exp(x)
