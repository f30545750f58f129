"""Classifiers trained on labelled text of every form, and encoders that learn another one's vectors."""

import json

import mlx.core as mx
import numpy as np
import pytest
from combined import slow
from tiny_run import metrics

from mlx_transformer import load
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.data.labelled import read_labelled
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer

WORDS = "one two three four five six seven eight nine ten".split()
SIZES = {"preset": "tiny", "encoder_layers": 1, "d_model": 32, "heads": 2, "d_ff": 32, "dropout": 0.0}


def lines(form, count=160):
    """What is to be learned hangs on single words: the class on "three", names are numbers above "seven"."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        words = [WORDS[i] for i in rng.integers(0, 10, 5)]
        text, has = " ".join(words), "three" in words
        starts = [len(" ".join([*words[:i], ""])) for i in range(5)]
        places = [(at, word) for at, word in zip(starts, words, strict=True) if word in ("nine", "ten")]
        entities = [{"label": "N", "start": at, "end": at + len(word)} for at, word in places]
        first = entities[0] if entities else None
        yield {
            "label": {"text": text, "label": "with" if has else "without"},
            "labels": {"text": text, "labels": [word for word in ("one", "two") if word in words]},
            "score": {"text": text, "text_pair": "three", "score": 0.9 if has else 0.1},
            "words": {"words": words, "labels": ["B-N" if word in ("nine", "ten") else "O" for word in words]},
            "entities": {"text": text, "entities": entities},
            "answer": {"question": "ten", "context": text, "answer": first},
        }[form]


def write(folder, form, count=160):
    path = folder / f"{form}.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines(form, count)), encoding="utf-8")
    return path


def recipe(folder, form, data=None, model=SIZES, **training):
    data = {"labelled": str(write(folder, form)), "vocab_size": 300, "batch_tokens": 400, **(data or {})}
    training = {"objective": "classification", "steps": 3, "log_every": 1, **training}
    return Recipe.from_dict({"data": data, "model": dict(model), "training": training})


KINDS = {"label": "classes", "labels": "classes", "score": "classes", "words": "token-classes"}
KINDS |= {"entities": "token-classes", "answer": "spans"}


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.gpu_path
@pytest.mark.usefixtures("device_choices")
def test_every_form_is_learned_and_the_loss_is_that_of_the_formula(form, tmp_path):
    result = Trainer(recipe(tmp_path, form, valid_every=1), tmp_path / "run").run()
    found = metrics(tmp_path / "run", "valid")
    assert np.isfinite([entry["loss"] for entry in found]).all()
    assert 0 <= found[-1]["accuracy"] <= 1
    assert not metrics(tmp_path / "run", "skipped")
    if form != "entities":
        assert found[-1]["loss"] == pytest.approx(step_loss(result, form, tmp_path), rel=1e-5)
    head = open_checkpoint(result.model).config.head
    assert head.kind == KINDS[form]
    assert head.several == (form == "labels")


@pytest.mark.fast("label")
@pytest.mark.parametrize("form", ["label", "entities"])
def test_what_was_learned_is_said(form, tmp_path):
    result = Trainer(recipe(tmp_path, form, steps=40, learning_rate=5e-3), tmp_path / "run").run()
    model, _ = load(result.model)
    if form == "label":
        found = model.classify(["one three six two one", "one two six two one"])
        assert [best[0].label for best in found] == ["with", "without"]
    else:
        [found] = model.tag(["one nine six two ten"])
        assert [(each.label, each.text) for each in found] == [("N", "nine"), ("N", "ten")]


def step_loss(result, form, tmp_path):
    """The loss of the validation text, by the trained model's own logits in float64."""
    trainer = Trainer(recipe(tmp_path, form), tmp_path / "again")
    trainer.step.model.load_weights([(n, mx.array(a)) for n, a in open_checkpoint(result.model).tensors()])
    total = count = 0
    trainer.model.eval()
    for batch in trainer.valid.batches(0):
        targets, _, ids, mask, _ = batch.arrays(trainer.config.pad_id)
        logits = np.array(trainer.model(ids, mask), np.float64)
        for row, target, kept in zip(logits, targets, mask, strict=True):
            if not kept.any():
                continue
            if form == "answer":
                row = row[kept]
                shares = row - np.log(np.exp(row).sum(axis=0))
                total -= (shares[target[0], 0] + shares[target[1], 1]) / 2
                count += 1
            elif form in ("labels", "score"):
                p = 1 / (1 + np.exp(-row))
                total -= (target * np.log(p) + (1 - target) * np.log(1 - p)).mean()
                count += 1
            else:
                for logit, right in zip(np.atleast_2d(row), np.atleast_1d(target), strict=True):
                    if right >= 0:
                        total -= logit[right] - np.log(np.exp(logit).sum())
                        count += 1
    trainer.files.close()
    return total / count


def test_a_checkpoint_goes_on_with_another_head_and_with_its_own(tmp_path):
    first = Trainer(recipe(tmp_path, "label"), tmp_path / "first").run().model
    more = Trainer(recipe(tmp_path, "label", {"vocab_size": 8000}, {}, start_from=str(first)), tmp_path / "more").run()
    assert open_checkpoint(more.model).config == open_checkpoint(first).config
    head = {"head": {"pooling": "first", "activation": "tanh"}}
    tables = {"start_from": str(first), "freeze": "encoder.*, *embedding.*"}
    other = Trainer(recipe(tmp_path, "labels", {"vocab_size": 8000}, head, **tables), tmp_path / "other").run().model
    config, before, after = open_checkpoint(other).config, *(dict(open_checkpoint(f).tensors()) for f in (first, other))
    assert (config.head.activation, config.head.pooling, config.head.labels) == ("tanh", "first", ("one", "two"))
    assert all(np.array_equal(before[name], after[name]) for name in before if "encoder" in name)
    tuned = recipe(tmp_path, "label", {"vocab_size": 8000}, {}, start_from=str(first), adapter="lora", adapter_rank=2)
    assert Trainer(tuned, tmp_path / "tuned").run().state.step == 3


