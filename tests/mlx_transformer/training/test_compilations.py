"""A GPU's compiled step is built once for each shape of batches: counted, shown, and over after the first epoch."""

from itertools import islice

import pytest
import tiny_run
import tiny_text
from combined import combined
from tiny_run import metrics

from mlx_transformer.device import deciding_as
from mlx_transformer.training.trainer import Trainer

EPOCHS = 3


@pytest.mark.fast("masked-language-model-1")
@pytest.mark.parametrize(("objective", "accumulate"), combined(["translation", *tiny_text.LAYERS], [1, 2], step=2))
def test_none_follows_the_first_epoch(objective, accumulate, tmp_path):
    given = {"epochs": EPOCHS, "steps": None, "accumulate": accumulate}
    with deciding_as("gpu"):
        pairs = objective == "translation"
        recipe = tiny_run.recipe(tmp_path, **given) if pairs else tiny_text.recipe(tmp_path, objective, **given)
        trainer = Trainer(recipe, tmp_path / "run")
        batches = islice(trainer.batches.from_step(0), EPOCHS * len(trainer.batches))
        shapes = {tuple(None if array is None else array.shape for array in batch.arrays(0)) for batch in batches}
        trainer.run()
    found = [(entry["epoch"], entry["compilations"]) for entry in metrics(tmp_path / "run", "train")]
    assert found[-1][0] == pytest.approx(EPOCHS, abs=1)
    first = [count for epoch, count in found if epoch <= 1]
    assert first[-1] == found[-1][1], found
    # Of several batches a step the update is a function of its own.
    assert first[0] >= 1
    assert found[-1][1] <= len(shapes) + (accumulate > 1)


def test_a_cpu_compiles_nothing(tmp_path):
    with deciding_as("cpu"):
        Trainer(tiny_run.recipe(tmp_path), tmp_path / "run").run()
    assert all("compilations" not in entry for entry in metrics(tmp_path / "run", "train"))
