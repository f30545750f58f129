"""THE table of parameters: config -> {name: shape}. Both sides are built and checked against it.

Linear weights are (out, in), as in `mlx.nn.Linear` and PyTorch: y = x W^T + b. Query heads lie one after another in the
rows of `query_proj.weight`: head h owns rows h*d_k to (h+1)*d_k; key and value heads likewise.

    encoder.layers.0.self_attention.query_proj.weight        decoder.layers.0.cross_attention.query_proj.weight
    encoder.layers.0.self_attention_norm.weight              decoder.layers.0.feed_forward.up_proj.bias
    decoder.layers.0.self_attention.forget_proj.weight (SSRU)
    head_proj.weight, head_norm.weight (of an encoder's head)
    embedding.weight (one table) or source_embedding.weight, target_embedding.weight; output_proj.weight (not tied)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mlx_transformer.system.errors import refusal

from .config import RELATIVE, Stack, TransformerConfig

if TYPE_CHECKING:
    from .quantization import Quantization

Shape = tuple[int, ...]


def parameter_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Name and shape of every stored parameter, in the order of the data's way through the network."""
    return dict(_parameters(config))


def parameter_count(config: TransformerConfig) -> int:
    """Number of trained scalars (tied matrices counted once)."""
    return sum(map(math.prod, parameter_shapes(config).values()))


BARRED = -1e4
"""The bias of an output that is never chosen."""
TOKEN_TYPES = "token_type_embedding.weight"
"""The table of the kinds of tokens."""


def source_embedding_name(config: TransformerConfig) -> str:
    """Return the parameter that the encoder's embedding reads."""
    return "embedding.weight" if config.one_embedding else "source_embedding.weight"


def target_embedding_name(config: TransformerConfig) -> str:
    """Return the parameter that the decoder's embedding reads."""
    return "embedding.weight" if config.one_embedding else "target_embedding.weight"


def output_weight_name(config: TransformerConfig) -> str:
    """Return the parameter that the classifier multiplies by, if there is one: an embedding when tied."""
    if config.own_classifier:
        return "output_proj.weight"
    return target_embedding_name(config)


def embedding_names(config: TransformerConfig) -> set[str]:
    """Return tables that are read by token; a classifier that is tied to one multiplies by it too."""
    source = {source_embedding_name(config)} if config.has_encoder else set()
    return source | ({target_embedding_name(config)} if config.has_decoder else set())


def added_table_names(config: TransformerConfig) -> set[str]:
    """Return tables whose rows are only added, learned positions, T5's buckets and the kinds of tokens: nothing is
    multiplied by them."""
    positions = {name for stack in config.stacks for name, _ in _position_tables(config, stack)}
    return positions | ({TOKEN_TYPES} if config.token_types else set())


def is_unbounded(name: str, config: TransformerConfig) -> bool:
    """Return whether results of this matrix may be beyond float16's range: those of T5's feed-forward nets are. It and
    the sums over it stay float32 where a model computes in float16, as in transformers."""
    return config.positions in RELATIVE and name.endswith("feed_forward.down_proj.weight")


def quantizable_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Return the matrices that MLX's layers can hold quantised: those of linear maps and embeddings."""
    others = added_table_names(config)
    return {name: s for name, s in parameter_shapes(config).items() if len(s) == 2 and name not in others}


