"""Training does what it is for: the loss falls, and a small model learns to copy."""

from __future__ import annotations

import numpy as np
import pytest
from choices import both_choices, gpu_in_slow
from combined import thinned
from tiny_run import metrics, write_pairs

import mlx_transformer
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer

pytestmark = both_choices


@gpu_in_slow
@pytest.mark.parametrize("kind", thinned(["attention", "ssru"], 2))
def test_a_small_model_learns_to_copy(kind, tmp_path):
    """1+1 layers, digits to the same digits; held-out lines, greedy.

    Every line that validates is right by step 120 under five BLAS kernels, with a GPU's batches too, which hold half
    the lines (padded to 16 positions).
    """
    source, target = write_pairs(tmp_path, count=4000, seed=1)
    held_out = write_pairs(tmp_path, count=100, seed=2)
    trained_lines = set(source.read_text(encoding="utf-8").split())
    lines = [line for line in held_out[0].read_text(encoding="utf-8").split() if line not in trained_lines]
    assert len(lines) > 30
    data = {"source": str(source), "target": str(target), "vocab_size": 260, "batch_tokens": 1024}
    model = {"preset": "tiny", "d_model": 32, "heads": 1, "d_ff": 64, "dropout": 0.0}
    model |= {"encoder_layers": 1, "decoder_layers": 1, "decoder_self_attention": kind}
    training = {"steps": 150, "warmup_steps": 20, "learning_rate": 0.01, "schedule": "linear", "valid_every": 50}
    recipe = Recipe.from_dict(
        {"data": data, "model": model, "training": {**training, "log_every": 5, "label_smoothing": 0}}
    )
    result = Trainer(recipe, tmp_path / "run").run()
    losses = [entry["loss"] for entry in metrics(tmp_path / "run", "train")]
    assert np.mean(losses[-5:]) < 0.35 * losses[0]
    valid = metrics(tmp_path / "run", "valid")
    assert valid[-1]["loss"] < valid[0]["loss"]
    assert valid[-1]["exact_match"] >= 95

    trained, tokenizer = mlx_transformer.load(result.model)
    assert tokenizer is not None
    outputs = tokenizer.decode_batch(trained.generate(tokenizer.encode_batch(lines)))
    assert np.mean([a == b for a, b in zip(outputs, lines, strict=True)]) >= 0.95
