"""Decoders, encoders and encoder-decoders trained on plain text."""

import math

import mlx.core as mx
import numpy as np
import pytest
from choices import both_choices
from mlx.utils import tree_flatten, tree_map
from tiny_run import metrics, write_pairs
from tiny_text import LAYERS, recipe, train

from export import OnnxTransformer, export_onnx
from mlx_transformer import Transformer, load
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.data.documents import PackedBatch, PackedBatches
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer
from mlx_transformer.training.data import load_data
from mlx_transformer.training.optimizers import Optimizer
from mlx_transformer.training.options import TrainingOptions
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.step import TrainStep
from mlx_transformer.training.trainer import Trainer

pytestmark = both_choices
every_objective = pytest.mark.parametrize("objective", LAYERS)
EOS = 2


def weights(folder):
    return {name: array.tobytes() for name, array in open_checkpoint(folder).tensors()}


@pytest.mark.fast("own-denoising", "gpu-language-model")
@every_objective
def test_perplexity_falls_and_the_record_says_what_was_learned(objective, tmp_path):
    result = train(tmp_path, objective, steps=40, valid_every=10)
    found = [entry["perplexity"] for entry in metrics(tmp_path / "run", "valid")]
    assert len(found) == 4
    assert found[-1] < 0.6 * found[0]
    assert all("bleu" not in entry for entry in metrics(tmp_path / "run", "valid"))
    config = open_checkpoint(result.model).config
    shapes = {"language-model": "decoder", "masked-language-model": "encoder", "denoising": "encoder-decoder"}
    assert config.architecture == shapes[objective]
    tokenizer = Tokenizer.load(result.model)
    assert (tokenizer.mask_id is None) == (objective == "language-model")
    assert tokenizer.vocab_size == config.vocab_size


@pytest.mark.fast("own-masked-language-model")
@every_objective
@pytest.mark.usefixtures("on_cpu")
def test_a_run_in_two_parts_is_the_run_in_one(objective, tmp_path):
    whole = train(tmp_path, objective, "whole", steps=9)
    train(tmp_path, objective, "parts", steps=5)
    parts = train(tmp_path, objective, "parts", resume=True, steps=9)
    assert weights(parts.model) == weights(whole.model)


@pytest.mark.fast("own-language-model", "gpu-denoising")
@every_objective
def test_with_all_that_training_has(objective, tmp_path):
    """Accumulation, checkpointed layers, sixteen bits: the loss is finite and close to that of a plain run."""
    plain = train(tmp_path, objective, "plain", model={"dropout": 0.0})
    given = {"accumulate": 2, "gradient_checkpointing": True, "precision": "bfloat16", "best": "perplexity"}
    result = train(tmp_path, objective, "all", model={"dropout": 0.0}, **given)
    losses = [metrics(tmp_path / name, "valid")[-1]["loss"] for name in ("plain", "all")]
    assert losses[1] == pytest.approx(losses[0], rel=0.2)
    assert plain.state.step == result.state.step == 4


def tiny_decoder(positions="sinusoidal"):
    mx.random.seed(2)
    sizes = {"encoder_layers": 0, "decoder_layers": 2, "d_model": 16, "heads": 2, "d_ff": 24}
    more = {"architecture": "decoder", "tie_embeddings": "target-output", "positions": positions, "dropout": 0.0}
    made = Transformer(TransformerConfig(vocab_size=40, **sizes, **more))
    mx.eval(made.parameters())
    return made.train()


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "relative", "none"])
def test_packed_documents_are_learned_as_each_by_itself(positions):
    """Loss and gradients of a row of several equal the sum over rows of one."""
    rng = np.random.default_rng(1)
    documents = [[*rng.integers(4, 40, n).tolist(), EOS] for n in (3, 9, 5, 12, 7, 20)]
    made = tiny_decoder(positions)
    step = TrainStep(made, Optimizer(made, TrainingOptions()), smoothing=0.1)

    def loss_and_gradients(batches):
        def total(parameters):
            made.update(parameters)
            return sum((step.loss(*step._inputs(batch)) for batch in batches), start=mx.array(0.0))

        loss, gradients = mx.value_and_grad(total)(tree_map(lambda p: p, made.trainable_parameters()))
        mx.eval(loss, gradients)
        return loss.item(), dict(tree_flatten(gradients))

    rows = [[1, *ids] for ids in documents]
    packed = list(PackedBatches(rows, batch_tokens=64, row_length=32, row_multiple=1).batches(0))
    assert any(batch.segments is not None for batch in packed)
    alone = []
    for ids in documents:
        row, targets = np.zeros((1, 32), np.int32), np.zeros((1, 32), np.int32)
        row[0, : len(ids)], targets[0, : len(ids)] = [1, *ids[:-1]], ids
        alone.append(PackedBatch(row, targets, None, len(ids)))
    (loss, gradients), (expected, theirs) = loss_and_gradients(packed), loss_and_gradients(alone)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        ours, other = np.array(gradient), np.array(theirs[name])
        assert np.abs(ours - other).max() <= 1e-4 * np.abs(other).max() + 1e-6, name