def check_parameters(
    config: TransformerConfig, shapes: Mapping[str, Shape], where: str, quantization: Quantization | None = None
) -> None:
    """Raise `UserError` listing every missing, unknown or wrongly shaped parameter of `shapes` against the table.

    With `quantization` the tensors stored of its matrices (`stored_shapes`) are expected in their place.
    """
    expected = parameter_shapes(config)
    if quantization:
        from .quantization import stored_shapes  # of few models

        expected = stored_shapes(expected, quantization)
    problems = [f"missing {name} {shape}" for name, shape in expected.items() if name not in shapes]
    problems += [f"unknown {name} {tuple(shape)}" for name, shape in shapes.items() if name not in expected]
    problems += [
        f"{name} is {tuple(shapes[name])}, expected {shape}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    if problems:
        raise refusal(f"{where}: parameters don't fit the config", problems, where)


def _parameters(c: TransformerConfig) -> Iterator[tuple[str, Shape]]:
    if c.one_embedding:
        yield "embedding.weight", (c.vocab_size, c.d_model)
    else:
        if c.has_encoder:
            yield "source_embedding.weight", (c.source_vocab_size, c.d_model)
        if c.has_decoder:
            yield "target_embedding.weight", (c.vocab_size, c.d_model)
    if c.token_types:
        yield TOKEN_TYPES, (c.token_types, c.d_model)
    if c.has_encoder:
        yield from _stack(c, "encoder", cross=False)
    if c.has_decoder:
        yield from _stack(c, "decoder", cross=c.has_encoder)
    if c.head.activation:
        yield from _linear("head_proj", c.d_model, c.d_model, c.head.bias)
    if c.head.norm:
        yield from _norm(c, "head_norm")
    if c.own_classifier:
        yield "output_proj.weight", (c.outputs, c.d_model)
    if c.output_bias:
        yield "output_proj.bias", (c.outputs,)


def _position_tables(c: TransformerConfig, stack: Stack) -> Iterator[tuple[str, Shape]]:
    if c.positions == "learned":
        yield f"{stack}.positions.weight", (c.max_positions, c.d_model)
    if c.positions == "relative":
        yield f"{stack}.positions.weight", (c.relative_buckets, c.of(stack).heads)
    if c.positions == "relative_layers":
        for i, layer in enumerate(c.layers(stack)):
            yield f"{stack}.positions.layers.{i}.weight", (c.relative_buckets, layer.heads)


def _stack(c: TransformerConfig, stack: Stack, cross: bool) -> Iterator[tuple[str, Shape]]:
    yield from _position_tables(c, stack)
    if c.embedding_norm:
        yield from _norm(c, f"{stack}.embedding_norm")
    of_self = _ssru if cross and c.recurrent else _attention
    for i, layer in enumerate(c.layers(stack)):
        name = f"{stack}.layers.{i}"
        yield from of_self(layer, f"{name}.self_attention")
        if c.first_norm or i:
            yield from _norm(c, f"{name}.self_attention_norm")
        if cross:
            yield from _attention(layer, f"{name}.cross_attention")
            yield from _norm(c, f"{name}.cross_attention_norm")
        yield from _feed_forward(layer, f"{name}.feed_forward")
        yield from _norm(c, f"{name}.feed_forward_norm")
    if c.norm_placement == "pre":
        yield from _norm(c, f"{stack}.norm")


def _attention(c: TransformerConfig, name: str) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{name}.query_proj", c.heads * c.d_k, c.d_model, c.attention_bias)
    yield from _linear(f"{name}.key_proj", c.key_value_heads * c.d_k, c.d_model, c.attention_bias)
    yield from _linear(f"{name}.value_proj", c.key_value_heads * c.d_v, c.d_model, c.attention_bias)
    if c.query_key_norm:
        yield f"{name}.query_norm.weight", (c.d_k,)
        yield f"{name}.key_norm.weight", (c.d_k,)
    yield from _linear(f"{name}.output_proj", c.d_model, c.heads * c.d_v, c.attention_bias)


def _ssru(c: TransformerConfig, name: str) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{name}.input_proj", c.d_model, c.d_model, bias=False)
    yield from _linear(f"{name}.forget_proj", c.d_model, c.d_model, bias=True)


def _feed_forward(c: TransformerConfig, name: str) -> Iterator[tuple[str, Shape]]:
    if c.gated:
        yield from _linear(f"{name}.gate_proj", c.d_ff, c.d_model, c.feed_forward_bias)
    yield from _linear(f"{name}.up_proj", c.d_ff, c.d_model, c.feed_forward_bias)
    yield from _linear(f"{name}.down_proj", c.d_model, c.d_ff, c.feed_forward_bias)


def _linear(name: str, out: int, width: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out, width)
    if bias:
        yield f"{name}.bias", (out,)


def _norm(c: TransformerConfig, name: str) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (c.d_model,)
    if c.norm == "layernorm" and c.norm_bias:
        yield f"{name}.bias", (c.d_model,)
