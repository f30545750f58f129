"""A model as one graph: a translation model with its search, or a text encoder with its tokenizer and pooling.

Shapes: B sentences, S source, n = n_best, T longest output returned, V vocabulary; W numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from export.graph.builder import IR_VERSION, GraphBuilder, merge_equal
from export.interface import SEARCH, TEXT_SETTINGS, TEXT_VECTORS, Request
from export.nn.model import Transformer
from export.nn.primitives import Op, size
from export.precision.table import ONNXRUNTIME, STANDARD, takes_rows
from export.targets.cpu.network import OPSETS, join_reshapes, use_gemm
from export.targets.sentence_embedding import vector_outputs
from export.targets.table import target_of
from mlx_transformer.core.heads import EMBEDDING
from mlx_transformer.core.inputs import companions
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.system.errors import UserError

from .beam import Beam
from .decoder import CpuRecurrentDecoder, CpuTreeDecoder, PromptDecoder, RecurrentDecoder, TreeDecoder
from .metadata import inputs_of
from .options import OptionInputs, Vocabulary, set_defaults
from .pieces import PieceOps, has_pieces
from .steps import READ, WRITTEN, run
from .text import ByteLevelOps, BytePairOps, is_blank, is_byte_level
from .wordpiece import WordPieceOps

DECODERS = {STANDARD: TreeDecoder, ONNXRUNTIME: CpuTreeDecoder}
"""The decoder's step by kind of operators: standard, or ONNX Runtime's own, which measured faster on its CPU."""
RECURRENT_DECODERS = {STANDARD: RecurrentDecoder, ONNXRUNTIME: CpuRecurrentDecoder}


def search_model(
    request: Request,
    target: str = "portable",
    tokenizer: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    precision: str = "float32",
) -> ir.Model:
    """
    input_ids (B, S) ------> encoder --> cross K/V --> Loop: decoder step, choice --> paths --> sequences (B, n, T)
    attention_mask (B, S) ----^----------------------^   ^                                  --> lengths (B, n)
    beam, length_penalty, ... ---------------------------/                                  --> scores (B, n)

    sequences: new ids without start token and closing eos, padded at the end. lengths: tokens of each. scores: log p
    over the length penalty, as in `Hypothesis`; -1e9 (and length 0) where there are fewer than n hypotheses.

    With `request.text` and the text of a tokenizer.json, text (B,) goes in, and translations (B, n) and scores come
    out. With an attention layer, cross_attention (B, n, T, S) is an output too: this layer's attention to each source
    token when each token was chosen. It needs ids: callers with text don't know the tokens.

    settings: the model's generation settings (fields of `Options`), which become the inputs' defaults. precision: the
    graph's later precision; it decides whether rows of the classifier can be gathered.

    A decoder-only model continues prompts: input_ids (B, S), padded on either side, are read by the decoder itself, all
    but the last token before the loop. Its graph has standard operators in every target, and no candidates. Raises
    UserError for an encoder.
    """
    config = request.config
    if not config.has_decoder:
        raise UserError(f"search in the graph needs a decoder, not architecture={config.architecture!r}")
    operators = target_of(target).lowering.operators if config.has_encoder else STANDARD
    g = GraphBuilder.declared(SEARCH, request)
    if operators == ONNXRUNTIME:
        g.graph.opset_imports.update(OPSETS)
    if request.text:
        _give_text(g, request, operators, takes_rows(precision), str(tokenizer))
    else:
        _give_ids(g, request, operators, takes_rows(precision))
    if request.attention_layer is not None:  # the tapped layer's attention is in the loop twice
        for graph in (g.graph, *g.graph.subgraphs()):
            merge_equal(ir.Model(graph, ir_version=IR_VERSION))
    if operators == ONNXRUNTIME:
        for graph in (g.graph, *g.graph.subgraphs()):
            join_reshapes(graph)
            use_gemm(graph)
    model = g.model()
    set_defaults(model.graph, inputs_of(settings))
    return model


def _give_ids(g: GraphBuilder, request: Request, operators: str, by_rows: bool) -> None:
    source = g.source()
    mask = source.pop("source_mask")
    sequences, lengths, scores, attention = _search(g, request, operators, by_rows, source, mask)
    g.give(sequences=sequences, lengths=lengths, scores=scores, attention=attention)


def _give_text(g: GraphBuilder, request: Request, operators: str, by_rows: bool, tokenizer: str) -> None:
    r"""
    text (B,) --> tokenizer --> the search over ids --> detokenizer --> translations (B, n)
                      \--> blank line: "" ------------^        \--> scores (B, n)
    """
    kind = PieceOps if has_pieces(tokenizer) else ByteLevelOps if is_byte_level(tokenizer) else BytePairOps
    ops, text = kind(tokenizer, request.config), g.inputs["text"]
    ids, mask = ops.encode(g.op, text, *(g.inputs[name] for name in TEXT_SETTINGS))
    sequences, _, scores, _ = _search(g, request, operators, by_rows, {"source_ids": ids}, mask)
    if request.config.has_encoder:
        blank = is_blank(g.op, text)
        scores = g.op.Where(g.op.Unsqueeze(blank, [1]), 0.0, scores)
    else:  # any prompt is continued
        blank = g.op.Expand(False, g.op.Shape(text))
    g.give(translations=ops.decode(g.op, sequences, blank), scores=scores)


def _search(
    g: GraphBuilder,
    request: Request,
    operators: str,
    by_rows: bool,
    source: Mapping[str, ir.Value | None],
    mask: ir.Value,
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value | None]:
    """Returns sequences, lengths, scores, and the attention to the source (or None)."""
    options = OptionInputs(g.op, g.inputs)
    lengths, prompts = g.op.ReduceSum(mask, [1], keepdims=0), None
    if not request.config.has_encoder:
        ids, mask = _on_the_right(g.op, source["source_ids"], mask)
        source, prompts = {"source_ids": ids}, g.op.Where(g.op.Equal(mask, 1), ids, -1)
    vocabulary = Vocabulary(g.op, options, request.config, g.op.Shape(lengths), by_rows)
    strategy = Beam(g.op, options, request.config, lengths, vocabulary, prompts)
    decoders = RECURRENT_DECODERS if request.config.recurrent else DECODERS
    make = decoders[operators] if request.config.has_encoder else PromptDecoder
    decoder = make(g.op, request, source, mask, strategy.beam, vocabulary)
    state, written = run(g.op, decoder, strategy)
    return strategy.results(g.op, state, written[WRITTEN], written.get(READ))


def _on_the_right(op: Op, ids: ir.Value | None, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Move padding (B, S) on the right of prompts to their left."""
    assert ids is not None
    places, length = op.Range(0, size(op, ids, 1), 1), op.ReduceSum(mask, [1], keepdims=1)
    own = op.Sub(places, op.Sub(size(op, ids, 1), length))  # (B, S), from -padding to length - 1
    index = op.Max(op.Add(own, op.ArgMax(mask, axis=1, keepdims=1)), 0)
    moved = op.GatherElements(ids, index, axis=1)
    return moved, op.Cast(op.GreaterOrEqual(own, 0), to=ir.DataType.INT64)


