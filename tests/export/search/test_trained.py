"""One file that holds the search, on a trained model: 500 sentences, as MLX finds them, ids and text."""

from __future__ import annotations

import numpy as np
import pytest

from export import SearchModel, export_search
from mlx_transformer import load
from mlx_transformer.training.data import load_data
from mlx_transformer.training.recipe import load_recipe
from mlx_transformer.training.trainer import Trainer

SENTENCES = 500


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A minute or two of training on the built-in corpus: the checkpoint and unseen lines."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = load_recipe("quickstart", {"data": {}, "model": {}, "training": {"steps": 600}})
    data = load_data(recipe)
    checkpoint = Trainer(recipe, folder / "run", data=data).run().model
    return checkpoint, list(data.held_out.source[:SENTENCES])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_500_sentences(trained, tmp_path, target):
    """Scores within float32's rounding over some dozen tokens."""
    checkpoint, lines = trained
    model, tokenizer = load(checkpoint)
    graph = SearchModel(export_search(checkpoint, tmp_path / "ids.onnx", target=target))
    rows = tokenizer.encode_batch(lines)
    assert len(rows) == SENTENCES
    for beam in (1, 4, 8):
        results, expected = graph.search(rows, beam=beam), model.search(rows, beam=beam)
        assert [row[0].ids for row in results] == [row[0].ids for row in expected]
        np.testing.assert_allclose([row[0].score for row in results], [row[0].score for row in expected], 1e-4, 1e-4)
    for options in ({"seed": 1}, {"seed": 2**64 - 3, "top_k": 40, "temperature": 0.8}, {"seed": 5 << 32, "top_p": 0.9}):
        assert graph.generate(rows, sample=True, **options) == model.generate(rows, sample=True, **options)


@pytest.mark.slow
def test_500_lines_of_text(trained, tmp_path):
    pytest.importorskip("onnxruntime_extensions", reason="pip install -e '.[text]'")
    checkpoint, lines = trained
    model, tokenizer = load(checkpoint)
    graph = SearchModel(export_search(checkpoint, tmp_path / "text.onnx", text=True))
    expected = tokenizer.decode_batch(model.generate(tokenizer.encode_batch(lines), beam=4))
    assert graph.translate(lines, beam=4) == expected
