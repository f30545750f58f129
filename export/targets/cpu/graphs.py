"""The graphs of the target `cpu`: an encoder that leaves all a decoder needs, and one step of decoding, in place.

    encoder_cpu        once a batch
    decoder_cpu        once a token, with every buffer bound as input and as output

Shapes: see network.py; V vocabulary, C candidates of a row.
"""

from __future__ import annotations

import onnx_ir as ir

from export.nn.primitives import Op, branch
from export.targets.attention import Watch
from export.targets.graph import GraphBuilder
from export.targets.names import DECODER_CPU, ENCODER_CPU
from export.targets.top_k import largest, top_k
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.steps import EXCLUDED

from .gemm import join_reshapes, use_gemm
from .network import DOMAIN, CpuCache, CpuTransformer, InPlace, Sources, operator_shape

SENTENCES, SOURCE, ROWS, POSITIONS = "sentences", "source_length", "rows", "positions"
INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


class CpuGraphBuilder(GraphBuilder):
    """A graph with ONNX Runtime's own operators, its products as Gemm."""

    def __init__(self, name: str):
        super().__init__(name)
        self.graph.opset_imports[DOMAIN] = 1

    def integers(self, name: str, *axes: str | int, type: ir.DataType = INT32) -> ir.Value:
        return self.builder.input(name, type, axes)

    def model(self) -> ir.Model:
        join_reshapes(self.graph)
        use_gemm(self.graph)
        return super().model()


def encoder_cpu(config: TransformerConfig, inputs_embeds: bool = False) -> GraphBuilder:
    """
    input_ids (B, S) ------> tokens --> embedding --> Encoder --> memory --> cross.N.{key,value} (B, H, S, d)
    attention_mask (B, S) ----^  ------------------------^           \\----> last_hidden_state (B, S, D)
                          \\-> source_mask (B, S) int32

    Or inputs_embeds (B, S, D) in place of input_ids.
    """
    g = CpuGraphBuilder(ENCODER_CPU)
    ids, vectors = g.source(config.d_model, inputs_embeds, SENTENCES, SOURCE)
    attention_mask = g.ids("attention_mask", SENTENCES, SOURCE)
    sources = Sources.of(g.op, attention_mask, config.of("encoder").heads)
    model = CpuTransformer(config, sources)
    memory = model.encode_rows(g.op, ids, inputs_embeds=vectors, tap=g.tap)
    for i, pair in enumerate(model.cross_keys_values(g.op, memory)):
        g.put_keys_values(f"cross.{i}", pair, operator_shape(config), SENTENCES, SOURCE)
    g.output("source_mask", sources.mask, SENTENCES, SOURCE, type=INT32)
    g.output("last_hidden_state", sources.padded(g.op, memory), SENTENCES, SOURCE, config.d_model)
    return g


def decoder_cpu(config: TransformerConfig, attention: int | None = None) -> GraphBuilder:
    """
    input_ids (R) --> embedding ----> Decoder --> classifier --> logits (R, V)
    past_length (1) --> position --^  ^  ^  ^                    \\--> candidate_{scores,tokens}
    past.N.{key,value} (R, H, L, d) --/  |  \\--> present.N.{key,value}: the same buffers
    beam_width (1), cache_indirection ---+
    source_mask (B, S), cross.N.{key,value} (B, H, S, d)

    R = B * K rows, the beams of one sentence side by side. For the candidates see `Chooser`. attention: the layer whose
    cross_attention (R, S) is an output too.
    """
    g = CpuGraphBuilder(DECODER_CPU)
    input_ids = g.ids("input_ids", ROWS)
    past_length = g.integers("past_length", 1)
    beam_width = g.integers("beam_width", 1)
    cache_indirection = g.integers("cache_indirection", SENTENCES, "beams", POSITIONS)
    source_mask = g.integers("source_mask", SENTENCES, SOURCE)
    chooser = Chooser(g, config)
    layers, cross, shape = [], [], operator_shape(config)
    for i in range(config.decoder_layers):
        buffers = g.keys_values(f"past.{i}", shape, ROWS, POSITIONS)
        layers.append(InPlace(*buffers, past_length, beam_width, cache_indirection))
        cross.append(g.keys_values(f"cross.{i}", shape, SENTENCES, SOURCE))
    cache = CpuCache(layers, past_length, cross, source_mask)
    model = CpuTransformer(config)
    watch = Watch(model, attention, g.tap)
    logits = model.step(g.op, input_ids, cache, tap=watch.tap)
    scores, tokens = chooser(logits)
    g.output("candidate_scores", scores, "choices", "candidates")
    g.output("candidate_tokens", tokens, "choices", "candidates", type=INT64)
    g.output("logits", logits, ROWS, config.vocab_size)
    for i, layer in enumerate(layers):
        g.put_keys_values(f"present.{i}", layer.held(), shape, ROWS, POSITIONS)
    watch.put(g, input_ids, ROWS, SOURCE)
    return g


class Chooser:
    """The candidates of a step, of which a search takes the next tokens.

        greedy, C = 1      the sum of a row's logits, finite if they all are, and the likeliest token: both (R, 1)
        beam search        the W best extensions (B, W) of each sentence's K hypotheses, best first: log p, and
                           hypothesis * V + token, as in `generation.beam`

    bans (V)          of `EXCLUDED` tokens at most, added to what is chosen by, not to the logits nor to what log p is
                      normalised by
    candidates (1)    C of each row: the W best of the sentence are among them
    by_sentence (2)   -1, K * C
    extensions (1)    W
    log_p (R, 1)      of each hypothesis so far
    first_entry (R, 1)   hypothesis * V
    """

    def __init__(self, g: CpuGraphBuilder, config: TransformerConfig):
        self.g, self.vocab_size = g, config.vocab_size
        self.bans = g.floats("bans", config.vocab_size)
        self.candidates = g.integers("candidates", 1, type=INT64)
        self.by_sentence = g.integers("by_sentence", 2, type=INT64)
        self.extensions = g.integers("extensions", 1, type=INT64)
        self.log_p = g.floats("log_p", ROWS, 1)
        self.first_entry = g.integers("first_entry", ROWS, 1, type=INT64)

    def __call__(self, logits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """logits (R, V). An If, because a runtime computes all of a graph, whatever outputs it is asked for."""

        def greedy(op: Op) -> tuple[ir.Value, ir.Value]:
            return op.ReduceSum(logits, [-1], keepdims=1), largest(op, logits, self.bans, EXCLUDED, self.vocab_size)

        def beam(op: Op) -> tuple[ir.Value, ir.Value]:
            log_p, tokens = top_k(op, op.LogSoftmax(logits, axis=-1), self.candidates, self.vocab_size)
            log_p = op.Add(op.Add(log_p, op.Gather(self.bans, tokens, axis=0)), self.log_p)
            entries = op.Reshape(op.Add(tokens, self.first_entry), self.by_sentence)
            best, place = op.TopK(op.Reshape(log_p, self.by_sentence), self.extensions, axis=-1, _outputs=2)
            return best, op.GatherElements(entries, place, axis=1)

        op = self.g.op
        several = op.Greater(op.Squeeze(self.candidates, [0]), 1)

        def pair(name: str) -> list[ir.Value]:
            return [ir.Value(name=f"{name}.{part}") for part in ("scores", "tokens")]

        then, otherwise = branch(op, "beam", pair("beam"), beam), branch(op, "greedy", pair("greedy"), greedy)
        return op.If(several, then_branch=then, else_branch=otherwise, _outputs=2)


BUILDERS = {ENCODER_CPU: encoder_cpu, DECODER_CPU: decoder_cpu}
