"""Contrastive learning: its loss by hand, cached gradients, what it reads, and that it learns."""

import mlx.core as mx
import numpy as np
import pytest
from choices import gpu_in_slow
from combined import slow
from mlx.utils import tree_flatten
from tiny_run import metrics

from mlx_transformer import Transformer, load
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.text_embedding import Dense, TextEmbedding
from mlx_transformer.data.matches import MatchBatches
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.encoder_step import ContrastiveStep, contrastive_loss, text_vectors
from mlx_transformer.training.optimizers import Optimizer
from mlx_transformer.training.options import TrainingOptions
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer

WORDS = "one two three four five six seven eight nine ten".split()
SIZES = {"preset": "tiny", "encoder_layers": 1, "d_model": 32, "heads": 2, "d_ff": 32}


def softmax_loss(scores, right):
    """-log softmax at `right`, in float64."""
    return float(np.log(np.exp(scores).sum()) - scores[right])


def test_the_loss_is_that_of_the_formula_and_equal_texts_are_no_negatives():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(9, 5))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    numbers = np.array([[0, 1, 2], [3, 4, 3], [5, 4, 6]])  # the first and the third target are one text
    a, c = vectors[:3], vectors[3:]
    scores, shown = a @ c.T / 0.1, [[0, 1, 3, 4, 5], [0, 1, 2, 3, 5], [1, 2, 3, 4, 5]]
    ranked = sum(softmax_loss(scores[i, shown[i]], shown[i].index(i)) for i in range(3))
    found, first = contrastive_loss(mx.array(vectors.astype(np.float32)), mx.array(numbers), 0.1)
    assert found.item() == pytest.approx(ranked, rel=1e-5)
    assert first.item() == sum(scores[i].argmax() == i for i in range(3))
    back = sum(softmax_loss(scores[:, i], i) for i in range(3))
    both, _ = contrastive_loss(mx.array(vectors.astype(np.float32)), mx.array(numbers), 0.1, symmetric=True)
    assert both.item() == pytest.approx((ranked + back) / 2, rel=1e-5)


WAYS = [(way,) for way in ("cls", "mean", "max", "last", "weighted_mean", "mean_sqrt_len")]


@pytest.mark.parametrize("pooling", [*WAYS, ("cls", "max")])
def test_vectors_are_those_that_are_used_afterwards(pooling):
    rng = np.random.default_rng(1)
    memory, mask = rng.normal(size=(3, 5, 4)).astype(np.float32), np.arange(5) < np.array([[5], [2], [1]])
    width = 4 * len(pooling)
    weights = {"dense.0.weight": rng.normal(size=(3, width)), "dense.0.bias": rng.normal(size=3)}
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    embedding = TextEmbedding(pooling=pooling, normalize=True, dense=[Dense(width=3)], weights=weights)
    found = np.array(text_vectors(embedding, mx.array(memory), mx.array(mask)))
    assert np.abs(found - embedding.vectors(memory, mask)).max() < 1e-6


def step_and_batch(columns, chunk, dropout=0.0, streams=2):
    mx.random.seed(3)
    shape = {"architecture": "encoder", "decoder_layers": 0, "head": {"kind": "hidden"}}
    sizes = {"encoder_layers": 2, "d_model": 16, "heads": 2, "d_ff": 24, "max_positions": 40}
    made = Transformer(TransformerConfig(vocab_size=30, dropout=dropout, **shape, **sizes))
    made.text_embedding = TextEmbedding(normalize=True)
    rng = np.random.default_rng(5)
    texts = [[[*rng.integers(3, 30, n), 2] for n in rng.integers(1, 30, 11)] for _ in range(columns)]
    [batch] = MatchBatches(texts, 99).batches(0)
    each = [mx.new_stream(mx.cpu) for _ in range(streams)] if streams else []
    optimizer = Optimizer(made.train(), TrainingOptions(optimizer="adam"), each)
    return ContrastiveStep(made, optimizer, chunk=chunk, symmetric=True), batch


def gradients(step, batch):
    mx.random.seed(7)
    step.model.apply(lambda x: x.astype(mx.float64))
    loss, found = step._gradients(mx.array(float(batch.tokens)), *step._inputs(batch))
    mx.eval(loss, found)
    return loss.item(), {name: np.array(array) for name, array in tree_flatten(found)}


@pytest.mark.fast("4-2-3", "5-0-2", "1-2-2")
@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize(("chunk", "streams"), [(1, 2), (4, 2), (5, 0), (99, 2)])
def test_cached_gradients_are_the_gradient(columns, chunk, streams):
    with mx.stream(mx.cpu):
        loss, expected = gradients(*step_and_batch(columns, None))
        cached, found = gradients(*step_and_batch(columns, chunk, streams=streams))
    assert cached == pytest.approx(loss, rel=1e-6)
    for name, gradient in expected.items():
        assert np.abs(found[name] - gradient).max() <= 1e-6 * np.abs(gradient).max() + 1e-12, name


def test_dropout_draws_twice_the_same():
    """Else the gradient would be that of other vectors than the loss's: along it the loss changes as it says."""
    with mx.stream(mx.cpu):
        step, batch = step_and_batch(2, 4, dropout=0.3)
        before, found = gradients(step, batch)
        name, size = "encoder.layers.0.feed_forward.up_proj.weight", 1e-4
        weight = step.model.encoder.layers[0].feed_forward.up_proj
        weight.weight = weight.weight + size * mx.array(found[name]) / np.linalg.norm(found[name])
        after, _ = gradients(step, batch)
    assert (after - before) / size == pytest.approx(np.linalg.norm(found[name]), rel=2e-2)


