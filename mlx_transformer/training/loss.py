"""Label-smoothed cross entropy (section 5.4; Szegedy et al. 2015), fused with the classifier.

N target positions (B*T flattened), V vocabulary, D model. The loss runs the classifier's three steps itself
(`nn/classifier.py`): h = before(hidden), u = h W^T + b and the logits z = after(u). A new option of logits therefore
needs no change here. With smoothing e and lse = logsumexp(z):

    nll_i = lse_i - (1 - e) z_i[y_i] - e mean_v z_i[v]

No one-hot matrix is built. The backward pass reuses the exponentials of the forward pass, since they are the expensive
part on CPUs. dz = softmax(z) - (1 - e) onehot(y) - e/V, and only the softmax is ever stored as (N, V). If `after`
changes the logits, du = dz after'(u), and the derivative after'(u) is stored too.

Many positions times a large vocabulary don't fit into memory: 25,000 times 37,000 logits are 3.7 GB, three times over.
So rows are processed in chunks, one after another. Each chunk computes its gradient together with its loss, up to a
factor that backward supplies. That takes no extra matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

from mlx_transformer.device import tuning
from mlx_transformer.nn.classifier import Classifier

After = Callable[[mx.array], mx.array]
"""`Classifier.after`, an elementwise function of the products u."""
MAX_LOGITS = 1 << 26
"""Most logits in a chunk: 256 MiB in float32."""
FROZEN_LOGITS, FROZEN_ROWS = 1 << 20, 32
"""The same for a classifier that isn't trained, whose gradient needs no sum over chunks; at least so many rows."""
BYTES_PER_LOGIT = 16
"""Memory of a chunk per logit: the logit, its exponential, the softmax and its gradient."""
BYTES_PER_CHANGED_LOGIT = 32
"""The same if `Classifier.after` changes logits: its intermediate values and its derivative are stored too."""
CHUNK_SHARE = 1 / 8
"""Share of a step's memory that a chunk may take."""


def logits_within(memory: float | None) -> int:
    """Most logits in a chunk if a step may take `memory` GB; None: unlimited, so `MAX_LOGITS`."""
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
    """Sum nll over the positions whose target is not `pad_id`; a float32 scalar in nats.

    hidden (..., D), target ids (...). Divide by the number of target tokens for the mean; a batch of only padding
    gives 0. `max_logits`: most logits in a chunk; None: `MAX_LOGITS`.
    """
    h, targets, counted = _flat(classifier.before(hidden), targets, pad_id)
    weights = classifier.weights
    rows = _rows(classifier, weights[0], max_logits)
    function = _function(smoothing, classifier.after)
    if len(targets) > rows:
        function = _in_chunks(function, rows, classifier.trained)
    return function(h, targets, counted, *weights)[0]