def vector_model(request: Request, tokenizer: str, embedding: TextEmbedding) -> ir.Model:
    r"""
    text (B,) --> tokenizer --> ids (B, S) ------> encoder --> pooling, dense layers, unit length --> sentence_embedding
                           \--> mask (B, S) --------^-------------^                                              (B, W)

    tokenizer: the text of a tokenizer.json. embedding: the folder's pooling settings; its default prompt is put before
    each text. Raises UserError for settings that the graph can't follow, e.g. lower-casing.
    """
    left_out = embedding.prompt() and not embedding.prompt_counts
    if left_out or embedding.lower_case:
        what = "leaves the tokens of its prompt out" if left_out else "lower-cases text beforehand"
        raise UserError(f"{EMBEDDING}: {what}: a file that takes text can't; export a folder")
    request = replace(request, embedding=replace(embedding.arithmetic, sparse=False, multi=None))
    g = GraphBuilder.declared(TEXT_VECTORS, request)
    most = min(embedding.max_length or request.config.max_positions, request.config.max_positions)
    ids, mask = WordPieceOps(tokenizer, most, embedding.prompt()).encode(g.op, g.inputs["text"])
    others = {entry.name: g.op.Mul(mask, entry.fill(request.config)) for entry in companions(request.config)}
    memory = Transformer(request.config).encode(g.op, ids, mask, **others, tap=g.tap)
    g.give(**vector_outputs(g.op, request, memory, mask))
    return g.model()
