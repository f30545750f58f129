"""The graphs of target `cpu`.

    model                 an encoder-only model, with the inputs and outputs of target portable's graph
    encoder_cpu           runs once per batch; gives everything the decoder reads of the source
    decoder_cpu           runs once per token; writes its cache in place, in buffers bound as input and as output
    classifier_rows_cpu   in a search among given ids: runs once per batch
    decoder_listed_cpu    in a search among given ids: runs once per token
    step_cpu, prompt_cpu  a decoder-only model: see decoder.py

`top_k` and `largest` find the largest of many values in standard operators (see also `top_k` in `decoding/arrays.py`).
ONNX Runtime's TopK and ArgMax look at one value after the other. Here one pass takes the maximum of each block of about
64 values. The largest values can only be in the blocks with the largest maxima, and only these are searched. Measured
on two cores (ONNX Runtime 1.31) with rows of 37,000 values: the 11 largest after a softmax 1.3 to 1.9 times as fast,
the largest 1.8 to 4 times; greedy search of preset `base` gains 4 to 9 %. With 8,000 values nothing is gained.

Shapes: see network.py; V vocabulary or values of a row, C candidates of a row or listed ids, n blocks of W values.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from export.graph.builder import GraphBuilder
from export.interface import (
    BIASES,
    DECODER_CPU,
    ENCODER_CPU,
    LISTED_CPU,
    MODEL,
    PROMPT_CPU,
    ROWS,
    ROWS_CPU,
    STEP_CPU,
    Ports,
    Request,
)
from export.nn.cache import KeyValues, LayerCache
from export.nn.masks import pooling_weights
from export.nn.primitives import Op, branch
from export.nn.rows import Rows, mark
from export.nn.ssru import LayerState, OneStep
from export.targets.attention import AttentionTap, head_outputs
from export.targets.sentence_embedding import vector_outputs
from mlx_transformer.decoding.steps import EXCLUDED

from .decoder import TextsCache, TextsTransformer, places_of_last
from .network import OPSETS, CpuCache, CpuTransformer, InPlace, Sources, join_reshapes, use_gemm

MANY = 16384
"""Rows with fewer values aren't split into blocks: the extra operators would cost more than they save."""
BLOCK = 64
"""The preferred size of a block; the actual size divides a row evenly."""


