"""What a run's card knows of its languages and of the weights that it was made of."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest
from small_checkpoint import saved

from mlx_transformer.core.card import keys_of
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import languages, model_card


def recipe(**tables):
    return Recipe.from_dict({"model": {"preset": "tiny"}, "training": {"steps": 1}, **tables})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"corpus": "cldr:en-de"}, ["en", "de"]),
        ({"source": "text/train.en", "target": "text/train.de.gz"}, ["en", "de"]),
        ({"source": "train.src", "target": "train.de"}, None),
        ({"source": "a.gz", "target": "b.gz"}, None),
        ({"pairs": "all.tsv", "languages": "zh-CN,en"}, ["zh-CN", "en"]),
        ({"corpora": [{"source": "1.en", "target": "1.fr"}, {"source": "2.en", "target": "2.it"}]}, ["en", "fr", "it"]),
    ],
)
def test_languages_are_those_that_the_recipe_names(data, expected):
    assert languages(recipe(data=data)) == expected


def test_scores_are_those_of_the_weights(tmp_path):
    scores = {"epoch": 1.0, "loss": 2.0, "perplexity": 7.0}
    lines = [{"kind": "valid", "step": step, **scores, "bleu": bleu, "chrf": 1.0} for step, bleu in ((3, 9.5), (6, 8))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"kind": "va')
    chosen = recipe(data={"corpus": "cldr:en-de"})

    def index(**made_of):
        return keys_of(model_card(tmp_path, chosen, made_of)).get("model-index", "")

    assert "value: 9.5" in index(final="best", steps=[3])
    assert 'name: "cldr:en-de, validation"' in index(final="best", steps=[3])
    assert "value: 8\n" in index(final="last", steps=[6])
    for made_of in ({"final": "average", "steps": [3, 6]}, {"final": "last", "steps": [7]}):
        assert index(**made_of) == ""  # nobody has measured those weights
    assert index(**MappingProxyType({"final": "moving-average", "steps": [6]})) == ""


def test_a_license_goes_on_with_the_weights_that_a_run_starts_from(tmp_path):
    start = saved(tmp_path / "start")
    card = start / "README.md"
    card.write_text(card.read_text(encoding="utf-8").replace("---\n#", "---\nlicense: mit\nlanguage: da\n#", 1))
    data = {"source": "a.src", "target": "a.trg"}
    chosen = recipe(data=data, model={}, training={"steps": 1, "start_from": str(start)})
    found = keys_of(model_card(tmp_path, chosen, {"final": "last", "steps": [1]}))
    assert found == {"license": "license: mit", "language": "language: da", "pipeline_tag": "pipeline_tag: translation"}
