"""A decoder that starts from zeros still does so behind its training, and its start is never written."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from choices import both_choices
from tiny_run import recipe

from mlx_transformer import Tokenizer, Transformer
from mlx_transformer.convert import to_marian
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import BARRED
from mlx_transformer.data.batches import Batch
from mlx_transformer.training.optimizers import Optimizer
from mlx_transformer.training.options import TrainingOptions
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.step import TrainStep
from mlx_transformer.training.trainer import Trainer

pytestmark = both_choices

V = 23
STUDENT = {"preset": "student", "d_model": 64, "heads": 2, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 1}


def small(**changes) -> Transformer:
    """A student with the start behind its words, in training mode."""
    mx.random.seed(3)
    sizes = {key: value for key, value in STUDENT.items() if key != "preset"} | {"dropout": 0.0, **changes}
    ids = {"pad_id": V - 1, "bos_id": V - 1, "eos_id": 0}
    model = Transformer(TransformerConfig.preset("student", V, **{**ids, **sizes}))
    model.train()
    return model


def batch(pad: int) -> Batch:
    rng = np.random.default_rng(0)
    source, target = rng.integers(2, pad, (5, 6)), rng.integers(2, pad, (5, 7))
    target[1, 3:], target[4] = pad, pad
    before = np.concatenate([np.full((5, 1), pad), target[:, :-1]], axis=1)
    return Batch(*(x.astype(np.int32) for x in (source, before, target)), tokens=int((target != pad).sum()))


def test_a_fresh_decoder_that_starts_with_padding_starts_from_zeros() -> None:
    weights = small().weights()
    assert not weights["embedding.weight"][V - 1].any()
    assert weights["embedding.weight"][: V - 1].any(axis=1).all()
    assert weights["output_proj.bias"].tolist() == [0.0] * (V - 1) + [BARRED]


@pytest.mark.parametrize("optimizer", ["adam", "muon", "lion", "adafactor"])
def test_no_optimizer_moves_the_start(optimizer: str) -> None:
    model = small()
    before = model.weights()
    options = TrainingOptions(steps=9, optimizer=optimizer)  # type: ignore[arg-type]
    step = TrainStep(model, Optimizer(model, options), smoothing=0.1)
    for _ in range(3):
        step.evaluate(*step(batch(V - 1), 0.01))
    after = model.weights()
    assert not after["embedding.weight"][V - 1].any()
    assert after["output_proj.bias"][V - 1] == BARRED
    for name in ("embedding.weight", "output_proj.bias"):
        assert (before[name][: V - 1] != after[name][: V - 1]).any(), name


def test_the_loss_is_of_the_others() -> None:
    """With smoothing a bias of -10,000 among all outputs would be most of it."""
    model = small()
    made, e = batch(V - 1), 0.1
    logits = np.array(model(mx.array(made.source), mx.array(made.target_in)), np.float64)[..., : V - 1]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = made.target_out != V - 1
    picked = np.take_along_axis(log_p, np.where(counted, made.target_out, 0)[..., None], -1)[..., 0]
    expected = -(((1 - e) * picked + e * log_p.mean(-1)) * counted).sum()
    step = TrainStep(model, Optimizer(model, TrainingOptions(steps=9)), smoothing=e)
    smoothed, plain = step.losses(made)
    assert smoothed.item() == pytest.approx(expected, rel=1e-5)
    assert plain.item() == pytest.approx(-(picked * counted).sum(), rel=1e-5)
    assert step(made, 0.0)[0].item() == pytest.approx(expected / made.tokens, rel=1e-5)


def test_a_start_that_is_learned_goes_on_being_learned() -> None:
    """T5's decoder starts with padding too, from a row like any other."""
    model = small(output_bias=False)
    model.embedding.weight[V - 1] = 1.0
    step = TrainStep(model, Optimizer(model, TrainingOptions(steps=9, optimizer="adam")))
    step.evaluate(*step(batch(V - 1), 0.01))
    assert (np.array(model.embedding.weight[V - 1]) != 1.0).any()


@pytest.mark.usefixtures("on_cpu")
def test_a_student_that_was_trained_here_is_one_of_marians(tmp_path: Path) -> None:
    tables = recipe(tmp_path).to_dict()
    data = {key: value for key, value in tables["data"].items() if value is not None}
    data |= {"vocab_model": "unigram"}
    values = {"data": data, "model": STUDENT, "training": tables["training"]}
    trained = Trainer(Recipe.from_dict(values), tmp_path / "run").run()
    config, tokenizer = open_checkpoint(trained.model).config, Tokenizer.load(trained.model)
    assert (config.eos_id, config.pad_id, config.bos_id) == (0, tokenizer.pad_id, config.vocab_size - 1)
    to_marian(trained.model, tmp_path / "theirs")
    assert {path.name for path in (tmp_path / "theirs").iterdir()} >= {"model.npz", "vocab.spm", "config.yml"}
