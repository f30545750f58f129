"""What a matrix of the parameter table is: a linear map, an embedding or a table of positions."""

import dataclasses

import pytest
from small_models import configs

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import added_table_names, embedding_names, parameter_shapes, quantizable_shapes


@pytest.mark.parametrize("name", configs())
@pytest.mark.parametrize("positions", ["learned", "relative", "relative_layers", "rotary"])
def test_each_matrix_has_one_role(name, positions):
    if configs()[name].recurrent:
        positions = "learned"  # the others act in a decoder's self-attention
    config = dataclasses.replace(configs()[name], positions=positions)
    shapes = parameter_shapes(config)
    embeddings, tables = embedding_names(config), added_table_names(config)
    linear = {parameter for parameter in shapes if parameter.endswith("_proj.weight")}
    assert sorted([*embeddings, *tables, *linear]) == sorted(n for n, shape in shapes.items() if len(shape) == 2)
    assert {shapes[table][0] for table in tables} == {
        "learned": {config.max_positions},
        "relative": {config.relative_buckets},
        "relative_layers": {config.relative_buckets},
        "rotary": set(),
    }[positions]
    assert all(shapes[embedding][1] == config.d_model for embedding in embeddings)
    assert quantizable_shapes(config).keys() == embeddings | linear


ALL, READ = {"query_proj", "key_proj", "value_proj", "output_proj"}, {"query_proj", "key_proj", "value_proj"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (set(), set())),
        (dict(attention_bias=True), (ALL, ALL)),
        (dict(attention_bias=True, attention_output_bias=False), (READ, READ)),
        (dict(attention_output_bias=True), ({"output_proj"}, {"output_proj"})),
        (dict(decoder={"attention_bias": True}, attention_output_bias=False), (set(), READ)),
        (dict(decoder={"attention_output_bias": False}, attention_bias=True), (ALL, READ)),
    ],
)
def test_attentions_have_the_biases_of_their_stack(fields, expected):
    config = TransformerConfig(vocab_size=9, d_model=8, heads=2, d_ff=8, encoder_layers=1, decoder_layers=1, **fields)
    biases = [name.split(".") for name in parameter_shapes(config) if name.endswith("proj.bias")]
    for kind in ("self_attention", "cross_attention"):
        for stack, names in zip(("encoder", "decoder"), expected, strict=True):
            held = {
                module
                for side, _, _, part, module, _ in (n for n in biases if len(n) == 6)
                if (side, part) == (stack, kind)
            }
            assert held == (names if (stack, kind) != ("encoder", "cross_attention") else set())
