"""The simpler simple recurrent unit (SSRU), which can replace a decoder's self-attention (Kim et al. 2019, "From
Research to Production and Back: Ludicrously Fast Neural Machine Translation", section 3.3).

    u_t = x_t W    f_t = sigmoid(x_t W_f + b_f)    c_t = f_t c_{t-1} + (1 - f_t) u_t    y_t = relu(c_t)

u and f are computed for all positions at once; the recurrence of c takes ceil(log2 T) rounds.

Shapes: B batch, T new positions, R rows (sentences x beams), D model.
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mlx_transformer.core.config import TransformerConfig

from .feedforward import relu


class LayerState:
    """The cache of a layer: c of the last position (R, D), before the ReLU; None (zeros) at the start."""

    def __init__(self, state: mx.array | None = None) -> None:
        self.state = state

    def extend(self, f: mx.array, v: mx.array) -> mx.array:
        """Continue the recurrence with f and v = (1 - f) u, both (R, T, D); return c of each new position."""
        c = recurrence(f, v, self.state)
        self.state = c[:, -1]
        return c

    def take(self, rows: mx.array) -> None:
        """Select rows by index (R',), which may repeat."""
        if self.state is not None:
            self.state = mx.take(self.state, rows, axis=0)

    def arrays(self) -> list[mx.array]:
        return [] if self.state is None else [self.state]


class SSRU(nn.Module):
    """Replaces self-attention by a gated running average of the inputs, with a forget gate for each feature."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.input_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.forget_proj = nn.Linear(config.d_model, config.d_model)

    def __call__(self, x: mx.array, past: LayerState | None = None) -> mx.array:
        """(B, T, D) -> (B, T, D), continuing from the earlier positions in `past`."""
        f = mx.sigmoid(self.forget_proj(x))  # (B, T, D)
        v = (1 - f) * self.input_proj(x)  # (B, T, D)
        return relu((LayerState() if past is None else past).extend(f, v))


def recurrence(f: mx.array, v: mx.array, state: mx.array | None = None) -> mx.array:
    """c_t = f_t c_{t-1} + v_t along the second axis, (B, T, D) -> (B, T, D). c_{-1} is `state` (B, D), or 0.

    A parallel scan (Hillis and Steele 1986): for s = 1, 2, 4, ..., positions t - s and t combine to
    (f_{t-s} f_t, f_t v_{t-s} + v_t), so that each round doubles the number of positions in c_t. A cumulative product of
    f with a division would be simpler, but loses all precision where an f is near 0.
    """
    if state is not None:
        first = v[:, :1] + f[:, :1] * state[:, None]
        v = first if v.shape[1] == 1 else mx.concatenate([first, v[:, 1:]], axis=1)
    s = 1
    while s < f.shape[1]:
        v = mx.concatenate([v[:, :s], v[:, s:] + f[:, s:] * v[:, :-s]], axis=1)
        f = mx.concatenate([f[:, :s], f[:, s:] * f[:, :-s]], axis=1)
        s *= 2
    return v
