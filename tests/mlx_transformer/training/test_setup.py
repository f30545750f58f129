"""Runs that start from a checkpoint, keep some of it as it is, and leave the weights that were asked for."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from choices import both_choices, gpu_in_slow
from combined import slow
from tiny_run import metrics, recipe

from mlx_transformer import Transformer
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.options import TrainingOptions
from mlx_transformer.training.progress import State
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer
from mlx_transformer.training.weights import average_checkpoints

pytestmark = both_choices


def train(folder, name="run", resume=False, model=None, **training):
    return Trainer(recipe(folder, model, **training), folder / name, resume).run()


def weights(folder):
    return dict(open_checkpoint(folder).tensors())


def same(one, other):
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.fixture
def first(tmp_path):
    """A run of four steps."""
    return train(tmp_path, "first").model


def started(folder, start, name="second", resume=False, model=None, **training):
    values = recipe(folder, steps=4).to_dict()
    data = {key: value for key, value in values["data"].items() if value is not None and key != "vocab_size"}
    options = {key: value for key, value in values["training"].items() if value is not None}
    tables = {"data": data, "model": model or {}, "training": {**options, "start_from": str(start), **training}}
    return Trainer(Recipe.from_dict(tables), folder / name, resume)


def test_a_run_starts_from_a_checkpoint(first, tmp_path):
    """Its weights, its config, its vocabulary; with a learning rate of nearly 0 they stay what they are."""
    trainer = started(tmp_path, first, learning_rate=1e-12, cooldown=0.0)
    assert same({name: np.array(w) for name, w in trainer.model.weights().items()}, weights(first))
    result = trainer.run()
    for name, array in weights(result.model).items():
        np.testing.assert_allclose(array, weights(first)[name], atol=1e-9)
    assert open_checkpoint(result.model).config == open_checkpoint(first).config
    assert (result.model / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    record = json.loads((tmp_path / "second" / "run.json").read_text(encoding="utf-8"))
    assert record["recipe"]["training"]["start_from"] == str(first)
    assert len(record["start"]["weights"]) == 64


@pytest.mark.usefixtures("on_cpu")
def test_such_a_run_is_resumed_bit_for_bit(first, tmp_path):
    whole = started(tmp_path, first, "whole", steps=6).run()
    started(tmp_path, first, "parts", steps=3).run()
    parts = started(tmp_path, first, "parts", resume=True, steps=6).run()
    assert same(weights(parts.model), weights(whole.model))


@slow
def test_integers_are_trained_as_the_numbers_that_they_stand_for(tmp_path):
    first = train(tmp_path, "first", model={"d_model": 32, "d_ff": 64}).model
    quantize_checkpoint(first, tmp_path / "integers", Scheme(32, 8))
    trainer = started(tmp_path, tmp_path / "integers")
    assert same(trainer.model.weights(), weights(tmp_path / "integers"))
    assert not same(trainer.model.weights(), weights(first))
    trainer.run()


def test_dropout_alone_may_be_changed(first, tmp_path):
    assert started(tmp_path, first, model={"dropout": 0.37}).config.dropout == 0.37
    with pytest.raises(UserError, match=r"model\.d_model: start_from keeps the checkpoint's model and vocabulary"):
        started(tmp_path, first, "other", model={"d_model": 32})
    with pytest.raises(UserError, match=r"model\.preset: start_from keeps"):
        started(tmp_path, first, "other", model={"preset": "base"})


def test_what_cannot_be_started_from(first, tmp_path):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        started(tmp_path, tmp_path / "nowhere")
    opened = open_checkpoint(first)
    save_checkpoint(tmp_path / "wordless", opened.config, weights(first))
    with pytest.raises(UserError, match=r"wordless: has no tokenizer\.json"):
        started(tmp_path, tmp_path / "wordless")
    config = dataclasses.replace(opened.config, architecture="decoder", encoder_layers=0, tie_embeddings="none")
    alone = Transformer(config)
    save_checkpoint(tmp_path / "decoder", config, alone.weights(), opened.tokenizer_json())
    with pytest.raises(
        UserError, match=r"architecture='decoder' doesn't learn translation: choose objective language-model, or"
    ):
        started(tmp_path, tmp_path / "decoder")


def test_frozen_parameters_stay(first, tmp_path):
    result = started(tmp_path, first, freeze="encoder.*, embedding.weight", optimizer="adamw").run()
    before, after = weights(first), weights(result.model)
    moved = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert moved == {name for name in before if name.startswith("decoder.")}
    with pytest.raises(UserError, match=r"freeze: 'encodr\.\*' fits no parameter"):
        started(tmp_path, first, "other", freeze="encodr.*")
    with pytest.raises(UserError, match=r"freeze: '\*' fits every parameter, so that nothing would be trained"):
        started(tmp_path, first, "another", freeze="*")


def test_what_is_better():
    state, options = State(), TrainingOptions(best="bleu", patience=2)
    found = []
    for step, bleu in enumerate((3.0, 2.0, 4.0, 4.0, 1.0)):
        state.step = step
        found.append((state.note_scores(options, {"loss": 1.0, "bleu": bleu}), state.should_stop_early(options)))
    assert found == [(True, False), (False, False), (True, False), (False, False), (False, True)]
    assert (state.best_score, state.best_step) == (4.0, 2)
    state, options = State(), TrainingOptions(best="loss")
    assert [state.note_scores(options, {"loss": loss}) for loss in (2.0, 1.0, 1.5)] == [True, True, False]
    assert not state.should_stop_early(options)
    assert not state.note_scores(options, {})  # a validation that was interrupted


def test_the_best_checkpoint_is_kept_and_chosen(tmp_path):
    """With a learning rate that spoils the model the first validation is the best."""
    options = {"learning_rate": 3.0, "warmup_steps": 1, "cooldown": 0.0, "valid_every": 1, "best": "loss"}
    result = train(tmp_path, final="best", patience=2, steps=9, **options)
    losses = [entry["loss"] for entry in metrics(tmp_path / "run", "valid")]
    best = int(np.argmin(losses))
    assert len(losses) == result.state.step == best + 3 < 9
    assert same(weights(result.model), weights(tmp_path / "run" / "best"))
    assert not same(weights(result.model), weights(tmp_path / "run" / "checkpoints" / f"step-{best + 3:08d}"))
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["model"] == {"final": "best", "steps": [best + 1]}


@slow
@gpu_in_slow
@pytest.mark.usefixtures("on_cpu")
def test_the_average_of_the_last_checkpoints(tmp_path):
    result = train(tmp_path, final="average", average=3, checkpoint_steps=2, steps=7)
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-00000004", "step-00000006", "step-00000007"]
    for name, array in weights(result.model).items():
        mean = np.mean([weights(folder)[name].astype(np.float64) for folder in folders], axis=0)
        np.testing.assert_array_equal(array, mean.astype(np.float32))
    assert same(weights(average_checkpoints(folders, tmp_path / "mine")), weights(result.model))
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["model"] == {"final": "average", "steps": [4, 6, 7]}
    with pytest.raises(UserError, match="final = 'average' needs checkpoint_steps"):
        train(tmp_path, "other", final="average")


def test_what_has_no_average(first, tmp_path):
    other = train(tmp_path, "other", model={"d_ff": 40}).model
    with pytest.raises(UserError, match="its config differs from that of"):
        average_checkpoints([first, other], tmp_path / "out")
    opened = open_checkpoint(first)
    save_checkpoint(tmp_path / "wordless", opened.config, weights(first))
    with pytest.raises(UserError, match=r"its tokenizer\.json differs from that of"):
        average_checkpoints([first, tmp_path / "wordless"], tmp_path / "out")
    with pytest.raises(UserError, match="is one checkpoint: give two or more of one run"):
        average_checkpoints([first], tmp_path / "out")
    with pytest.raises(UserError, match="nothing to average: give two or more of one run"):
        average_checkpoints([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("on_cpu")
def test_the_moving_average(tmp_path):
    """a <- d a + (1 - d) p after each step; stopped and resumed it is the same."""
    options = {"final": "moving-average", "moving_average": 0.3, "keep": 9, "checkpoint_steps": 1}
    result = train(tmp_path, **options)
    trainer = Trainer(recipe(tmp_path, **options), tmp_path / "fresh")
    expected = trainer.model.weights()
    trainer.files.close()
    for step in range(1, 5):
        decay = min(0.3, (1 + step) / (10 + step))
        now = weights(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
        expected = {name: decay * expected[name] + (1 - decay) * now[name] for name in now}
    for name, array in weights(result.model).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-7)
    train(tmp_path, "parts", steps=2, **options)
    parts = train(tmp_path, "parts", resume=True, **options)
    assert same(weights(parts.model), weights(result.model))


@pytest.mark.usefixtures("on_cpu")
def test_a_resumed_run_remembers_its_best(tmp_path):
    """A GPU adds up gradients in any order, which such a learning rate carries far."""
    options = {"learning_rate": 3.0, "warmup_steps": 1, "cooldown": 0.0, "valid_every": 1, "best": "loss"}
    whole = train(tmp_path, "whole", patience=3, steps=9, **options)
    train(tmp_path, "parts", patience=3, steps=2, **options)
    parts = train(tmp_path, "parts", resume=True, patience=3, steps=9, **options)
    assert parts.state.step == whole.state.step
    assert (parts.state.best_step, parts.state.best_score) == (whole.state.best_step, whole.state.best_score)


@pytest.mark.fast("own-lora")
@pytest.mark.parametrize("adapter", [None, "lora"])
def test_how_the_model_generates_stays(first, adapter, tmp_path):
    """In every folder of the run, also of one that goes on; of an adapter too."""
    own = {"beam": 2, "languages": {"eng_Latn": 20, "deu_Latn": 21}, "target_language_in_source": True}
    published = shutil.copytree(first, tmp_path / "published")
    (published / "manifest.json").unlink()
    (published / "generation.json").write_text(json.dumps(own), encoding="utf-8")
    options = {} if adapter is None else {"adapter": adapter}
    trainer = started(tmp_path, published, **options)
    trainer.save()
    trainer.files.close()
    result = started(tmp_path, published, resume=True, **options).run()
    for folder in (result.model, *(tmp_path / "second" / "checkpoints").iterdir()):
        assert json.loads((folder / "generation.json").read_text(encoding="utf-8")) == own
        assert Transformer.load(folder).generation == own
