"""The graphs in standard operators, any shape; `export/interface.py` declares their inputs and outputs.

    encoder-decoder   encoder_model, decoder_model, decoder_with_past_model, decoder_model_merged
    decoder           model
    encoder           model

Shapes: B batch, S source, T target tokens of this run, P past tokens, N number of a layer, K key-value heads, d_k, d_v
widths of a head, D model, V vocabulary, W numbers of a text's vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from export.graph.builder import GraphBuilder
from export.interface import DECODER_FIRST, DECODER_MERGED, DECODER_NEXT, ENCODER, MODEL, Request
from export.nn.cache import Cache, KeyValues, LayerCache, empty_layers
from export.nn.masks import pooling_weights
from export.nn.model import Transformer
from export.nn.primitives import Op
from export.nn.ssru import LayerState
from export.targets.attention import AttentionTap, head_outputs
from export.targets.sentence_embedding import vector_outputs


def encoder_model(request: Request) -> GraphBuilder:
    """
    input_ids (B, S) ------> embedding --> Encoder --> last_hidden_state (B, S, D)
    attention_mask (B, S) --> positions ----^
                          \\-> mask ---------^

    Or inputs_embeds (B, S, D) ------------^ in place of input_ids.
    """
    g = GraphBuilder.declared(ENCODER, request)
    g.give(memory=Transformer(request.config).encode(g.op, **g.source(), tap=g.tap))
    return g


def decoder_model(request: Request) -> GraphBuilder:
    """
    input_ids (B, T) ------------------> embedding --> Decoder --> classifier --> logits (B, T, V)
    encoder_attention_mask (B, S) ------> mask -----------^  \\--> present.N.decoder.{key,value} (B, K, T, d)
    encoder_hidden_states (B, S, D) ----> cross K/V ------^
                                                  \\------------> present.N.encoder.{key,value} (B, K, S, d)
    """
    g = GraphBuilder.declared(DECODER_FIRST, request)
    return _decoder(g, request, lambda model: model.decoder.cross_keys_values(g.op, g.inputs["memory"]))


def decoder_with_past_model(request: Request) -> GraphBuilder:
    """
    input_ids (B, T) -----------------------------------> embedding --> Decoder --> classifier --> logits (B, T, V)
    encoder_attention_mask (B', S) -----------------------> mask --------^  ^ \\--> present.N.decoder.{key,value}
    past_key_values.N.decoder.{key,value} (B, K, P, d) --------------------/  |                        (B, K, P+T, d)
    past_key_values.N.encoder.{key,value} (B', K, S, d) ---------------------/

    B' sentences. In a beam search each has B/B' rows side by side, its beams; otherwise B' = B. A layer with an SSRU
    has past_key_values.N.decoder.state (B, D) instead of keys and values, and positions come in as position_ids.
    """
    g = GraphBuilder.declared(DECODER_NEXT, request)
    return _decoder(g, request, lambda model: g.pairs("cross"))


def decoder_model_merged(request: Request) -> GraphBuilder:
    """
    input_ids (B, T) -----------------------------------> embedding --> Decoder --> classifier --> logits (B, T, V)
    encoder_attention_mask (B, S) ------------------------> mask --------^  ^ \\--> present.N.decoder.{key,value}
    past_key_values.N.decoder.{key,value} (B, K, P, d) --------------------/  |                        (B, K, P+T, d)
    past_key_values.N.encoder.{key,value} (B, K, S, d) --\\                   |
    encoder_hidden_states (B, S, D) ----> cross K/V ---- If --> present.N.encoder.{key,value} (B, K, S, d)
    use_cache_branch (1) --------------------------------/

    First run: use_cache_branch false and an empty past (P = 0). Later runs don't read encoder_hidden_states.
    """
    g = GraphBuilder.declared(DECODER_MERGED, request)
    count = 2 * request.config.decoder_layers

    def branch(name: str, values: Callable[[Op], Sequence[KeyValues]]) -> ir.Graph:
        outputs = [ir.Value(name=f"{name}.{i}") for i in range(count)]
        return g.builder.subgraph(lambda op: [x for pair in values(op) for x in pair], [], outputs, name=name)

    def cross(model: Transformer) -> list[KeyValues]:
        reuse = branch("cached", lambda op: [(op.Identity(k), op.Identity(v)) for k, v in g.pairs("cross")])
        compute = branch("computed", lambda op: model.decoder.cross_keys_values(op, g.inputs["memory"]))
        flat = g.op.If(g.inputs["later"], then_branch=reuse, else_branch=compute, _outputs=count)
        return list(zip(flat[::2], flat[1::2], strict=True))

    return _decoder(g, request, cross)


def _decoder(g: GraphBuilder, request: Request, cross: Callable[[Transformer], Sequence[KeyValues]]) -> GraphBuilder:
    """A decoder's step. The decoders differ only in `cross`, which gives the source's keys and values."""
    model = Transformer(request.config)
    attention = AttentionTap(model, request.attention_layer, g.tap)
    if request.config.recurrent:
        layers = [LayerState(state) for state in g.entries("cache")]
    else:
        layers = [LayerCache(*pair) for pair in g.pairs("cache")]
    layers = layers or empty_layers(request.config)
    of_source, ids = cross(model), g.inputs["target_ids"]
    state = Cache(g.op, layers, of_source, g.inputs["source_mask"], index=g.inputs.get("positions"))
    logits = model.step(g.op, ids, state, tap=attention.tap)
    cache = [layer.contents() for layer in layers]
    g.give(logits=logits, cache=cache, cross=of_source, attention=attention.mean(g.op, ids))
    return g


def causal_model(request: Request) -> GraphBuilder:
    """
    input_ids (B, T) ---------------------------> embedding --> Decoder --> classifier --> logits (B, T, V)
    position_ids (B, T) ---------------------------> positions --^  ^ \\--> present.N.{key,value} (B, K, P+T, d)
    attention_mask (B, P+T) -----------------------> mask --------^ |
    past_key_values.N.{key,value} (B, K, P, d) --------------------/
    """
    g = GraphBuilder.declared(MODEL, request)
    layers = [LayerCache(*pair) for pair in g.pairs("cache")]
    cache = Cache(g.op, layers, tokens=g.inputs["target_mask"], index=g.inputs["positions"])
    logits = Transformer(request.config).step(g.op, g.inputs["target_ids"], cache, tap=g.tap)
    g.give(logits=logits, cache=[layer.contents() for layer in layers])
    return g


def encoder_only_model(request: Request) -> GraphBuilder:
    """
    input_ids (B, L) ------> embedding --> Encoder --> last_hidden_state (B, L, D)
    attention_mask (B, L) --> positions ----^  \\----> head --> logits (B, L, V)
                          \\-> mask ---------^

    Other heads (`core/heads.py`) give logits (B, C) or (B, L, C) of C classes, start_logits and end_logits (B, L),
    pooler_output (B, D), or nothing more. inputs_embeds (B, L, D) may replace input_ids. A model of text vectors
    also gives sentence_embedding (B, W).
    """
    g = GraphBuilder.declared(MODEL, request)
    model, head = Transformer(request.config), request.config.head
    source = g.source()
    memory = model.encode(g.op, **source, tap=g.tap)
    weights = pooling_weights(g.op, source["source_mask"], head.pooling) if head.per_row else None
    g.give(memory=memory, **head_outputs(g.op, model, memory, weights, g.tap))
    g.give(**vector_outputs(g.op, request, memory, source["source_mask"]))
    return g


BUILDERS: dict[str, dict[str, Callable[[Request], GraphBuilder]]] = {
    "encoder-decoder": {
        ENCODER: encoder_model,
        DECODER_FIRST: decoder_model,
        DECODER_NEXT: decoder_with_past_model,
        DECODER_MERGED: decoder_model_merged,
    },
    "decoder": {MODEL: causal_model},
    "encoder": {MODEL: encoder_only_model},
}
