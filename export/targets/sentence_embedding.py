"""Text vectors as outputs of an encoder's graph: `core/text_embedding.py` as operators, float32 in every precision.

If `in_graph` leaves the vector out, the caller computes it from the encoder's output.

Shapes: B rows, L positions, D model, P ways of pooling, W numbers of a vector.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.interface import SENTENCE_EMBEDDING, Request
from export.nn.feedforward import ACTIVATIONS
from export.nn.marks import extent
from export.nn.masks import pooling_weights
from export.nn.primitives import Op, full_precision, scope, table
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.text_embedding import SMALLEST_NORM, TextEmbedding
from mlx_transformer.system.tensors import to_float32

HIDDEN = -1e38
"""Added to the numbers of padding before taking a maximum."""
LANES = 16
"""Numbers in a register. A dense layer is padded to a multiple of this width with zeros, which all activations keep.
Otherwise the last numbers of some rows would be summed in another order, and a vector would depend on its batch."""


def in_graph(config: TransformerConfig, embedding: TextEmbedding | None) -> TextEmbedding | None:
    """The part of a text's vector that a graph computes; None if it computes none.

    Only encoder-only models have a part in the graph. A graph can't tell a prompt's tokens from a text's, so if the
    prompt isn't pooled, the caller computes the vector.
    """
    if embedding is None or config.has_decoder or not embedding.prompt_counts:
        return None
    return embedding.arithmetic


def row_weights(op: Op, tokens: ir.Value, way: str) -> ir.Value:
    """Weights of each row's positions for a way of pooling other than "max", e.g. "mean": tokens (B, L) -> (B, 1, L).

    Tokens are 1, padding is 0 and may be anywhere.
    """
    if way in ("cls", "mean"):
        return pooling_weights(op, tokens, "first" if way == "cls" else "mean")
    if way == "last":
        from_end = op.CumSum(tokens, 1, reverse=1)
        counts = op.Mul(tokens, op.Cast(op.Equal(from_end, 1), to=ir.DataType.INT64))
    else:
        counts = op.Mul(tokens, op.CumSum(tokens, 1)) if way == "weighted_mean" else tokens
    with full_precision(op):
        share = op.Cast(counts, to=ir.DataType.FLOAT)
        if way != "last":
            total = op.Max(op.ReduceSum(share, [1], keepdims=1), 1.0)
            share = op.Div(share, op.Sqrt(total) if way == "mean_sqrt_len" else total)
        return op.Unsqueeze(share, [1])


def vector_outputs(op: Op, request: Request, memory: ir.Value, tokens: ir.Value) -> dict[str, ir.Value]:
    """The requested outputs {value: output}, e.g. "vector", from the last layer (B, L, D) and its tokens (B, L)."""
    if request.embedding is None:
        return {}
    with scope(op, SENTENCE_EMBEDDING, "TextEmbedding"):
        e, outputs = request.embedding, {"vector": _vector(op, request.embedding, memory, tokens)}
        if e.sparse:
            outputs["token_weights"] = _token_weights(op, e, memory, tokens)
        if e.multi:
            first = row_weights(op, tokens, "cls")
            outputs["token_vectors"] = _token_vectors(op, e, memory, tokens, first)
        return outputs


def _token_weights(op: Op, embedding: TextEmbedding, memory: ir.Value, tokens: ir.Value) -> ir.Value:
    """(B, L, D) -> (B, L), 0 on padding."""
    with full_precision(op):
        real = op.Cast(tokens, to=ir.DataType.FLOAT)
        return op.Mul(op.Relu(op.Gather(_linear(op, embedding, "sparse", memory), 0, axis=2)), real)


def _token_vectors(op: Op, embedding: TextEmbedding, memory: ir.Value, tokens: ir.Value, first: ir.Value) -> ir.Value:
    """(B, L, D) -> (B, L, W), 0 on padding and on the first token. first (B, 1, L): 1 on the first token."""
    with full_precision(op):
        x = _linear(op, embedding, "multi", memory)
        later = op.Sub(op.Cast(tokens, to=ir.DataType.FLOAT), op.Gather(first, 0, axis=1))
        return op.Mul(_of_unit_length(op, x, 2, embedding.multi or 0), op.Unsqueeze(later, [2]))


def _vector(op: Op, embedding: TextEmbedding, memory: ir.Value, tokens: ir.Value) -> ir.Value:
    """(B, L, D) -> (B, W)."""
    shares = {way: row_weights(op, tokens, way) for way in embedding.pooling if way != "max"}
    with full_precision(op):
        parts = [
            _largest(op, memory, tokens) if way == "max" else op.MatMul(shares[way], memory)
            for way in embedding.pooling
        ]
        x = op.Concat(*parts, axis=2) if len(parts) > 1 else parts[0]
        x = op.Gather(_through_dense(op, embedding, x), 0, axis=1)
        if embedding.normalize:
            x = _of_unit_length(op, x, 1, extent(x, 1))
        width = embedding.width(extent(memory, 2))
        return x if width == extent(x, 1) else op.Slice(x, [0], [width], [1])


def _of_unit_length(op: Op, x: ir.Value, axis: int, width: int) -> ir.Value:
    length = op.Sqrt(op.Mul(op.ReduceMean(op.Mul(x, x), [axis], keepdims=1), float(width)))
    return op.Div(x, op.Clip(length, SMALLEST_NORM))


def _largest(op: Op, memory: ir.Value, tokens: ir.Value) -> ir.Value:
    """The maximum of each column over a row's tokens, 0 for a row without tokens: (B, L, D) -> (B, 1, D)."""
    real = op.Unsqueeze(op.Cast(tokens, to=ir.DataType.FLOAT), [2])
    seen = op.Add(memory, op.Mul(op.Sub(1.0, real), HIDDEN))
    return op.Mul(op.ReduceMax(seen, [1], keepdims=1), op.ReduceMax(real, [1], keepdims=1))


def _through_dense(op: Op, embedding: TextEmbedding, x: ir.Value) -> ir.Value:
    """(B, 1, P D) -> (B, 1 or 2, W) with equal rows; dense layers pad W with zeros to a multiple of `LANES`."""
    if embedding.dense:  # ONNX Runtime sums the product of a single row in another order than that of several rows
        x = op.Concat(x, x, axis=1)
    for i, layer in enumerate(embedding.dense):
        x = _linear(op, embedding, f"dense.{i}", x, layer.bias, LANES)
        x = x if layer.activation == "identity" else ACTIVATIONS[layer.activation](op, x)
    return x


def _linear(
    op: Op, embedding: TextEmbedding, layer: str, x: ir.Value, has_bias: bool = True, lanes: int = 1
) -> ir.Value:
    """W x + b, padded with zeros to a multiple of `lanes`; x may be padded too."""
    width = extent(x, 2)
    weight, *bias = (
        table(
            op, f"{SENTENCE_EMBEDDING}.{name}", lambda name=name: _as_multiplied(embedding.weights[name], width, lanes)
        )
        for name in (f"{layer}.weight", f"{layer}.bias")[: 1 + has_bias]
    )
    x = op.MatMul(x, weight)
    return op.Add(x, *bias) if bias else x


def _as_multiplied(array: NDArray, width: int, lanes: int) -> NDArray:
    """A bias (W,), or the transpose of a matrix (W, up to `width`), padded with zeros, in float32."""
    behind = [(0, -len(array) % lanes), *((0, width - columns) for columns in array.shape[1:])]
    return np.ascontiguousarray(np.pad(to_float32(array), behind).T)
