"""The pictures of the architecture: drawn from the table of parameters and the import statements."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from assemble import import_picture, network_picture
from imports import ROOT

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_count, parameter_shapes


def words_of(picture: str) -> str:
    assert "\n\n" not in picture  # Markdown would end the block there
    return " | ".join(text.text or "" for text in ET.fromstring(picture).iter() if text.tag in ("text", "figcaption"))


def test_the_network_is_the_table_of_parameters() -> None:
    config = TransformerConfig.preset("base", network_picture.VOCABULARY)
    counts = network_picture.groups(parameter_shapes(config))
    assert sum(counts.values()) == parameter_count(config)
    assert len([name for name in counts if name.startswith("decoder.layers.0.")]) == 6
    words = words_of(network_picture.draw(ROOT))
    assert f"{parameter_count(config):,} numbers" in words
    assert words.count("self attention, add and norm") == 2
    assert words.count("cross attention, add and norm") == 1
    assert words.count("6 ×") == 2


def test_the_imports_are_those_of_the_code() -> None:
    found = import_picture.imports(ROOT)
    assert found["mlx_transformer/system"] == set()
    assert found["mlx_transformer/core"] == {"mlx_transformer/system", "mlx_transformer/page"}
    assert found["mlx_transformer/nn"] == {"mlx_transformer/core", "mlx_transformer/system", "mlx_transformer/page"}
    assert {"mlx_transformer/nn", "mlx_transformer/data"} <= found["mlx_transformer/training"]
    assert not any(name.startswith("export/") for name in found["mlx_transformer/training"])
    words = words_of(import_picture.draw(ROOT))
    assert all(folder.partition("/")[2] in words for folder in found)
