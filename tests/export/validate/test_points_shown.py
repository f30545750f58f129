"""Every engine shows the points of a pass, attention weights among them: judged against the reference by the rule."""

from __future__ import annotations

import numpy as np
import pytest
from combined import combined, thinned
from random_models import write_model
from small_models import SIZES, configs

from export.validate.cases import Case
from export.validate.engines import open_engine
from export.validate.points import inner_names, positions_first, tap_names
from export.validate.rule import Deviation, Measurement, Truth
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

CONFIGS = {**configs(), "relative": TransformerConfig(**{**SIZES, "positions": "relative"})}
ALONE = ("modern, decoder", "paper, decoder", "modern, encoder", "odd widths, encoder")
BOTH = ("paper", "modern", "odd widths", "untied", "relative")


def names_of(config: TransformerConfig) -> list[str]:
    return [*tap_names(config), *(name for name in inner_names(config) if name.endswith(".weights"))]


def case_of(config: TransformerConfig) -> Case:
    rng = np.random.default_rng(1)
    both = config.architecture == "encoder-decoder"
    ids = rng.integers(4, config.source_vocab_size if both else config.vocab_size, (3, 11))
    return Case("three rows", ids, None, rng.integers(4, config.vocab_size, (3, 9)) if both else None, 1)


def assert_shown(config, folder, runtime, **options) -> None:
    """At every point within the budget of its precision; a query's weights add up to 1, those of later tokens are 0."""
    checkpoint, onnx = write_model(config, folder, **options)
    opened, case, names = open_checkpoint(checkpoint), case_of(config), names_of(config)
    truths = [open_engine(f"reference:{p}", opened, None).points(case, names) for p in ("float64", "float32")]
    engine = open_engine(runtime, None if runtime.startswith("onnx") else opened, onnx)
    got = engine.points(case, names)
    assert [name for name in names if name not in got] == list(engine.capabilities.missing_taps)
    budget = engine.budget
    for name, value in got.items():
        t64, t32, value = (positions_first(np.asarray(x)) for x in (*(truth[name] for truth in truths), value))
        truth = Truth.of(t64, t32.astype(np.float64), np.ones(t64.shape[:2], bool))
        measured = Measurement.of(Deviation.of(value, truth), truth.scale, truth.scale, budget)
        assert measured.passed, f"{name}: {measured}"
    for name in (name for name in got if name.endswith(".weights")):
        weights = np.asarray(got[name], np.float64)
        if name.startswith("decoder") and "self_attention" in name:
            assert not weights[..., ~np.tri(weights.shape[-1], dtype=bool)].any()
        assert np.abs(weights.sum(axis=-1) - 1).max() <= weights.shape[-1] * budget.unit


@pytest.mark.parametrize(("name", "runtime"), combined([*BOTH, *ALONE], ["mlx", "onnxruntime", "reference"], step=2))
def test_all_runtimes(name, runtime, tmp_path):
    assert_shown(CONFIGS[name], tmp_path, runtime)


@pytest.mark.fast("paper")
@pytest.mark.parametrize("name", thinned(BOTH, 2))
def test_target_cpu(name, tmp_path):
    assert_shown(CONFIGS[name], tmp_path, "onnxruntime", target="cpu")


@pytest.mark.parametrize("target", thinned(["web", "cuda"], 2))
def test_other_targets(target, tmp_path):
    assert_shown(CONFIGS["modern"], tmp_path, "onnxruntime", target=target)


@pytest.mark.fast("int8-cpu", "int4-cpu")
@pytest.mark.parametrize(
    ("precision", "target"), combined(["float16", "int8", "int8-weights", "int4"], ["portable", "cpu"])
)
def test_lower_precisions_show_weights(precision, target, tmp_path):
    config = CONFIGS["paper"]
    _, onnx = write_model(config, tmp_path, precision=[precision], target=target, accept_loss=True)
    got = open_engine(f"onnxruntime:cpu:all:{precision}", None, onnx).points(case_of(config), names_of(config))
    weights = {name: value for name, value in got.items() if name.endswith(".weights")}
    assert len(weights) == 6
    for value in weights.values():
        assert np.abs(value.astype(np.float64).sum(axis=-1) - 1).max() <= 2**-11 * value.shape[-1]


def test_looking_shows_what_is_asked_for_and_changes_nothing(tmp_path):
    config = CONFIGS["paper"]
    checkpoint, _ = write_model(config, tmp_path)
    engine, case = open_engine("mlx", open_checkpoint(checkpoint), None), case_of(config)
    before = engine.logits(case)
    name = "decoder.layers.1.cross_attention.weights"
    assert list(engine.points(case, [name])) == [name]
    np.testing.assert_array_equal(engine.logits(case), before)


def test_without_a_checkpoint_a_runtime_that_reads_one_says_so(tmp_path):
    _, onnx = write_model(CONFIGS["paper"], tmp_path)
    for runtime in ("mlx", "reference", "evaluator", "wasm", "webgpu"):
        with pytest.raises(UserError, match="needs a checkpoint"):
            open_engine(runtime, None, onnx)
