"""The results of the head of an encoder alone, as outputs of a graph."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from export.nn.model import Transformer
from export.nn.primitives import Op
from export.nn.taps import Tap
from mlx_transformer.core.heads import SPANS


def head_outputs(
    op: Op,
    model: Transformer,
    memory: ir.Value,
    weights: ir.Value | None,
    tap: Tap,
    placed: Callable[[ir.Value], ir.Value] = lambda y: y,
) -> dict[str, ir.Value]:
    """Return the outputs by value, of the last layer (B, S, D) and, where the head gives one vector of each row, the
    `weights` (B, 1, S) of its positions. placed: puts what is given for tokens (N, ...) in their places (B, S, ...)."""
    kind = model.config.head.kind
    logits = placed(model.logits(op, model.transformed(op, memory, weights, tap=tap), tap=tap))
    if kind == "spans":
        return {value: op.Gather(logits, i, axis=2) for i, value in enumerate(SPANS)}
    return {} if kind == "hidden" else {"pooled" if kind == "pooled" else "logits": logits}