@pytest.mark.usefixtures("on_cpu")
def test_an_adapter_comes_with_the_head_that_the_checkpoint_lacks(tmp_path):
    first = Trainer(recipe(tmp_path, "label"), tmp_path / "first").run().model
    given = {"start_from": str(first), "adapter": "lora", "adapter_rank": 2, "warmup_steps": 2, "cooldown": 0}
    made = {"data": {"vocab_size": 8000}, "model": {}}
    whole = Trainer(recipe(tmp_path, "labels", **made, steps=6, **given), tmp_path / "whole").run().model
    Trainer(recipe(tmp_path, "labels", **made, steps=3, **given), tmp_path / "parts").run()
    chosen = recipe(tmp_path, "labels", **made, steps=6, **given)
    parts = Trainer(chosen, tmp_path / "parts", resume=True).run().model
    before, one, other = (dict(open_checkpoint(folder).tensors()) for folder in (first, whole, parts))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert open_checkpoint(whole).config.head.labels == ("one", "two")
    assert not np.array_equal(one["output_proj.weight"][0], before["output_proj.weight"][0])
    assert np.array_equal(one["embedding.weight"], before["embedding.weight"])
    assert not (tmp_path / "whole" / "adapter").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n', 'line 1: needs "text" .* and "label"'),
        ("[1]\n", "line 1: is no object"),
        ('{"text": "a", "label": 3}\n', "line 1: label is 3, no text"),
        (
            '{"text": "a", "label": "x"}\n{"text": "a", "score": 1}\n',
            "line 2: has 'score', the lines before it have 'label'",
        ),
        ('{"text": "a", "score": NaN}\n', "line 1: score is nan; it must be a finite number"),
        ('{"words": ["a"], "labels": []}\n', "line 1: 1 words and 0 labels"),
        ('{"text": "a", "entities": [{"label": "X", "start": 0, "end": 9}]}\n', "no part of a text of 1 characters"),
        ('{"question": "a", "context": "b", "answer": 1}\n', "line 1: answer is 1; it must be null, or an object"),
        ("\n", "holds no labelled text"),
    ],
)
def test_files_that_are_wrong(text, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_labelled(str(path))


def test_tables_of_columns(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("a\tb\tgood\nc\td\tbad\n \t\tbad\n", encoding="utf-8")
    found, empty = read_labelled(str(path))
    assert (found.texts, found.labels, empty) == ([("a", "b"), ("c", "d")], ("bad", "good"), 1)
    path.write_text("a\tb\tgood\nc\tbad\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 2: 2 columns; there must be 3 as in the first line"):
        read_labelled(str(path))


def test_labels_that_only_the_validation_has(tmp_path):
    valid = tmp_path / "valid.tsv"
    valid.write_text("one\tother\n", encoding="utf-8")
    with pytest.raises(UserError, match="validation text: the label 'other' is none of the model's: with, without"):
        Trainer(recipe(tmp_path, "label", {"valid_labelled": str(valid)}), tmp_path / "run")


def distilled(folder, teacher, model=SIZES, **training):
    text = folder / "text.txt"
    text.write_text("".join(f"{line['text']}\n" for line in lines("label")), encoding="utf-8")
    data = {"text": str(text), "vocab_size": 300, "batch_tokens": 400}
    training = {"objective": "distillation", "teacher": str(teacher), "steps": 3, "log_every": 1, **training}
    return Recipe.from_dict({"data": data, "model": dict(model), "training": training})


@slow
@pytest.mark.parametrize("width", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_a_student_comes_near_its_teacher(width, tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{line['text']}\t{line['text'].upper()}\n" for line in lines("label")), encoding="utf-8")
    tables = {"data": {"pairs": str(pairs), "vocab_size": 300}, "model": SIZES}
    tables["training"] = {"objective": "contrastive", "steps": 5}
    teacher = Trainer(Recipe.from_dict(tables), tmp_path / "teacher").run().model
    chosen = distilled(tmp_path, teacher, {**SIZES, "d_model": width}, steps=60, valid_every=20)
    result = Trainer(chosen, tmp_path / "student").run()
    found = metrics(tmp_path / "student", "valid")
    assert found[-1]["cosine"] > 0.9
    assert found[-1]["loss"] == pytest.approx(2 - 2 * found[-1]["cosine"], abs=1e-4)
    assert load(result.model)[0].embed("one two").shape == (width,)
    wide = distilled(tmp_path, teacher, {**SIZES, "d_model": 64})
    with pytest.raises(UserError, match="its vectors have 32 numbers, the student's 64: lower d_model"):
        Trainer(wide, tmp_path / "wide")


def test_what_is_no_teacher(tmp_path):
    first = Trainer(recipe(tmp_path, "label", steps=1), tmp_path / "first").run().model
    with pytest.raises(UserError, match=r"doesn't say how a text's vector is made \(embedding.json\)"):
        Trainer(distilled(tmp_path, first), tmp_path / "run")
