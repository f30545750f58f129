"""What a matrix of the parameter table is: a linear map, an embedding or a table of positions."""

import dataclasses

import pytest
from small_models import configs

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
