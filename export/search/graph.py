"""The whole of a translation model in one graph: encoder, decoder, search.

Shapes: B sentences, S source, n = n_best, T longest output returned, V vocabulary.
"""

from __future__ import annotations

import json

import onnx_ir as ir

from export.precision.table import ONNXRUNTIME, STANDARD
from export.targets.cpu.gemm import join_reshapes, use_gemm
from export.targets.cpu.network import DOMAIN
from export.targets.graph import BATCH, IR_VERSION, GraphBuilder, merge_equal
from export.targets.names import CROSS_ATTENTION
from export.targets.table import target_of
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

from .beam import Beam
from .decoder import TreeDecoder
from .decoder_cpu import CpuTreeDecoder
from .interface import CONFIG
from .options import OptionInputs, set_defaults
from .steps import READ, WRITTEN, run
from .text import TextOps

SOURCE = "source_length"
ROWS = (BATCH, "n_best")


DECODERS = {STANDARD: TreeDecoder, ONNXRUNTIME: CpuTreeDecoder}
"""What the decoder's step is made of: standard operators, or ONNX Runtime's own, measured faster on its CPU."""


def search_model(
    config: TransformerConfig, target: str = "portable", tokenizer: str | None = None, attention: int | None = None
) -> ir.Model:
    """
    input_ids (B, S) ------> encoder --> cross K/V --> Loop: decoder step, choice --> paths --> sequences (B, n, T)
    attention_mask (B, S) ----^----------------------^   ^                                  --> lengths (B, n)
    beam, length_penalty, ... ---------------------------/                                  --> scores (B, n)

    sequences: new ids without start token and closing eos, pad after them. lengths: tokens of each. scores: log p over
    the length penalty, as `Hypothesis`; -1e9 (length 0) where fewer than n hypotheses exist.

    With a tokenizer (the text of a tokenizer.json): text (B,) in, translations (B, n) and scores out, all strings.
    attention: cross_attention (B, n, T, S) is an output too, how much of each source token this layer read when each
    token was chosen; not with a tokenizer, for who has text has no tokens.
    """
    if config.architecture != "encoder-decoder":
        raise UserError(f"search in the graph needs an encoder-decoder, not architecture={config.architecture!r}")
    operators = target_of(target).lowering.operators
    g = GraphBuilder("search_model")
    if operators == ONNXRUNTIME:
        g.graph.opset_imports[DOMAIN] = 1
    if tokenizer:
        outputs = _with_text(g, config, operators, tokenizer)
    else:
        outputs = _with_ids(g, config, operators, attention)
    for name, (value, dtype, axes) in outputs.items():
        value.shape, value.type = ir.Shape(axes), ir.TensorType(dtype)
        g.builder.add_output(value, name)
    if attention is not None:  # what the layer computes anyway stands in the loop twice
        for graph in (g.graph, *g.graph.subgraphs()):
            merge_equal(ir.Model(graph, ir_version=IR_VERSION))
    if operators == ONNXRUNTIME:
        for graph in (g.graph, *g.graph.subgraphs()):
            join_reshapes(graph)
            use_gemm(graph)
    model = g.model()
    set_defaults(model.graph)
    model.metadata_props[CONFIG] = json.dumps(config.to_dict())
    return model


Outputs = dict[str, tuple[ir.Value, ir.DataType, tuple[str, ...]]]
"""By name: value, type, axes."""


def _with_ids(g: GraphBuilder, config: TransformerConfig, operators: str, attention: int | None) -> Outputs:
    input_ids = g.ids("input_ids", BATCH, SOURCE)
    attention_mask = g.ids("attention_mask", BATCH, SOURCE)
    sequences, lengths, scores, read = _search(g, config, operators, input_ids, attention_mask, attention)
    shown: Outputs = {}
    if read is not None:
        shown[CROSS_ATTENTION] = (read, ir.DataType.FLOAT, (*ROWS, "length", SOURCE))
    return {
        "sequences": (sequences, ir.DataType.INT64, (*ROWS, "length")),
        "lengths": (lengths, ir.DataType.INT64, ROWS),
        "scores": (scores, ir.DataType.FLOAT, ROWS),
        **shown,
    }


def _with_text(g: GraphBuilder, config: TransformerConfig, operators: str, tokenizer: str) -> Outputs:
    r"""
    text (B,) --> tokenizer --> the search over ids --> detokenizer --> translations (B, n)
                      \--> nothing in the line: ""  ------^        \--> scores (B, n)
    """
    ops = TextOps(tokenizer, config)
    g.graph.opset_imports[ops.domain] = 1
    lines = ops.encode(g.op, g.builder.input("text", ir.DataType.STRING, [BATCH]))
    sequences, _, scores, _ = _search(g, config, operators, lines.ids, lines.mask)
    scores = g.op.Where(g.op.Unsqueeze(lines.blank, [1]), 0.0, scores)
    translations = ops.decode(g.op, sequences, lines.blank)
    return {"translations": (translations, ir.DataType.STRING, ROWS), "scores": (scores, ir.DataType.FLOAT, ROWS)}


def _search(
    g: GraphBuilder,
    config: TransformerConfig,
    operators: str,
    input_ids: ir.Value,
    attention_mask: ir.Value,
    attention: int | None = None,
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value | None]:
    """sequences, lengths, scores, and what was read."""
    options = OptionInputs.inputs(g)
    strategy = Beam(g.op, options, config, g.op.ReduceSum(attention_mask, [1], keepdims=0))
    decoder = DECODERS[operators](g.op, config, input_ids, attention_mask, strategy.beam, attention)
    state, kept = run(g.op, decoder, strategy)
    return strategy.results(g.op, state, kept[WRITTEN], kept.get(READ))
