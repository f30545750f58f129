"""The recipe of the translator that ships, trained once more."""

import pytest

from mlx_transformer.runtime.transformer import load
from mlx_transformer.training.data import load_data
from mlx_transformer.training.recipe import load_recipe
from mlx_transformer.training.trainer import Trainer


@pytest.mark.slow
def test_it_translates_nearly_all_that_it_has_not_seen(tmp_path):
    recipe = load_recipe("sentences", {})
    model, _ = load(Trainer(recipe, tmp_path / "run").run().model)
    held_out = load_data(recipe).held_out
    assert held_out is not None
    right = sum(map(str.__eq__, model.translate(held_out.source, beam=1), held_out.target))
    assert right > 0.99 * len(held_out)
