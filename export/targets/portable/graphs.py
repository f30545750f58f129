"""Which graphs exist, their inputs, outputs and dynamic axes, by the names that Optimum and transformers.js expect.

    encoder-decoder   encoder_model, decoder_model, decoder_with_past_model, decoder_model_merged
    decoder           model
    encoder           model

Shapes: B batch, S source, T target tokens of this run, P past ones, N layers, K key-value heads, d_k and d_v one head's
widths, D model, V vocabulary. Ids and masks are int64, everything else float32. `attention`: the layer whose
cross_attention (B, T, S) is an output too (`targets/attention.py`); None: no such output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from export.nn.cache import Cache, KeyValues, LayerCache, cache_shape
from export.nn.model import Transformer
from export.nn.primitives import Op
from export.targets.attention import Watch
from export.targets.graph import BATCH, GraphBuilder
from mlx_transformer.core.config import TransformerConfig

ENCODER_DECODER = ("encoder_model", "decoder_model", "decoder_with_past_model", "decoder_model_merged")

SOURCE, TARGET, PAST = "encoder_sequence_length", "decoder_sequence_length", "past_decoder_sequence_length"
TOTAL = f"{PAST} + {TARGET}"
# Where cached keys and values of the source come in, several rows (the beams of one sentence) may share one sentence's.
SENTENCES = "sentences"


def encoder_model(config: TransformerConfig, inputs_embeds: bool = False) -> GraphBuilder:
    """
    input_ids (B, S) ------> embedding --> Encoder --> last_hidden_state (B, S, D)
    attention_mask (B, S) --> positions ----^
                          \\-> mask ---------^

    Or inputs_embeds (B, S, D) ------------^ in place of input_ids.
    """
    g = GraphBuilder("encoder_model")
    ids, vectors = g.source(config.d_model, inputs_embeds, BATCH, SOURCE)
    attention_mask = g.ids("attention_mask", BATCH, SOURCE)
    memory = Transformer(config).encode(g.op, ids, attention_mask, inputs_embeds=vectors, tap=g.tap)
    g.output("last_hidden_state", memory, BATCH, SOURCE, config.d_model)
    return g


def decoder_model(config: TransformerConfig, attention: int | None = None) -> GraphBuilder:
    """
    input_ids (B, T) ------------------> embedding --> Decoder --> classifier --> logits (B, T, V)
    encoder_attention_mask (B, S) ------> mask -----------^  \\--> present.N.decoder.{key,value} (B, K, T, d)
    encoder_hidden_states (B, S, D) ----> cross K/V ------^
                                                  \\------------> present.N.encoder.{key,value} (B, K, S, d)
    """
    g = GraphBuilder("decoder_model")
    model = Transformer(config)
    watch = Watch(model, attention, g.tap)
    encoder_attention_mask = g.ids("encoder_attention_mask", BATCH, SOURCE)
    input_ids = g.ids("input_ids", BATCH, TARGET)
    memory = g.floats("encoder_hidden_states", BATCH, SOURCE, config.d_model)
    cross = model.decoder.cross_keys_values(g.op, memory)
    layers = [LayerCache() for _ in range(config.decoder_layers)]
    cache = Cache(g.op, layers, cross, encoder_attention_mask)
    g.output("logits", model.step(g.op, input_ids, cache, tap=watch.tap), BATCH, TARGET, config.vocab_size)
    _presents(g, config, ".decoder", [layer.held() for layer in layers], TARGET)
    _presents(g, config, ".encoder", cross, SOURCE)
    watch.put(g, input_ids, BATCH, TARGET, SOURCE)
    return g


def decoder_with_past_model(config: TransformerConfig, attention: int | None = None) -> GraphBuilder:
    """
    input_ids (B, T) -----------------------------------> embedding --> Decoder --> classifier --> logits (B, T, V)
    encoder_attention_mask (B', S) -----------------------> mask --------^  ^ \\--> present.N.decoder.{key,value}
    past_key_values.N.decoder.{key,value} (B, K, P, d) --------------------/  |                        (B, K, P+T, d)
    past_key_values.N.encoder.{key,value} (B', K, S, d) ---------------------/

    B' sentences, each with B/B' rows side by side (the beams of a search); B' = B otherwise.
    """
    g = GraphBuilder("decoder_with_past_model")
    encoder_attention_mask = g.ids("encoder_attention_mask", SENTENCES, SOURCE)
    input_ids = g.ids("input_ids", BATCH, TARGET)
    layers, cross = _pasts(g, config, SENTENCES)
    cache = Cache(g.op, layers, cross, encoder_attention_mask)
    model = Transformer(config)
    watch = Watch(model, attention, g.tap)
    logits = model.step(g.op, input_ids, cache, tap=watch.tap)
    g.output("logits", logits, BATCH, TARGET, config.vocab_size)
    _presents(g, config, ".decoder", [layer.held() for layer in layers], TOTAL)
    watch.put(g, input_ids, BATCH, TARGET, SOURCE)
    return g


def decoder_model_merged(config: TransformerConfig, attention: int | None = None) -> GraphBuilder:
    """
    input_ids (B, T) -----------------------------------> embedding --> Decoder --> classifier --> logits (B, T, V)
    encoder_attention_mask (B, S) ------------------------> mask --------^  ^ \\--> present.N.decoder.{key,value}
    past_key_values.N.decoder.{key,value} (B, K, P, d) --------------------/  |                        (B, K, P+T, d)
    past_key_values.N.encoder.{key,value} (B, K, S, d) --\\                   |
    encoder_hidden_states (B, S, D) ----> cross K/V ---- If --> present.N.encoder.{key,value} (B, K, S, d)
    use_cache_branch (1) --------------------------------/

    First run: use_cache_branch false and an empty past (P = 0). The encoder's output is read in that run alone.
    """
    g = GraphBuilder("decoder_model_merged")
    model = Transformer(config)
    watch = Watch(model, attention, g.tap)
    encoder_attention_mask = g.ids("encoder_attention_mask", BATCH, SOURCE)
    input_ids = g.ids("input_ids", BATCH, TARGET)
    memory = g.floats("encoder_hidden_states", BATCH, SOURCE, config.d_model)
    layers, cached = _pasts(g, config, BATCH)
    use_cache_branch = g.builder.input("use_cache_branch", ir.DataType.BOOL, [1])

    def branch(name: str, values: Callable[[Op], list[KeyValues]]) -> ir.Graph:
        outputs = [ir.Value(name=f"{name}.{i}") for i in range(2 * config.decoder_layers)]
        return g.builder.subgraph(lambda op: [x for pair in values(op) for x in pair], [], outputs, name=name)

    reuse = branch("cached", lambda op: [(op.Identity(k), op.Identity(v)) for k, v in cached])
    compute = branch("computed", lambda op: model.decoder.cross_keys_values(op, memory))
    count = 2 * config.decoder_layers
    flat = g.op.If(use_cache_branch, then_branch=reuse, else_branch=compute, _outputs=count)
    cross = [(flat[2 * i], flat[2 * i + 1]) for i in range(config.decoder_layers)]
    cache = Cache(g.op, layers, cross, encoder_attention_mask)
    g.output("logits", model.step(g.op, input_ids, cache, tap=watch.tap), BATCH, TARGET, config.vocab_size)
    _presents(g, config, ".decoder", [layer.held() for layer in layers], TOTAL)
    _presents(g, config, ".encoder", cross, SOURCE)
    watch.put(g, input_ids, BATCH, TARGET, SOURCE)
    return g


def causal_model(config: TransformerConfig) -> GraphBuilder:
    """
    input_ids (B, T) ---------------------------> embedding --> Decoder --> classifier --> logits (B, T, V)
    position_ids (B, T) ---------------------------> positions --^  ^ \\--> present.N.{key,value} (B, K, P+T, d)
    attention_mask (B, P+T) -----------------------> mask --------^ |
    past_key_values.N.{key,value} (B, K, P, d) --------------------/
    """
    g = GraphBuilder("model")
    target, past, total = "sequence_length", "past_sequence_length", "past_sequence_length + sequence_length"
    input_ids = g.ids("input_ids", BATCH, target)
    attention_mask = g.ids("attention_mask", BATCH, total)
    position_ids = g.ids("position_ids", BATCH, target)
    layers = [
        LayerCache(*g.keys_values(f"past_key_values.{i}", cache_shape(config), BATCH, past))
        for i in range(config.decoder_layers)
    ]
    cache = Cache(g.op, layers, tokens=attention_mask, index=position_ids)
    logits = Transformer(config).step(g.op, input_ids, cache, tap=g.tap)
    g.output("logits", logits, BATCH, target, config.vocab_size)
    _presents(g, config, "", [layer.held() for layer in layers], total)
    return g


def encoder_only_model(config: TransformerConfig, inputs_embeds: bool = False) -> GraphBuilder:
    """
    input_ids (B, L) ------> embedding --> Encoder --> last_hidden_state (B, L, D)
    attention_mask (B, L) --> positions ----^  \\----> classifier --> logits (B, L, V)
                          \\-> mask ---------^

    Or inputs_embeds (B, L, D) ------------^ in place of input_ids.
    """
    g = GraphBuilder("model")
    model = Transformer(config)
    ids, vectors = g.source(config.d_model, inputs_embeds, BATCH, "sequence_length")
    attention_mask = g.ids("attention_mask", BATCH, "sequence_length")
    hidden = model.encode(g.op, ids, attention_mask, inputs_embeds=vectors, tap=g.tap)
    logits = model.logits(g.op, hidden, tap=g.tap)
    g.output("last_hidden_state", hidden, BATCH, "sequence_length", config.d_model)
    g.output("logits", logits, BATCH, "sequence_length", config.vocab_size)
    return g


BUILDERS: dict[str, Callable[..., GraphBuilder]] = {
    "encoder_model": encoder_model,
    "decoder_model": decoder_model,
    "decoder_with_past_model": decoder_with_past_model,
    "decoder_model_merged": decoder_model_merged,
    "decoder": causal_model,
    "encoder": encoder_only_model,
}


def _pasts(g: GraphBuilder, config: TransformerConfig, sentences: str) -> tuple[list[LayerCache], list[KeyValues]]:
    """Cached keys and values as inputs, layer by layer: the decoder's own, then those of the source."""
    shape, layers, cross = cache_shape(config), [], []
    for i in range(config.decoder_layers):
        layers.append(LayerCache(*g.keys_values(f"past_key_values.{i}.decoder", shape, BATCH, PAST)))
        cross.append(g.keys_values(f"past_key_values.{i}.encoder", shape, sentences, SOURCE))
    return layers, cross


def _presents(g: GraphBuilder, config: TransformerConfig, part: str, pairs: Sequence[KeyValues], length: str) -> None:
    """All keys and values as outputs present.N[.part].{key,value}."""
    for i, pair in enumerate(pairs):
        g.put_keys_values(f"present.{i}{part}", pair, cache_shape(config), BATCH, length)
