"""The graphs of the target `cpu`: an encoder that leaves all a decoder needs, and one step of decoding, in place; or an
encoder alone.

    model                 of an encoder alone, with the inputs and outputs of target portable's
    encoder_cpu           once a batch
    decoder_cpu           once a token, with every buffer bound as input and as output
    classifier_rows_cpu   once a batch, and
    decoder_listed_cpu    once a token, in a search among given ids alone

Shapes: see network.py; V vocabulary, C candidates of a row.
"""

from __future__ import annotations

import onnx_ir as ir

from export.graph.builder import GraphBuilder
from export.interface import BIASES, DECODER_CPU, ENCODER_CPU, LISTED_CPU, MODEL, ROWS, ROWS_CPU, Ports, Request
from export.nn.cache import LayerCache
from export.nn.masks import pooling_weights
from export.nn.primitives import Op, branch
from export.nn.rows import Rows, mark
from export.nn.ssru import LayerState, OneStep
from export.targets.attention import AttentionTap
from export.targets.heads import head_outputs
from export.targets.sentence_embedding import vector_outputs
from export.targets.top_k import largest, top_k
from mlx_transformer.generation.steps import EXCLUDED

from .gemm import join_reshapes, use_gemm
from .network import OPSETS, CpuCache, CpuTransformer, InPlace, Sources


class CpuGraphBuilder(GraphBuilder):
    """A graph with ONNX Runtime's own operators, its products as Gemm."""

    def __init__(self, name: str, ports: Ports):
        super().__init__(name, ports)
        self.graph.opset_imports.update(OPSETS)

    def model(self) -> ir.Model:
        join_reshapes(self.graph)
        use_gemm(self.graph)
        return super().model()


def encoder_cpu(request: Request) -> GraphBuilder:
    """
    input_ids (B, S) ------> tokens --> embedding --> Encoder --> memory --> cross.N.{key,value} (B, H, S, d)
    attention_mask (B, S) ----^  ------------------------^           \\----> last_hidden_state (B, S, D)
                          \\-> source_mask (B, S) int32

    Or inputs_embeds (B, S, D) in place of input_ids.
    """
    g = CpuGraphBuilder.declared(ENCODER_CPU, request)
    source = g.source()
    sources = Sources.of(g.op, source.pop("source_mask"))
    model = CpuTransformer(request.config, sources)
    memory = model.encode_rows(g.op, source, tap=g.tap)
    cross = model.cross_keys_values(g.op, memory)
    g.give(cross=cross, source_mask=sources.mask, memory=sources.padded(g.op, memory))
    return g


def encoder_alone(request: Request) -> GraphBuilder:
    """
    input_ids (B, S) ------> tokens --> embedding --> Encoder --> head --> last_hidden_state, logits, ... (B, S, ...)
    attention_mask (B, S) ----^  ------------------------^

    Inputs and outputs are those of `encoder_only_model` of target portable.
    """
    g = CpuGraphBuilder.declared(MODEL, request)
    config, source = request.config, g.source()
    tokens = source.pop("source_mask")
    sources = Sources.of(g.op, tokens)
    model = CpuTransformer(config, sources)
    rows = model.encode_rows(g.op, source, tap=g.tap)
    memory = sources.padded(g.op, rows)
    if config.head.per_row:
        weights = pooling_weights(g.op, tokens, config.head.pooling)
        outputs = head_outputs(g.op, model, memory, weights, g.tap)
    else:
        outputs = head_outputs(g.op, model, rows, None, g.tap, lambda y: sources.padded(g.op, y))
    g.give(memory=memory, **outputs)
    g.give(**vector_outputs(g.op, request, memory, tokens))
    return g


def decoder_cpu(request: Request) -> GraphBuilder:
    """
    input_ids (R) --> embedding ----> Decoder --> classifier --> logits (R, V)
    past_length (1) --> position --^  ^  ^  ^                    \\--> candidate_{scores,tokens}
    past.N.{key,value} (R, H, L, d) --/  |  \\--> present.N.{key,value}: the same buffers
    beam_width (1), cache_indirection ---+
    source_mask (B, S), cross.N.{key,value} (B, H, S, d)

    R = B * K rows, the beams of one sentence side by side. For the candidates see `choice`. With SSRUs a layer has one
    buffer, past.N.state (R, D), in which a beam has a row of its own: the runtime moves it.
    """
    g = CpuGraphBuilder.declared(DECODER_CPU, request)
    model = CpuTransformer(request.config)
    return _step(g, request, model, None)


