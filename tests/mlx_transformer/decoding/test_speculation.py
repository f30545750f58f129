"""Several tokens a step: the same tokens as one at a time, in fewer steps, in MLX and in graphs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_models import DECODER, SIZES, random_weights
from toy_model import Toy

from export import OnnxTransformer, export_onnx
from export.search.metadata import inputs_of
from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.search import generate
from mlx_transformer.decoding.speculation import Lookup, Speculating
from mlx_transformer.generation.stream import stream_ids
from mlx_transformer.system.errors import UserError

MODERN = dict(positions="rotary", norm="rmsnorm", gated=True, activation="silu", norm_placement="pre", window=7)
CONFIG = TransformerConfig(
    **{**SIZES, **DECODER, **MODERN, "max_positions": 80, "key_value_heads": 2, "tie_embeddings": "none"}
)
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [30, 31, 32], [9] * 20]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"sample": True, "temperature": 0.3, "top_p": 0.9, "seed": 3},
    {"repetition_penalty": 1.1, "no_repeat_ngram": 6, "frequency_penalty": 0.1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("speculation")
    save_checkpoint(folder / "model", CONFIG, random_weights(CONFIG))
    for target in ("portable", "cpu"):
        export_onnx(folder / "model", folder / target, target=target)
    return folder


@pytest.fixture(scope="module", params=["mlx", "portable", "cpu"])
def model(request, folder):
    return Transformer.load(folder / "model") if request.param == "mlx" else OnnxTransformer(folder / request.param)


@pytest.fixture
def reads(monkeypatch) -> list[tuple[int, int]]:
    """Of each step: how many guesses it read, and how many positions it took back before."""
    found: list[tuple[int, int]] = []
    step = Speculating.step

    def counted(self, ids):
        before, wrong = self.logits, len(self.guesses) - self.right
        logits = step(self, ids)
        if self.logits is not before:
            found.append((len(self.guesses), wrong))
        return logits

    monkeypatch.setattr(Speculating, "step", counted)
    return found


@pytest.mark.fast("mlx-greedy", "cpu-rules", "portable-sampling")
@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampling", "rules"])
def test_the_same_tokens_in_fewer_steps(model, reads, settings):
    for new, counts in ((1, [3]), (2, [3]), (24, [3, 11])):
        fixed = settings | {"max_new_tokens": new, "min_new_tokens": new}
        wanted = model.generate(PROMPTS, **fixed)
        for count in counts:
            reads.clear()
            assert model.generate(PROMPTS, speculate=count, **fixed) == wanted
            assert max((read for read, _ in reads), default=0) <= count
            assert sum(1 + read - wrong for read, wrong in reads) >= len(PROMPTS) * (new - 1) - count
    assert len(reads) < len(PROMPTS) * (new - 1), "some guesses were right"
    assert any(wrong for _, wrong in reads), "and some were wrong"
    assert [*model.stream_ids(PROMPTS[1], row=1, speculate=3, **fixed)] == wanted[1]


def test_a_text_that_ends(model):
    ends = dict(end_ids=list(model.generate(PROMPTS[:1], max_new_tokens=30)[0][9:10]), max_new_tokens=30)
    wanted = model.generate(PROMPTS[:1], **ends)
    assert len(wanted[0]) < 10
    assert model.generate(PROMPTS[:1], speculate=8, **ends) == wanted


@pytest.mark.fast("cpu")
def test_draft_models_change_the_number_of_steps_alone(model, folder, reads):
    """The model itself is always right; another one never is, and has fewer positions."""
    small = TransformerConfig(**{**SIZES, **DECODER, "max_positions": 24})
    save_checkpoint(folder / "small", small, random_weights(small, seed=1), force=True)
    fixed = dict(max_new_tokens=40, min_new_tokens=40)
    wanted = model.generate(PROMPTS, **fixed)
    steps = {}
    for name in ("model", "small"):
        model.use_draft(Transformer.load(folder / name))
        reads.clear()
        assert model.generate(PROMPTS, speculate=4, **fixed) == wanted
        steps[name] = len(reads)
    assert [*model.stream_ids(PROMPTS[0], speculate=4, **fixed)] == wanted[0]
    model.use_draft(None)
    assert steps["model"] == len(PROMPTS) * 8  # 39 = 7 * 5 + 4
    assert steps["model"] < steps["small"] <= len(PROMPTS) * 39


def test_what_is_looked_up():
    lookup = Lookup()
    assert lookup([1, 2, 3], 4) == []
    assert lookup([1, 2, 3, 9, 2, 3], 4) == [9, 2, 3, 9], "and on as a repetition"
    assert lookup([1, 2, 3, 9, 2, 3, 7, 2, 3], 2) == [7, 2], "the last time counts"
    assert lookup([1, 2, 3, 9, 2, 3, 7, 2, 3, 1, 2, 3], 2) == [9, 2], "but three tokens before two"
    assert Lookup()([4, 4, 4, 4], 3) == [4, 4, 4]


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ({}, {}, "speculate=4 is for decoder-only models, and this model has an encoder"),
        (DECODER, {}, "needs a graph that reads several tokens per step"),
        (DECODER, {"beam": 2}, "can't be used with a beam"),
        (DECODER, {"candidates": [[3, 4]]}, "can't be used with candidates"),
    ],
)
def test_refusals(config, options, reason):
    toy = Toy(**config)
    toy.takes_back = bool(options)
    with pytest.raises(UserError, match=reason):
        generate(toy, [[4, 5]], speculate=4, **options)
    if options.keys() != {"beam"}:
        options = {name: value[0] for name, value in options.items()}
        with pytest.raises(UserError, match=reason):
            stream_ids(toy, [4, 5], speculate=4, **options)


def test_a_draft_model_must_fit():
    toy = Toy(**DECODER)
    toy.takes_back, toy.draft = True, SimpleNamespace(config=Toy(vocab_size=9, **DECODER).config, takes_back=True)
    with pytest.raises(UserError, match="a draft model with another vocabulary: 9 tokens, not 8"):
        generate(toy, [[4, 5]], speculate=4)
    toy.draft = SimpleNamespace(config=Toy().config, takes_back=True)
    with pytest.raises(UserError, match="a draft model that is for decoder-only models"):
        generate(toy, [[4, 5]], speculate=4)


def test_a_graph_with_the_search_inside_has_no_guesses():
    with pytest.raises(UserError, match="speculate=4: no option of a model with the search inside"):
        inputs_of({"speculate": 4})
