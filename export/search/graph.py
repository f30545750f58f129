"""The whole of a translation model in one graph: encoder, decoder, search.

Shapes: B sentences, S source, n = n_best, T longest output returned, V vocabulary.
"""

from __future__ import annotations

import json

import onnx_ir as ir

from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError

from ..gemm import use_gemm
from ..graphs import BATCH, Graph
from ..primitives import Op
from ..rows import DOMAIN
from .beam import Beam
from .decoder import TreeDecoder
from .loop import run
from .options import CONFIG, OptionInputs, set_defaults
from .rows import RowsTreeDecoder

SOURCE = "source_length"


TARGETS = {"portable": TreeDecoder, "cpu": RowsTreeDecoder}
"""What the decoder's step is made of: standard operators, or ONNX Runtime's own, measured faster on its CPU."""


def search_model(config: TransformerConfig, target: str = "portable") -> ir.Model:
    """
    input_ids (B, S) ------> encoder --> cross K/V --> Loop: decoder step, choice --> paths --> sequences (B, n, T)
    attention_mask (B, S) ----^----------------------^   ^                                  --> lengths (B, n)
    beam, length_penalty, ... ---------------------------/                                  --> scores (B, n)

    sequences: new ids without start token and closing eos, pad after them. lengths: tokens of each. scores: log p over
    the length penalty, as `Hypothesis`; -1e9 (length 0) where fewer than n hypotheses exist.
    """
    g = Graph("search_model")
    if target == "cpu":
        g.graph.opset_imports[DOMAIN] = 1
    input_ids = g.ids("input_ids", BATCH, SOURCE)
    attention_mask = g.ids("attention_mask", BATCH, SOURCE)
    options = OptionInputs.inputs(g)
    for name, (value, axes) in search(g.op, config, target, input_ids, attention_mask, options).items():
        dtype = ir.DataType.FLOAT if name == "scores" else ir.DataType.INT64
        value.shape, value.type = ir.Shape(axes), ir.TensorType(dtype)
        g.builder.add_output(value, name)
    if target == "cpu":
        for graph in (g.graph, *g.graph.subgraphs()):
            use_gemm(graph)
    model = g.model()
    set_defaults(model.graph)
    model.metadata_props[CONFIG] = json.dumps(config.to_dict())
    return model


def search(
    op: Op, config: TransformerConfig, target: str, input_ids: ir.Value, attention_mask: ir.Value, options: OptionInputs
) -> dict[str, tuple[ir.Value, tuple[str, ...]]]:
    """Outputs by name, with their axes."""
    if config.architecture != "encoder-decoder":
        raise UserError(f"search in the graph needs an encoder-decoder, not architecture={config.architecture!r}")
    strategy = Beam(op, options, config, op.ReduceSum(attention_mask, [1], keepdims=0))
    decoder = TARGETS[target](op, config, input_ids, attention_mask, strategy.beam)
    sequences, lengths, scores = strategy.results(op, *run(op, decoder, strategy))
    rows = (BATCH, "n_best")
    return {"sequences": (sequences, (*rows, "length")), "lengths": (lengths, rows), "scores": (scores, rows)}