def write(folder, columns=2):
    """A text of words and the same words backwards, in capitals; as a negative the words in their order."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(220):
        words = [WORDS[i] for i in rng.integers(0, 10, 4)]
        rows.append([" ".join(words), " ".join(words[::-1]).upper(), " ".join(words).upper()][:columns])
    path = folder / "pairs.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def recipe(folder, data=None, model=SIZES, columns=2, **training):
    data = {"pairs": str(write(folder, columns)), "vocab_size": 300, "batch_pairs": 20, **(data or {})}
    training = {"objective": "contrastive", "steps": 4, "log_every": 1, **training}
    return Recipe.from_dict({"data": data, "model": dict(model), "training": training})


def weights(folder):
    return {name: array.tobytes() for name, array in open_checkpoint(folder).tensors()}


@gpu_in_slow
@pytest.mark.gpu_path
@pytest.mark.usefixtures("device_choices")
def test_a_run_learns_and_its_model_embeds(tmp_path):
    given = {"steps": 40, "chunk": 16, "valid_every": 1}
    chosen = recipe(tmp_path, {"source_prompt": "query: "}, model={**SIZES, "dropout": 0.0}, **given)
    result = Trainer(chosen, tmp_path / "run").run()
    found = metrics(tmp_path / "run", "valid")
    assert found[-1]["loss"] < 0.2 * found[0]["loss"]
    assert found[-1]["accuracy"] == 1.0
    model, _ = load(result.model)
    a, b = model.embed("one two three four", prompt_name="query"), model.embed("FOUR THREE TWO ONE", prompt="")
    assert a @ b > 0.5
    assert np.linalg.norm(a) == pytest.approx(1, abs=1e-6)
    assert model.config.head.kind == "hidden"


@slow
@pytest.mark.usefixtures("on_cpu")
def test_a_run_in_two_parts_is_the_run_in_one(tmp_path):
    given = {"columns": 3, "chunk": 8, "accumulate": 2, "warmup_steps": 3, "cooldown": 0}
    whole = Trainer(recipe(tmp_path, steps=6, **given), tmp_path / "whole").run()
    Trainer(recipe(tmp_path, steps=3, **given), tmp_path / "parts").run()
    parts = Trainer(recipe(tmp_path, steps=6, **given), tmp_path / "parts", resume=True).run()
    assert weights(parts.model) == weights(whole.model)


def test_it_goes_on_from_an_encoder_that_restored_words_and_by_an_adapter(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{' '.join(WORDS)} {i}\n" for i in range(50)), encoding="utf-8")
    masked = {"objective": "masked-language-model", "steps": 2}
    tables = {"data": {"text": str(text), "vocab_size": 300}, "model": SIZES, "training": masked}
    first = Trainer(Recipe.from_dict(tables), tmp_path / "first").run().model
    data = {"vocab_size": 8000}  # the default: the checkpoint's counts
    tuned = Trainer(recipe(tmp_path, data, {}, start_from=str(first), pooling="cls"), tmp_path / "tuned").run().model
    assert open_checkpoint(tuned).config.head.kind == "hidden"
    assert load(tuned)[0].text_embedding.pooling == ["cls"]
    adapted = recipe(tmp_path, data, {}, start_from=str(tuned), adapter="lora", adapter_rank=2, precision="bfloat16")
    result = Trainer(adapted, tmp_path / "adapted").run()
    assert (tmp_path / "adapted" / "adapter").is_dir()
    assert load(result.model)[0].embed("one").shape == (32,)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "one\n", "a.tsv, line 1: 1 columns; there must be 2, or 3 with a negative"),
        ("a.tsv", "a\tb\na\tb\tc\n", "a.tsv, line 2: 3 columns; there must be 2 as in the first line"),
        ("a.tsv", "a\t \n", "no pairs with text on both sides"),
        ("a.tsv", "a\tb\n", "1 usable pairs; training needs more"),
        ("a.jsonl", '{"source": "a"}\n', 'line 1: has no "source" and "target"; languages names other columns'),
        ("a.jsonl", '{"source": "a", "target": 5}\n', "line 1: target is 5, no text"),
        ("a.csv", "a,b\n", "are read from .tsv and .jsonl"),
    ],
)
def test_files_that_are_wrong(name, text, message, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        Trainer(recipe(tmp_path, {"pairs": str(tmp_path / name)}), tmp_path / "run")


@pytest.mark.parametrize(
    ("data", "training", "message"),
    [
        ({"batch_tokens": 5}, {}, "set batch_pairs"),
        ({}, {"memory": 1.0}, "set chunk"),
        ({"text": "x"}, {}, r"data\.text: contrastive learning reads pairs"),
        ({}, {"best": "bleu"}, "best = 'bleu' is a score of translations"),
        ({}, {"best": "perplexity"}, "a validation of contrastive has loss and accuracy"),
        ({}, {"objective": "translation"}, r"data.batch_pairs is for contrastive: leave it out of translation"),
        ({}, {"teacher": "x"}, "teacher is for distillation"),
        ({"bpe_dropout": 0.1}, {}, "bpe_dropout is for translation"),
    ],
)
def test_recipes_that_make_no_sense(data, training, message, tmp_path):
    with pytest.raises(UserError, match=message):
        recipe(tmp_path, data, **training)