def classifier_rows_cpu(request: Request) -> GraphBuilder:
    r"""
    input_ids (C) --> Gather(W), Transpose --> classifier_rows (D, C)
                 \--> Gather(bias) ----------> classifier_biases (C), of a classifier that has one
    """
    g = CpuGraphBuilder.declared(ROWS_CPU, request)
    rows = CpuTransformer(request.config).output_rows(g.op, g.inputs["target_ids"])
    g.give(**{ROWS: rows.weight, BIASES: rows.bias})
    return g


def decoder_listed_cpu(request: Request) -> GraphBuilder:
    """Return the same as decoder_cpu with the classifier's rows of C ids as inputs: logits and candidates are of these
    alone, and by their places among them; so are bans (C).

    unlisted (1 or R, C)   added to the logits: `BANNED` on ids that are another sentence's
    """
    g = CpuGraphBuilder.declared(LISTED_CPU, request)
    model = CpuTransformer(request.config)
    return _step(g, request, model, Rows(mark(g.inputs[ROWS], model.output_weight), g.inputs.get(BIASES)))


def _step(g: CpuGraphBuilder, request: Request, model: CpuTransformer, among: Rows | None) -> GraphBuilder:
    """among: the classifier's rows of given ids; None: all."""
    past, ids = g.inputs["past_length"], g.inputs["target_ids"]
    if request.config.recurrent:
        layers: list[LayerCache | LayerState] = [OneStep(state) for state in g.entries("cache")]
    else:
        shared = past, g.inputs["beam_width"], g.inputs["cache_indirection"]
        layers = [InPlace(*buffers, *shared) for buffers in g.pairs("cache")]
    cache = CpuCache(layers, past, g.pairs("cross"), g.inputs["source_mask"])
    attention = AttentionTap(model, request.attention_layer, g.tap)
    logits = model.step(g.op, ids, cache, among=among, tap=attention.tap)
    logits = logits if among is None else g.op.Add(logits, g.inputs["unlisted"])
    scores, tokens = choice(g, logits, request.config.vocab_size if among is None else None)
    g.give(
        candidate_scores=scores,
        candidate_tokens=tokens,
        logits=logits,
        cache=[layer.contents() for layer in layers],
        attention=attention.mean(g.op, ids),
    )
    return g


def choice(g: GraphBuilder, logits: ir.Value, vocab_size: int | None) -> tuple[ir.Value, ir.Value]:
    """Return the candidates of a step, of which a search takes the next tokens, of logits (R, V).

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

    vocab_size: None where there are as many logits as somebody lists. An If, because a runtime computes all of a graph,
    whatever outputs it is asked for.
    """
    op, inputs = g.op, g.inputs

    def greedy(op: Op) -> tuple[ir.Value, ir.Value]:
        return op.ReduceSum(logits, [-1], keepdims=1), largest(op, logits, inputs["bans"], EXCLUDED, vocab_size)

    def beam(op: Op) -> tuple[ir.Value, ir.Value]:
        log_p, tokens = top_k(op, op.LogSoftmax(logits, axis=-1), inputs["candidates"], vocab_size)
        log_p = op.Add(op.Add(log_p, op.Gather(inputs["bans"], tokens, axis=0)), inputs["log_p"])
        entries = op.Reshape(op.Add(tokens, inputs["first_entry"]), inputs["by_sentence"])
        best, place = op.TopK(op.Reshape(log_p, inputs["by_sentence"]), inputs["extensions"], axis=-1, _outputs=2)
        return best, op.GatherElements(entries, place, axis=1)

    several = op.Greater(op.Squeeze(inputs["candidates"], [0]), 1)

    def pair(name: str) -> list[ir.Value]:
        return [ir.Value(name=f"{name}.{part}") for part in ("scores", "tokens")]

    then, otherwise = branch(op, "beam", pair("beam"), beam), branch(op, "greedy", pair("greedy"), greedy)
    return op.If(several, then_branch=then, else_branch=otherwise, _outputs=2)


BUILDERS = {
    "encoder-decoder": {
        ENCODER_CPU: encoder_cpu,
        DECODER_CPU: decoder_cpu,
        ROWS_CPU: classifier_rows_cpu,
        LISTED_CPU: decoder_listed_cpu,
    },
    "encoder": {MODEL: encoder_alone},
}
