"""The graphs of the target `coreml`: every extent is known and no operator computes one.

    encoder_coreml     source to memory and to every decoder layer's keys and values of it (an encoder alone: to what
                       its head gives)
    decoder_coreml     one token of each row, at that row's own position, over buffers of fixed length

They are built from the same modules as the others. CoreML's provider leaves what it hasn't (`OPERATORS`) to the CPU and
splits the graph there, so masks, positions and the place in a buffer are arithmetic on `position_ids`: no Where, no
Range, no comparison, no If.

Shapes: B rows, S source and T target positions, all fixed; K key-value heads, d one head, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass
from onnxscript import optimizer

from export.graph.builder import IR_VERSION, GraphBuilder
from export.interface import DECODER_COREML, ENCODER_COREML, Request
from export.nn.cache import Cache, KeyValues, LayerCache
from export.nn.masks import Mask
from export.nn.model import Transformer
from export.nn.positions import PositionIds
from export.nn.primitives import Op, table
from export.nn.ssru import LayerState, OneStep
from export.nn.taps import within
from export.targets.attention import AttentionTap
from export.targets.heads import head_outputs
from export.targets.sentence_embedding import vector_outputs

from .rows import split_rows
from .shape import HIDDEN

# The operators that CoreML's provider takes in an ML program: onnxruntime's list coreml_supported_mlprogram_ops.md
# (main, commit 04f568d869ec, before 1.31), as far as it is used here, and Gather, which that list forgets
# (gather_op_builder.cc, since microsoft/onnxruntime#24387).
OPERATORS = frozenset(
    "Add Cast Clip Concat Div Gather Gelu Identity LayerNormalization MatMul Mul Pow ReduceMean Relu Reshape Sigmoid "
    "Softmax Split Sqrt Sub Tanh Transpose Unsqueeze".split()
)


class CoreMLLayerCache(LayerCache):
    """Buffers (B, K, T, d); `extend` writes at one position of each row and hands on the whole buffers."""

    def __init__(self, keys: ir.Value, values: ir.Value, at_position: ir.Value, elsewhere: ir.Value):
        super().__init__(keys, values)
        self.at_position, self.elsewhere = at_position, elsewhere

    def extend(self, op: Op, k: ir.Value, v: ir.Value) -> KeyValues:
        """Write (B, K, 1, d); returns (B, K, T, d)."""
        keys, values = self.contents()
        self.keys = op.Add(op.Mul(keys, self.elsewhere), op.Mul(k, self.at_position))
        self.values = op.Add(op.Mul(values, self.elsewhere), op.Mul(v, self.at_position))
        return self.keys, self.values


class CoreMLCache(Cache):
    """A cache of buffers: all positions and masks are computed from the position of each row."""

    def __init__(
        self,
        layers: Sequence[LayerCache | LayerState],
        positions: PositionIds,
        mask: Mask,
        cross: Sequence[KeyValues] | None,
        cross_mask: Mask,
    ):
        self.layers, self.positions, self.mask, self.cross, self.cross_mask = layers, positions, mask, cross, cross_mask

    def position_ids(self, op: Op, ids: ir.Value) -> PositionIds:
        return self.positions

    def self_mask(self, op: Op, position_ids: PositionIds) -> Mask:
        return self.mask


class CoreMLGraphBuilder(GraphBuilder):
    """A graph whose inputs have known extents, so that everything about shapes is a constant."""

    def model(self) -> ir.Model:
        fold_shapes(self.graph, self.tapped)
        split_rows(ir.Model(self.graph, ir_version=IR_VERSION))
        return super().model()


def encoder_coreml(request: Request) -> GraphBuilder:
    """
    input_ids (B, S) ------> embedding --> Encoder --> last_hidden_state (B, S, D) --> present.N.encoder.{key,value}
    attention_mask (B, S) ----> mask -------^               \\--> logits (B, S, V)                      (B, K, S, d)

    Padding is on the right. The keys and values are an encoder-decoder's, the logits an encoder's alone, or what else
    its head gives; beside them a text's vector, where one is asked for.
    """
    assert request.shape is not None
    g = CoreMLGraphBuilder.declared(ENCODER_COREML, request)
    model, length = Transformer(request.config), request.shape.source
    source = g.source()
    tokens = source.pop("source_mask")
    mask = padding_mask(g.op, tokens)
    index = table(g.op, "positions.source", lambda: np.arange(length)[None])
    places = table(g.op, "positions.distances", lambda: np.arange(length) - np.arange(length)[:, None])
    position_ids = PositionIds(index, places, HIDDEN)
    x = model.embedded(g.op, **source)
    memory = model.encoder(g.op, x, position_ids, mask, within(g.tap, "encoder"))
    g.give(memory=memory)
    if request.config.has_decoder:
        g.give(cross=model.decoder.cross_keys_values(g.op, memory))
    else:
        shares = partial(pooling_weights, request=request)
        head = request.config.head
        way = "cls" if head.pooling == "first" else head.pooling
        weights = shares(g.op, tokens, way) if head.per_row else None
        g.give(**head_outputs(g.op, model, memory, weights, g.tap))
        g.give(**vector_outputs(g.op, request, memory, tokens, shares))
    return g


def decoder_coreml(request: Request) -> GraphBuilder:
    """
    input_ids (B, 1) ----------------------------------> embedding --> Decoder --> classifier --> logits (B, 1, V)
    position_ids (B, 1) --------------------------> positions, mask --^  ^  ^ \\--> present.N.decoder.{key,value}
    past_key_values.N.decoder.{key,value} (B, K, T, d) -----------------/  |                         (B, K, T, d)
    past_key_values.N.encoder.{key,value} (B, K, S, d), encoder_attention_mask (B, S)

    A decoder alone has no encoder's inputs, and past_key_values.N.{key,value}; a layer with an SSRU has
    past_key_values.N.decoder.state (B, D) in place of these. Anything behind a row's position in a buffer is not seen.
    Writing at a position again replaces what it held.
    """
    assert request.shape is not None
    g = CoreMLGraphBuilder.declared(DECODER_COREML, request)
    model, ids = Transformer(request.config), g.inputs["target_ids"]
    positions, at_position, elsewhere, mask = _at(g.op, g.inputs["positions"], request.shape.target)
    recurrent = request.config.recurrent
    layers: list[LayerCache | LayerState]
    if recurrent:
        layers = [OneStep(g.op.Unsqueeze(state, [1])) for state in g.entries("cache")]
    else:
        layers = [CoreMLLayerCache(*buffers, at_position, elsewhere) for buffers in g.pairs("cache")]
    tokens = g.inputs.get("source_mask")
    cross_mask = None if tokens is None else padding_mask(g.op, tokens)
    state = CoreMLCache(layers, positions, mask, g.pairs("cross") or None, cross_mask)
    attention = AttentionTap(model, request.attention_layer, g.tap)
    logits = model.step(g.op, ids, state, tap=attention.tap)
    caches = [layer.contents() for layer in layers]
    extents = [request.shape.rows, request.config.d_model]
    cache = [(g.op.Reshape(*state, extents),) for state in caches] if recurrent else caches
    g.give(logits=logits, cache=cache, attention=attention.mean(g.op, ids))
    return g


BUILDERS: dict[str, dict[str, Callable[[Request], GraphBuilder]]] = {
    "encoder-decoder": {ENCODER_COREML: encoder_coreml, DECODER_COREML: decoder_coreml},
    "decoder": {DECODER_COREML: decoder_coreml},
    "encoder": {ENCODER_COREML: encoder_coreml},
}


def padding_mask(op: Op, tokens: ir.Value) -> ir.Value:
    """Turn tokens (B, S), 1 on tokens, into (B, 1, 1, S): 0 on tokens, HIDDEN on padding."""
    hidden = op.Sub(1.0, op.Cast(tokens, to=ir.DataType.FLOAT))
    return op.Unsqueeze(op.Mul(hidden, HIDDEN), [1, 2])


def pooling_weights(op: Op, tokens: ir.Value, way: str, request: Request) -> ir.Value:
    """Turn tokens (B, S), 1 on tokens, into how much of each position there is in a row's vector (B, 1, S), in every
    way of pooling but the maximum."""
    assert request.shape is not None
    rows, length = request.shape.rows, request.shape.source
    if way == "cls":
        return table(op, "head.first", lambda: np.tile(np.eye(1, length, dtype=np.float32), (rows, 1, 1)))
    real = op.Cast(tokens, to=ir.DataType.FLOAT)
    if way == "last":
        following = table(op, "pooling.following", lambda: np.minimum(np.arange(length) + 1, length - 1))
        inside = table(op, "pooling.inside", lambda: (np.arange(length) < length - 1).astype(np.float32))
        return op.Unsqueeze(op.Sub(real, op.Mul(op.Gather(real, following, axis=1), inside)), [1])
    if way == "weighted_mean":
        real = op.Mul(real, table(op, "pooling.places", lambda: np.arange(1, length + 1, dtype=np.float32)))
    mean = op.ReduceMean(real, [1], keepdims=1)
    if way == "mean_sqrt_len":
        return op.Unsqueeze(op.Div(real, op.Sqrt(op.Mul(mean, float(length)))), [1])
    return op.Unsqueeze(op.Div(op.Div(real, mean), float(length)), [1])


def _at(op: Op, index: ir.Value, length: int) -> tuple[PositionIds, ir.Value, ir.Value, ir.Value]:
    """Turn rows' positions (B, 1), also with their distances (B, 1, T) to the keys; 1 there and 0 elsewhere (B, 1, T,
    1), the opposite, and a mask (B, 1, 1, T)."""
    position = op.Unsqueeze(op.Cast(index, to=ir.DataType.FLOAT), [2])
    after = op.Sub(table(op, "positions.places", lambda: np.arange(length, dtype=np.float32)), position)
    elsewhere = op.Unsqueeze(op.Clip(op.Mul(after, after), 0.0, 1.0), [3])
    hidden = op.Unsqueeze(op.Mul(op.Clip(after, 0.0, 1.0), HIDDEN), [2])
    positions = PositionIds(index, op.Cast(after, to=ir.DataType.INT64))
    return positions, op.Sub(1.0, elsewhere), elsewhere, hidden


def fold_shapes(graph: ir.Graph, named: Sequence[ir.Value]) -> None:
    """Turn what is computed from known extents into constants. A Reshape that changes nothing is removed; the name of
    its output stays if it is one of the `named`."""
    made = [(x.producer(), x) for x in named]
    reshaped = [(node.inputs[0], x) for node, x in made if node is not None and node.op_type == "Reshape"]
    model = ir.Model(graph, ir_version=IR_VERSION)
    optimizer.fold_constants(model)
    for node in graph:  # the builder's guesses, made before anything was folded
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    ShapeInferencePass(data_prop=False)(model)
    optimizer.fold_constants(model)
    LiftConstantsToInitializersPass(lift_all_constants=True)(model)
    for node in list(graph):
        if node.op_type == "Reshape" and not node.outputs[0].is_graph_output():
            before, after = node.inputs[0], node.outputs[0]
            if before is not None and before.shape is not None and before.shape == after.shape:
                ir.convenience.replace_all_uses_with(after, before, replace_graph_outputs=True)
    for before, after in reshaped:
        if before is not None and not after.uses() and not after.is_graph_output():
            before.name, after.name = after.name, f"{after.name}/replaced"