def losses(
    hidden: mx.array,
    classifier: Classifier,
    targets: mx.array,
    smoothing: float,
    pad_id: int,
    max_logits: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Return (`label_smoothed_loss`, the same without smoothing), without gradients, for validation.

    The mean of the second is the logarithm of the perplexity.
    """
    h, targets, counted = _flat(classifier.before(hidden), targets, pad_id)
    smoothed = plain = mx.array(0.0)
    weight, *bias = classifier.weights
    rows = _rows(classifier, weight, max_logits)
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
    """Return (hidden (N, D), targets (N,), counted (N,): 1 for targets other than pad_id, else 0).

    Padding targets become 0, since the classifier may have no row for pad_id.
    """
    targets = targets.reshape(-1)
    counted = targets != pad_id
    return hidden.reshape(-1, hidden.shape[-1]), mx.where(counted, targets, 0), counted.astype(mx.float32)


def _rows(classifier: Classifier, weight: mx.array, max_logits: int | None) -> int:
    """Rows in a chunk; fewer if a logit takes more memory."""
    most, width = MAX_LOGITS if max_logits is None else max_logits, weight.shape[0]
    if not classifier.trained:
        most = min(most, max(FROZEN_LOGITS, FROZEN_ROWS * width))
    return max(1, most * BYTES_PER_LOGIT // bytes_per_logit(classifier.after) // width)


def _product(h: mx.array, W: mx.array, *bias: mx.array) -> mx.array:
    """h W^T + b (N, V), computed in h's type and returned as float32."""
    u = h @ W.T
    for b in bias:
        u = u + b
    return u.astype(mx.float32)


def _changes_nothing(after: After) -> bool:
    u = mx.array(0.0)
    return after(u) is u


def _in_chunks(
    function: Callable[..., tuple[mx.array, ...]], rows: int, trained: bool
) -> Callable[..., tuple[mx.array, ...]]:
    """Wrap the function of `_function` so that it works on `rows` rows at a time.

    Returns (h, y, counted, W, b) -> (sum of nll, dh, dW, db), without dW and db unless the classifier is `trained`.
    """

    @mx.custom_function
    def loss(h, y, counted, *weights):
        learned = weights if trained else ()
        loss_of_rows = mx.value_and_grad(lambda *inputs: function(*inputs)[0], (0, *range(3, 3 + len(learned))))
        total, dh, sums = mx.array(0.0), [], [mx.zeros(weight.shape) for weight in learned]
        for start in range(0, len(y), rows):
            part = slice(start, start + rows)
            # The next chunk waits until only this chunk's gradients are left in memory.
            (inputs,) = mx.depends([h[part]], [total, *sums, *dh[-1:]])
            nll, found = loss_of_rows(inputs, y[part], counted[part], *weights)
            part_dh, *gradients = found if learned else [found]
            total, sums = total + nll, [sum + gradient for sum, gradient in zip(sums, gradients, strict=True)]
            dh.append(part_dh)
        return total, mx.concatenate(dh), *(sum.astype(weight.dtype) for sum, weight in zip(sums, learned, strict=True))

    @loss.vjp
    def loss_vjp(primals, cotangents, outputs):
        dh, *gradients = [(cotangents[0] * gradient).astype(gradient.dtype) for gradient in outputs[1:]]
        gradients = gradients or [mx.zeros_like(weight) for weight in primals[3:]]
        return dh, mx.zeros_like(primals[1]), mx.zeros_like(primals[2]), *gradients

    return cast(Callable[..., tuple[mx.array, ...]], loss)


def _function(smoothing: float, after: After) -> Callable[..., tuple[mx.array, ...]]:
    """The loss as an `mx.custom_function`: (h, y, counted, W, b) -> (sum of nll, exponentials (N, V), 1 / their sums
    (N, 1), more). There is no b if the classifier has none.

    All outputs but the first are for the gradient; `more` is the sum of W's rows (D,), or after'(u) (N, V). There are
    few passes over all logits, since each costs time on a CPU.
    """
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
        nll = lse - (1 - smoothing) * picked - smoothing * mean  # (N,)
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
        # Matrix products accumulate in float32 anyway; sums and scatters would accumulate in their terms' type.
        dh = (low @ W).astype(mx.float32) - hit * W[y]  # (N, D)
        dW = (low.T @ h).astype(mx.float32).at[y].add(-hit * h)  # (V, D)
        db = [mx.sum(p, axis=0).at[y].add(-hit[:, 0]) for _ in bias]
        if linear:  # the smoothing term -e/V, the same for all v, which p lacks
            dh, dW, db = dh - rest * outputs[3], dW - mx.sum(rest * h, axis=0), [d - mx.sum(rest) for d in db]
        gradients = [dW.astype(W.dtype), *(d.astype(b.dtype) for d, b in zip(db, bias, strict=True))]
        return dh.astype(h.dtype), mx.zeros_like(y), mx.zeros_like(counted), *gradients

    return cast(Callable[..., tuple[mx.array, ...]], loss)


def _nll(z: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Return (logsumexp(z) - z[target], z[target]), each (N,), for logits z (N, V)."""
    picked = mx.take_along_axis(z, targets[:, None], axis=-1)[:, 0]
    fused = getattr(mx.fast, "cross_entropy", None)  # missing in MLX 0.31
    if fused is not None and not tuning().exp_as_power:
        return fused(z, targets), picked  # on a GPU it reads the logits once; on a CPU it takes 1.8 times as long
    top = mx.max(z, axis=-1, keepdims=True)
    lse = (top + mx.log(mx.sum(_exp(z - top), axis=-1, keepdims=True)))[:, 0]
    return lse - picked, picked


def _exp(x: mx.array) -> mx.array:
    if tuning().exp_as_power:
        return mx.power(mx.array(2.0), x * 1.4426950408889634)
    return mx.exp(x)
