"""MLX's gradients against finite differences of the float64 reference, and a wrong gradient, which has to show."""

from pathlib import Path

import numpy as np
import pytest
from combined import slow, thinned
from random_models import random_weights, write_model
from small_models import configs

from export.validate import compare
from export.validate.checks import gradients as module
from export.validate.checks.gradients import BUDGET, check_gradients, kind_of, loss, worst_of_each
from mlx_transformer.core.parameters import parameter_shapes

pytestmark = pytest.mark.gpu_path

CONFIGS = configs()


@pytest.mark.fast("untied, encoder", "positions=sinusoidal_halves, decoder")
@pytest.mark.parametrize("name", thinned(CONFIGS, 20))
def test_every_kind_of_parameter_has_the_gradient_that_differences_give(name: str) -> None:
    config = CONFIGS[name]
    gradients = check_gradients(config, random_weights(config, 1), seed=2)
    worst = list(worst_of_each(gradients))
    assert {g.kind for g in worst} == {kind_of(parameter) for parameter in parameter_shapes(config)}
    assert all(g.passed for g in gradients), max(worst, key=lambda g: g.error).summary
    assert {"all of it"} < {g.direction for g in gradients}
    assert sum(abs(g.expected) > 1e-4 for g in worst) > len(worst) / 2  # there is something to compare


@pytest.mark.parametrize("part", thinned(["query_proj.weight", "norm.weight", "embedding.weight"], 3))
def test_a_gradient_wrong_by_a_thousandth_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, right = CONFIGS["paper"], module.mlx_gradients

    def wrong(*arguments):
        return {name: g * np.float32(1.001 if name.endswith(part) else 1) for name, g in right(*arguments).items()}

    monkeypatch.setattr(module, "mlx_gradients", wrong)
    failed = {g.parameter for g in check_gradients(config, random_weights(config, 1), seed=2) if not g.passed}
    assert failed
    assert all(name.endswith(part) for name in failed)


@slow
def test_another_loss_has_other_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["paper"]
    monkeypatch.setattr(module, "loss", lambda reference, batch: loss(reference, batch, smoothing=0.101))
    gradients = check_gradients(config, random_weights(config, 1), seed=2)
    assert max(g.error for g in gradients) > 10 * BUDGET


def test_gradients_are_part_of_a_report_where_they_are_asked_for(tmp_path: Path) -> None:
    models = write_model(CONFIGS["paper, encoder"], tmp_path, 1)
    report = compare(*models, ["mlx"], seed=3, gradients=True, searches=False)
    assert report.equal, report.failures()
    assert report.to_dict()["gradients"]
    assert "<h2>Gradients</h2>" in page_of(report, tmp_path)
    assert compare(*models, ["mlx"], seed=3, searches=False).gradients == ()


def page_of(report, folder: Path) -> str:
    report.write_html(folder / "pages" / "report.html")
    return (folder / "pages" / "report.html").read_text(encoding="utf-8")
