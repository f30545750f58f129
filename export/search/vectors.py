"""A text encoder as one graph: tokenizer, encoder, pooling.

Shapes: B texts, W numbers of a vector, L tokens of the longest text.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from export.graph.builder import GraphBuilder
from export.interface import TEXT_VECTORS, Request
from export.nn.model import Transformer
from export.targets.sentence_embedding import vector_outputs
from mlx_transformer.core.heads import EMBEDDING
from mlx_transformer.core.inputs import companions
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.system.errors import UserError

from .wordpiece import WordPieceOps


def vector_model(request: Request, tokenizer: str, embedding: TextEmbedding) -> ir.Model:
    r"""
    text (B,) --> tokenizer --> ids (B, L) ------> encoder --> pooling, dense layers, unit length --> sentence_embedding
                           \--> mask (B, L) --------^-------------^                                              (B, W)

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
