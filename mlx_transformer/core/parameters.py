"""The table of parameters: config -> {name: shape}. MLX and ONNX models are built and checked against it.

Linear weights are (out, in), as in `mlx.nn.Linear` and PyTorch: y = x W^T + b. Query head h has the rows h*d_k to
(h+1)*d_k of `query_proj.weight`; key and value heads likewise. E.g.

    encoder.layers.0.self_attention.query_proj.weight        decoder.layers.0.cross_attention.query_proj.weight
    encoder.layers.0.self_attention_norm.weight              decoder.layers.0.feed_forward.up_proj.bias
    decoder.layers.0.self_attention.forget_proj.weight (SSRU)
    head_proj.weight, head_norm.weight (head of an encoder-only model)
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
    """{name: shape} of every stored parameter, in the order in which data flows through the network."""
    return dict(_parameters(config))


def parameter_count(config: TransformerConfig) -> int:
    """Number of trained scalars; tied matrices count once."""
    return sum(map(math.prod, parameter_shapes(config).values()))


BARRED = -1e4
"""The output bias of a token that must never be generated."""
TOKEN_TYPES = "token_type_embedding.weight"


def source_embedding_name(config: TransformerConfig) -> str:
    """The name of the encoder's embedding."""
    return "embedding.weight" if config.one_embedding else "source_embedding.weight"


def target_embedding_name(config: TransformerConfig) -> str:
    """The name of the decoder's embedding."""
    return "embedding.weight" if config.one_embedding else "target_embedding.weight"


def output_weight_name(config: TransformerConfig) -> str:
    """The name of the classifier's matrix, which is an embedding if tied. For models with a classifier only."""
    if config.own_classifier:
        return "output_proj.weight"
    return target_embedding_name(config)


def embedding_names(config: TransformerConfig) -> set[str]:
    """Names of the embeddings. A tied classifier multiplies by one of them too."""
    source = {source_embedding_name(config)} if config.has_encoder else set()
    return source | ({target_embedding_name(config)} if config.has_decoder else set())


def added_table_names(config: TransformerConfig) -> set[str]:
    """Names of tables that are only added: learned positions, T5's relative buckets and token types."""
    positions = {name for stack in config.stacks for name, _ in _position_tables(config, stack)}
    return positions | ({TOKEN_TYPES} if config.token_types else set())


def is_unbounded(name: str, config: TransformerConfig) -> bool:
    """Whether products with this matrix may overflow float16, as in T5's feed-forward nets.

    Such a matrix and its sums stay float32 in a float16 model, as in transformers.
    """
    return config.positions in RELATIVE and name.endswith("feed_forward.down_proj.weight")


def quantizable_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """{name: shape} of the matrices that MLX can quantise: those of linear maps and embeddings."""
    others = added_table_names(config)
    return {name: s for name, s in parameter_shapes(config).items() if len(s) == 2 and name not in others}


def check_parameters(
    config: TransformerConfig, shapes: Mapping[str, Shape], where: str, quantization: Quantization | None = None
) -> None:
    """Raise `UserError` listing every missing, unknown or wrongly shaped parameter.

    With `quantization`, its matrices must be given as the tensors of `stored_shapes`. where: the file or folder, for
    the message.
    """
    expected = parameter_shapes(config)
    if quantization:
        from .quantization import stored_shapes  # few models need it

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
        yield from _norms(c, f"{name}.self_attention", bare=not (c.first_norm or i))
        if cross:
            yield from _attention(layer, f"{name}.cross_attention")
            yield from _norms(c, f"{name}.cross_attention")
        yield from _feed_forward(layer, f"{name}.feed_forward")
        yield from _norms(c, f"{name}.feed_forward")
    if c.norm_placement != "post":
        yield from _norm(c, f"{stack}.norm")


def _attention(c: TransformerConfig, name: str) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{name}.query_proj", c.heads * c.d_k, c.d_model, c.attention_bias)
    yield from _linear(f"{name}.key_proj", c.key_value_heads * c.d_k, c.d_model, c.attention_bias)
    yield from _linear(f"{name}.value_proj", c.key_value_heads * c.d_v, c.d_model, c.attention_bias)
    if c.query_key_norm:
        whole = c.query_key_norm_place == "width"
        yield f"{name}.query_norm.weight", (c.heads * c.d_k if whole else c.d_k,)
        yield f"{name}.key_norm.weight", (c.key_value_heads * c.d_k if whole else c.d_k,)
    yield from _linear(f"{name}.output_proj", c.d_model, c.heads * c.d_v, c.output_proj_bias)


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


def _norms(c: TransformerConfig, name: str, bare: bool = False) -> Iterator[tuple[str, Shape]]:
    if c.norm_placement != "after" and not bare:
        yield from _norm(c, f"{name}_norm")
    if c.norm_placement in ("sandwich", "after"):
        yield from _norm(c, f"{name}_post_norm")


def _norm(c: TransformerConfig, name: str) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (c.d_model,)
    if c.norm == "layernorm" and c.norm_bias:
        yield f"{name}.bias", (c.d_model,)