def top_k(op: Op, x: ir.Value, count: ir.Value, width: int | None) -> tuple[ir.Value, ir.Value]:
    """The `count` (1,) largest values of each row of x (R, V), largest first, and their places; on ties the first.

    width: V, or None if it isn't fixed.
    """
    block = block_size(width)
    if block is None or width is None:
        return op.TopK(x, count, _outputs=2)
    shortlist = Shortlist.of(op, x, op.Min(count, [width // block]), block, width)
    values, place = op.TopK(op.Flatten(shortlist.values), count, _outputs=2)
    return values, shortlist.places(op, place)


def largest(op: Op, x: ir.Value, offsets: ir.Value, excluded: int, width: int | None) -> ir.Value:
    """The place (R, 1) of the largest value in each row of x (R, V) + offsets (V,); on ties the first.

    At most `excluded` offsets may differ from zero, and they must be negative. width: V, or None if it isn't fixed.
    """
    block = block_size(width)
    if block is None or width is None:
        return op.ArgMax(op.Add(x, offsets), axis=-1, keepdims=1)
    shortlist = Shortlist.of(op, x, [excluded + 1], block, width)
    block_offsets = op.Gather(op.Reshape(offsets, [-1, block]), shortlist.blocks, axis=0)
    return shortlist.places(op, op.ArgMax(op.Flatten(op.Add(shortlist.values, block_offsets)), axis=-1, keepdims=1))


def block_size(width: int | None) -> int | None:
    """A size near `BLOCK` that divides rows of `width` values evenly; None if there is none, rows are shorter than
    `MANY`, or their length isn't fixed (None)."""
    if width is None:
        return None
    sizes = [size for size in range(BLOCK // 4, BLOCK * 4 + 1) if width % size == 0]
    if width < MANY or not sizes:
        return None
    return min(sizes, key=lambda size: max(size / BLOCK, BLOCK / size))


@dataclass(frozen=True)
class Shortlist:
    """The n blocks of each row that hold its largest values."""

    values: ir.Value
    """(R, n, W)"""
    blocks: ir.Value
    """(R, n) numbers of the blocks, ascending, so that equal values keep their order."""
    block: int
    """W"""

    @classmethod
    def of(cls, op: Op, x: ir.Value, count: ir.Value | list[int], block: int, width: int) -> Shortlist:
        """The `count` (1,) blocks that hold the `count` largest values of each row of x (R, V). width: V."""
        blocks = op.Reshape(x, [-1, width // block, block])  # (R, V/W, W); R may be 0
        _, best = op.TopK(op.ReduceMax(blocks, [2], keepdims=0), count, _outputs=2)
        best, _ = op.TopK(best, count, largest=0, _outputs=2)
        return cls(op.GatherND(blocks, op.Unsqueeze(best, [2]), batch_dims=1), best, block)

    def places(self, op: Op, place: ir.Value) -> ir.Value:
        """Places (R, C) in the flattened `values` (R, n*W) -> places in the rows of x."""
        block = op.GatherElements(self.blocks, op.Div(place, self.block), axis=1)
        return op.Add(op.Mul(block, self.block), op.Mod(place, self.block))


class CpuGraphBuilder(GraphBuilder):
    """A graph with ONNX Runtime's own operators and Gemms."""

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

    The inputs and outputs are those of `encoder_only_model` in target portable.
    """
    g = CpuGraphBuilder.declared(MODEL, request)
    config, source = request.config, g.source()
    tokens = source.pop("source_mask")
    sources = Sources.of(g.op, tokens, request.config.causal)
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

    R = B * K rows, the beams of a sentence side by side. For the candidates see `choice`. A layer with an SSRU has a
    single buffer, past.N.state (R, D), with a row per beam; the runtime moves these rows.
    """
    g = CpuGraphBuilder.declared(DECODER_CPU, request)
    model = CpuTransformer(request.config)
    return _step(g, request, model, None)


def classifier_rows_cpu(request: Request) -> GraphBuilder:
    r"""
    input_ids (C) --> Gather(W), Transpose --> classifier_rows (D, C)
                 \--> Gather(bias) ----------> classifier_biases (C), if the classifier has a bias
    """
    g = CpuGraphBuilder.declared(ROWS_CPU, request)
    rows = CpuTransformer(request.config).output_rows(g.op, g.inputs["target_ids"])
    g.give(**{ROWS: rows.weight, BIASES: rows.bias})
    return g


def decoder_listed_cpu(request: Request) -> GraphBuilder:
    """decoder_cpu with the classifier's rows of C listed ids as inputs: logits (R, C). The candidates are places among
    these ids, and so are the bans (C).

    unlisted (1 or R, C)   added to the logits: `BANNED` on ids that are listed only for other sentences
    """
    g = CpuGraphBuilder.declared(LISTED_CPU, request)
    model = CpuTransformer(request.config)
    return _step(g, request, model, Rows(mark(g.inputs[ROWS], model.output_weight), g.inputs.get(BIASES)))


def _step(g: CpuGraphBuilder, request: Request, model: CpuTransformer, among: Rows | None) -> GraphBuilder:
    """among: the classifier's rows of listed ids; None for all ids."""
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
    """The candidates of a step, from which a search takes the next tokens: (scores, tokens), from logits (R, V).

        greedy, C = 1      the sum of a row's logits (finite if all are) and the likeliest token: both (R, 1)
        beam search        the W best extensions (B, W) of each sentence's K hypotheses, best first: log p, and
                           hypothesis * V + token, as in `decoding.beam`

    Inputs of the graph:

    bans (V)          negative for at most `EXCLUDED` tokens; added to the numbers that are compared, but neither to the
                      logits nor before log p is normalised
    candidates (1)    C, large enough that the W best extensions of a sentence are among the C of each row
    by_sentence (2)   -1, K * C
    extensions (1)    W
    log_p (R, 1)      of each hypothesis so far
    first_entry (R, 1)   hypothesis * V

    vocab_size: None if the ids are listed, since their number isn't fixed. The two searches are branches of an If,
    because a runtime computes the whole graph, whichever outputs are requested.
    """
    op, inputs = g.op, g.inputs

    def greedy(op: Op) -> tuple[ir.Value, ir.Value]:
        sums = op.ReduceSum(logits, [-1], keepdims=1)
        return sums, largest(op, logits, inputs["bans"], EXCLUDED, vocab_size)

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


def step_cpu(request: Request) -> GraphBuilder:
    """
    input_ids (R, S) --> embedding ---------> Decoder --> classifier --> logits (R*K, 1, V)
    attention_mask (R, T) --> position --^  ^      \\--> present.N.{key,value}: the same buffers
    past_key_values.N.{key,value} (R, H, L, d), dropped_positions (R, 1): see decoder.py

    R texts of any lengths and one new token of each, or one text and S new tokens, or R first prompts, padded on the
    right. logits_to_keep (): K, 1 if it is left out.
    """
    g = CpuGraphBuilder.declared(STEP_CPU, request)
    places = places_of_last(g.op, g.inputs["kept"], g.inputs["target_ids"], g.inputs["target_mask"])
    logits, cache = _read(g, request, places)
    g.give(logits=g.op.Unsqueeze(logits, [1]), cache=cache)
    return g


def prompt_cpu(request: Request) -> GraphBuilder:
    """step_cpu without logits; it ends with the last layer's keys and values."""
    g = CpuGraphBuilder.declared(PROMPT_CPU, request)
    g.give(cache=_read(g, request, None)[1])
    return g


def _read(g: CpuGraphBuilder, request: Request, places: ir.Value | None) -> tuple[ir.Value, list[KeyValues]]:
    """Logits (W, V) of the rows `places`, and every layer's keys and values. places: None if logits aren't needed."""
    ids = g.inputs["target_ids"]
    windows = [layer.window for layer in request.config.layers("decoder")]
    cache = TextsCache(g.op, g.pairs("cache"), ids, g.inputs["target_mask"], windows, g.inputs.get("dropped"))
    logits = TextsTransformer(request.config, places).step(g.op, g.op.Reshape(ids, [-1]), cache, tap=g.tap)
    return logits, [layer.contents() for layer in cache.layers]


BUILDERS = {
    "encoder-decoder": {
        ENCODER_CPU: encoder_cpu,
        DECODER_CPU: decoder_cpu,
        ROWS_CPU: classifier_rows_cpu,
        LISTED_CPU: decoder_listed_cpu,
    },
    "encoder": {MODEL: encoder_alone},
    "decoder": {STEP_CPU: step_cpu, PROMPT_CPU: prompt_cpu},
}