def test_what_was_denoised_learns_to_translate(tmp_path):
    first = train(tmp_path, "denoising", "first").model
    source, target = write_pairs(tmp_path)
    data = {"source": str(source), "target": str(target)}
    tables = {"data": data, "training": {"start_from": str(first), "steps": 2}}
    result = Trainer(Recipe.from_dict(tables), tmp_path / "second").run()
    assert open_checkpoint(result.model).config == open_checkpoint(first).config


def test_what_a_checkpoint_cannot_learn(tmp_path):
    encoder = train(tmp_path, "masked-language-model", "encoder").model
    tables = {"data": {"text": str(tmp_path / "text.txt")}}
    tables["training"] = {"start_from": str(encoder), "steps": 1, "objective": "language-model"}
    said = (
        "architecture='encoder' doesn't learn language-model: choose objective masked-language-model or "
        "contrastive or classification or distillation, or another"
    )
    with pytest.raises(UserError, match=said):
        Trainer(Recipe.from_dict(tables), tmp_path / "other")


@pytest.mark.parametrize(
    ("data", "training", "message"),
    [
        ({}, {"objective": "language-model"}, "a language-model is trained on plain text: set text"),
        ({"text": "x"}, {}, "text is what a language-model, .* is trained on: set objective"),
        ({"text": "x", "source": "y"}, {"objective": "denoising"}, r"data\.source is for translation: a denoising"),
        ({"text": "x"}, {"objective": "denoising", "best": "bleu"}, "best = 'bleu' is a score of translations"),
        ({"text": "x", "mask_share": 1.0}, {"objective": "denoising"}, r"data\.mask_share = 1\.0 must be"),
        ({"text": "x"}, {"objective": "language"}, r"training\.objective = 'language' .*language-model"),
    ],
)
def test_recipes_that_make_no_sense(data, training, message):
    with pytest.raises(UserError, match=message):
        Recipe.from_dict({"data": data, "training": {"steps": 1, **training}})


def test_smoothing_is_of_translations(tmp_path):
    assert recipe(tmp_path, "language-model").training.smoothing == 0
    assert recipe(tmp_path, "language-model", label_smoothing=0.2).training.smoothing == 0.2
    assert TrainingOptions().smoothing == 0.1


def test_perplexity_is_that_of_the_model(tmp_path):
    """Of the validation text, from the logits of each document by itself."""
    result = train(tmp_path, "language-model", label_smoothing=0.3)
    entry = metrics(tmp_path / "run", "valid")[-1]
    trainer_recipe = recipe(tmp_path, "language-model", label_smoothing=0.3)
    model, tokenizer = load(result.model)
    total, count = 0.0, 0
    for text in load_data(trainer_recipe).valid.texts:
        ids = tokenizer.encode(text)
        logits = np.array(model([[tokenizer.bos_id, *ids[:-1]]]))[0].astype(np.float64)
        total -= (logits[np.arange(len(ids)), ids] - np.log(np.exp(logits).sum(axis=1))).sum()
        count += len(ids)
    assert entry["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert entry["loss"] > math.log(entry["perplexity"])


@pytest.mark.slow
def test_a_decoder_learns_to_count_and_goes_on_in_both_runtimes(tmp_path):
    sizes = {"dropout": 0.0, "d_model": 32, "heads": 2, "d_ff": 64}
    result = train(tmp_path, "language-model", steps=300, model=sizes, learning_rate=3e-3)
    model, _ = load(result.model)
    found = model.complete(["3 4 5", "7 8"], max_new_tokens=4)
    assert found[0].startswith(" 6")
    assert found[1].startswith(" 9")
    assert "".join(model.stream("3 4 5", max_new_tokens=4)) == found[0]
    export_onnx(result.model, tmp_path / "onnx")
    onnx = OnnxTransformer(tmp_path / "onnx")
    assert onnx.complete(["3 4 5", "7 8"], max_new_tokens=4) == found
    assert onnx.complete("3 4 5", max_new_tokens=4) == "".join(onnx.stream("3 4 5", max_new_tokens=4)) == found[0]
