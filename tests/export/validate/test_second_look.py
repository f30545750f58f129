"""float32's own error drawn again: what the draws are, and that they save the innocent and nobody else."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_models import random_weights

from export.reference import Reference
from export.validate import compare, compare_engines
from export.validate.cases import Case, grid
from export.validate.checks.second_look import DRAWS, Reordered, SecondLook
from export.validate.engines.reference_engine import ReferenceEngine
from export.validate.rule import Natural, Truth
from mlx_transformer.spec.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.spec.config import TransformerConfig

compare_module = sys.modules[compare.__module__]  # `export.validate.compare` is the function
CONFIG = TransformerConfig(
    vocab_size=60, d_model=32, heads=4, d_ff=48, encoder_layers=1, decoder_layers=1, max_positions=40
)


def test_a_second_look_draws_float32s_own_errors_anew() -> None:
    model = Reference(CONFIG, random_weights(CONFIG, 5))
    case = grid(model.config, seed=3)[2]
    ids = case.ids, case.target_ids, case.mask
    truth, single = model(*ids), Reference(model.config, model.weights, np.float32)
    assert np.abs(Reordered(model.config, model.weights, np.float64)(*ids) - truth).max() < 1e-12  # the same function
    reordered = Reordered(model.config, model.weights, np.float32)
    errors = [single(*ids) - truth, *(reordered(*ids) - truth for _ in range(DRAWS))]
    sizes = [float(np.sqrt(np.mean(error**2))) for error in errors]
    assert len(set(sizes)) == len(sizes)
    found = SecondLook(model.config, model.weights)(case, "logits")
    assert found.rms == pytest.approx(float(np.sqrt(np.mean(np.square(sizes[1:])))))
    assert found.max == pytest.approx(float(np.sqrt(np.mean([np.abs(error).max() ** 2 for error in errors[1:]]))))
    assert min(sizes) < found.rms < max(sizes) < 4 * found.rms
    assert (found.size, found.tokens) == (pytest.approx(float(np.sqrt(np.mean(truth**2)))), ids[1].size)


@pytest.mark.parametrize(("epsilon", "factor", "luck", "equal"), [(1e-5, 3, 8, True), (1e-6, 1, 2, False)])
def test_a_lucky_float32_blames_nobody_and_hides_nothing(
    epsilon: float,
    factor: float,
    luck: float,
    equal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one float32 pass errs less than float32 does: who is over budget by that is judged by more passes. A runtime
    with three times float32's errors is right, one with another epsilon isn't."""
    truths, looks = compare_module._truths, []

    def lucky(*arguments: Any) -> dict[str, Truth]:
        def smaller(natural: Natural) -> Natural:
            errors = {name: getattr(natural, name) / luck for name in ("rms", "max", "worst")}
            return replace(natural, **errors)

        return {tap: replace(t, natural=smaller(t.natural)) for tap, t in truths(*arguments).items()}

    class Watched(SecondLook):
        def __call__(self, case: Case, tap: str) -> Natural:
            looks.append(tap)
            return super().__call__(case, tap)

    class Coarse(ReferenceEngine):
        logits_only = True

        def logits(self, case: Case) -> np.ndarray:
            exact = Reference(self.config, self.stored)(case.ids, case.target_ids, case.mask)
            return exact + factor * (super().logits(case) - exact)

    monkeypatch.setattr(compare_module, "_truths", lucky)
    monkeypatch.setattr(compare_module, "SecondLook", Watched)
    save_checkpoint(tmp_path / "model", CONFIG, random_weights(CONFIG, 1))
    checkpoint = open_checkpoint(tmp_path / "model")
    engine = Coarse(replace(checkpoint.config, norm_epsilon=epsilon), dict(checkpoint.tensors()))
    report = compare_engines(checkpoint, [engine], grid(checkpoint.config, 1, longest=12))
    assert report.equal is equal, report.failures()
    assert looks
