"""Recipes: the built-in ones load, flags win, and what makes no sense is refused before any work begins."""

from __future__ import annotations

import dataclasses
import json
import tomllib

import pytest

from mlx_transformer.commands.training import recipe_help
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.options import RECIPES, DataOptions, TrainingOptions
from mlx_transformer.training.recipe import Recipe, load_recipe

FILES = {"data": {"source": "a", "target": "b"}}
BUILT_IN = sorted(path.stem for path in RECIPES.glob("*.toml"))


def made(**tables):
    tables = {"data": {"corpus": "cldr:en-de"}, "training": {"steps": 1}, **tables}
    return Recipe.from_dict(tables)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_recipes_load(name):
    files = text_of(name)
    recipe = load_recipe(name, files)
    written = tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))
    assert load_recipe(str(RECIPES / f"{name}.toml"), files) == recipe
    for table, options in (("data", recipe.data), ("training", recipe.training)):
        for key, value in written[table].items():
            assert getattr(options, key) == value
    assert recipe.preset == written["model"]["preset"]
    assert recipe.config(recipe.data.vocab_size).architecture == recipe.objective.architecture


def text_of(name):
    """What a recipe lacks."""
    written = tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))
    if "corpus" in written["data"]:
        return {}
    own = {"contrastive": {"data": {"pairs": "a"}}, "classification": {"data": {"labelled": "a"}}, "translation": FILES}
    return own.get(written["training"].get("objective", "translation"), {"data": {"text": "a"}})


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name.startswith("wmt14")])
def test_the_papers_numbers(name):
    """Sections 5 and 6.1, table 3."""
    made = load_recipe(name, FILES)
    options = made.training
    assert made.data.batch_tokens * options.accumulate == 25_000
    assert (options.warmup_steps, options.schedule, options.cooldown) == (4000, "noam", 0)
    assert (options.beta1, options.beta2, options.epsilon, options.smoothing) == (0.9, 0.98, 1e-9, 0.1)
    assert (options.steps, options.checkpoints_to_keep) == ((100_000, 5) if name.endswith("base") else (300_000, 20))
    config = made.config(made.data.vocab_size)
    dropout = {"wmt14-en-de-base": 0.1, "wmt14-en-de-big": 0.3, "wmt14-en-fr-big": 0.1}[name]
    assert (config.dropout, config.attention_dropout, config.norm_placement) == (dropout, 0, "post")


@pytest.mark.parametrize("name", ["paper", *(name for name in BUILT_IN if name.startswith("wmt14"))])
def test_recipes_of_the_paper_are_trained_as_it_says(name):
    made = load_recipe(name, FILES)
    assert made.training.optimizer_name == "adam"
    assert made.config(300).norm_placement == "post"


def test_what_is_chosen_where_nothing_is_said():
    """By what it was seen to learn; of a model that is trained further, what it was trained by."""
    plain, further = made(), made(training={"steps": 1, "start_from": "model"})
    assert (plain.training.optimizer_name, further.training.optimizer_name) == ("muon", "adam")
    said = made(model={"norm_placement": "post"})
    assert [recipe.config(300).norm_placement for recipe in (plain, said)] == ["pre", "post"]
    for recipe in (plain, further):
        recorded = recipe.recorded(500)
        assert recorded.training.optimizer == recipe.training.optimizer_name
        assert recorded.recorded(500) == recorded
    assert plain.recorded(500).model == {"norm_placement": "pre"}
    assert further.recorded(500).model == {}


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_recipe_ends_by_the_clock(name):
    """So that a slow machine gets the same model later."""
    training = tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))["training"]
    assert "minutes" not in training
    assert training.keys() & {"steps", "epochs"}


def test_every_option_survives_the_record():
    recipe = made(model={"preset": "small", "dropout": 0.2}, training={"minutes": 2.5, "seed": 7})
    values = recipe.to_dict()
    assert values["preset"] == "small"
    assert values["model"] == {"dropout": 0.2}
    assert values["training"].keys() == {f.name for f in dataclasses.fields(TrainingOptions)}
    assert values["data"].keys() == {f.name for f in dataclasses.fields(DataOptions)}


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text('[data]\nsource = "a"\ntarget = "b"\n[training]\nsteps = 5\nseed = 3\n', encoding="utf-8")
    recipe = load_recipe(str(path), {"training": {"steps": 9, "seed": None}, "model": {"preset": "big"}})
    assert (recipe.training.steps, recipe.training.seed, recipe.preset) == (9, 3, "big")


def test_a_corpus_and_files_displace_each_other():
    recipe = load_recipe("quickstart", FILES)
    assert (recipe.data.corpus, recipe.data.source, recipe.data.vocab_size) == (None, "a", 2000)
    files = {"data": {"source": "a", "target": "b", "valid_source": "c", "valid_target": "d"}}
    recipe = load_recipe("multi30k", {"data": {**files["data"], "corpus": None}})
    assert recipe.data.valid_source == "c"
    recipe = load_recipe("multi30k", {"data": {"corpus": "cldr:en-fr"}})
    assert (recipe.data.corpus, recipe.data.source) == ("cldr:en-fr", None)
    recipe = load_recipe("multi30k", {"data": {"pairs": "p.tsv"}})
    assert (recipe.data.pairs, recipe.data.source, recipe.data.target) == ("p.tsv", None, None)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"trainig": {}}, r"unknown table \[trainig\]"),
        ({"training": 3}, "training must be a table"),
        ({"training": {"step": 3}}, r"unknown key training\.step \(did you mean 'steps'\?\)"),
        ({"data": {"vocab": 3}}, r"unknown key data\.vocab \(did you mean 'vocab_size'\?\)"),
        ({"data": {"xyzzy": 3}}, r"unknown key data\.xyzzy$"),
        ({"training": {"steps": 2.5}}, r"training\.steps = 2\.5 must be a whole number"),
        ({"training": {"minutes": float("nan")}}, r"training\.minutes = nan must be a number above 0"),
        ({"data": {"source": 3, "target": 4}}, r"data\.source = 3 must be text; data\.target"),
        ({"training": {}}, "say how long to train: epochs, steps or minutes"),
        ({"training": {"steps": 0}}, r"training\.steps = 0 must be .* of at least 1"),
        ({"training": {"steps": 1, "beta2": 1.0}}, r"training\.beta2 = 1\.0 must be .* at most 0\.999"),
        (
            {"training": {"steps": 1, "learning_rate": 0.1, "learning_rate_scale": 2}},
            "learning_rate and learning_rate_scale exclude each other",
        ),
        ({"training": {"steps": 1, "seed": 2**32}}, r"training\.seed = 4294967296 must be .* at most 4,294,967,295"),
        ({"training": {"steps": 1, "clip_norm": 2**4000}}, r"training\.clip_norm = 13182\d*\.\.\.\d* must be"),
        ({"training": {"steps": 1, "epsilon": 1e-320}}, r"training\.epsilon = 1e-320 must be"),
        ({"data": {"corpus": "cldr:en-de", **FILES["data"]}}, "give either a corpus"),
        ({"data": {"source": "a"}}, "source and target files go together"),
        ({"data": {**FILES["data"], "valid_source": "c"}}, "valid_source and valid_target files go together"),
        ({"data": {"corpus": "cldr:en-de", "valid_source": "c", "valid_target": "d"}}, "its own validation text"),
        ({"data": {"pairs": "p", **FILES["data"]}}, "give either a corpus"),
        ({"data": {"pairs": "p", "languages": "en"}}, "languages = 'en': give two names"),
        ({"data": {**FILES["data"], "languages": "en-de"}}, "languages names columns of pairs: leave it out"),
        ({"data": {"pairs": "p", "valid_pairs": "q", "valid_source": "r", "valid_target": "s"}}, "exclude each other"),
        ({"data": {"corpora": ["a"]}}, r"data\.corpora must be tables"),
        ({"data": {"corpora": [{}]}}, r"data\.corpora\[0\]: give either source and target files or one file of pairs"),
        (
            {"data": {"corpora": [{"pairs": "p", "wait": 1}]}},
            r"unknown key data\.corpora\[0\]\.wait .*did you mean 'weight'",
        ),
        (
            {"data": {"corpora": [{"pairs": "p", "weight": 1.0}, {"pairs": "q", "weight": 0}]}},
            r"data\.corpora\[1\]\.weight = 0 must be a number above 0",
        ),
        ({"data": {"corpora": [{"pairs": "p", "weight": 1}, {"pairs": "q"}]}}, "give all tables a weight, or none"),
        ({"data": {"pairs": "p", "bpe_dropout": 0.1, "cache": "c"}}, "bpe_dropout makes other tokens in every epoch"),
        (
            {"data": {"pairs": "p", "bpe_dropout": 1}},
            r"data\.bpe_dropout = 1 must be .* at least 0 and below 1",
        ),
        ({"data": {"pairs": "p", "tokenizer": "t", "vocab_lines": 9}}, "leave out vocab_size and vocab_lines"),
        (
            {"data": {"pairs": "p", "tokenizer": "t"}, "training": {"steps": 1, "start_from": "c"}},
            r"data\.tokenizer: start_from keeps the checkpoint's model and vocabulary",
        ),
        ({"data": {"pairs": "p", "tokenizer": "t", "vocab_model": "unigram"}}, "leave out vocab_model"),
        (
            {"data": {"pairs": "p", "vocab_model": "unigram", "separate_vocabularies": True}},
            "makes one vocabulary of both languages: leave out separate_vocabularies",
        ),
        ({"data": {"pairs": "p", "vocab_model": "unigram", "bpe_dropout": 0.1}}, "leaves out merges, of which"),
        (
            {"data": {"text": "t", "vocab_model": "unigram"}, "training": {"steps": 1, "objective": "language-model"}},
            "vocab_model is for translation",
        ),
        (
            {"data": {"pairs": "p", "vocab_model": "unigram"}, "training": {"steps": 1, "start_from": "c"}},
            r"data\.vocab_model: start_from keeps the checkpoint's model and vocabulary",
        ),
        ({"model": {"preset": "huge"}}, "unknown preset 'huge': choose one of tiny, small, base, big"),
        ({"model": {"d_modell": 3}}, r"\[model\] .*unknown key 'd_modell' \(did you mean 'd_model'\?\)"),
        ({"model": {"heads": 3}}, r"\[model\] .*d_model=256 is not a multiple of heads=3"),
        ({"model": {"vocab_size": 900}}, r"model\.vocab_size follows from the tokenizer"),
        ({"model": {"d_k": 10**9, "dropout": 1}}, r"\[model\] .*d_k=1000000000 must be .* at most 65,536; dropout=1"),
        (
            {"model": {"architecture": "decoder", "encoder_layers": 0, "tie_embeddings": "none"}},
            r"model\.architecture follows from training\.objective: leave it out",
        ),
        ({"model": {"positions": "learned", "max_positions": 100}}, r"data\.max_length = 256 is more than .* = 100"),
    ],
)
def test_refused(tables, message):
    with pytest.raises(UserError, match=message):
        made(**tables)


def test_whole_numbers_become_floats():
    """MLX takes no integer of more than 32 bits for a number."""
    assert isinstance(made(training={"steps": 1, "clip_norm": 2**63}).training.clip_norm, float)


def test_all_problems_at_once():
    with pytest.raises(UserError) as error:
        made(data={"vocab": 1, "corpus": 2}, training={"step": 1, "seed": "x"})
    assert str(error.value).count(";") == 3


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path):
    path = tmp_path / "notepad.toml"
    path.write_bytes(b'\xef\xbb\xbf[data]\r\ncorpus = "cldr:en-de"\r\n[training]\r\nsteps = 5\r\n')
    assert load_recipe(str(path), {}) == made(training={"steps": 5})


def test_a_runs_own_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).touch()
    recipe = made(
        data={**FILES["data"], "batch_tokens": 300},
        model={"preset": "tiny", "heads": 4, "norm_placement": "pre"},
        training={"epochs": 2.5, "keep": 3},
    )
    (tmp_path / "run.json").write_text(json.dumps({"recipe": recipe.to_dict()}), encoding="utf-8")
    assert load_recipe(None, {}, run=tmp_path) == recipe
    longer = load_recipe(None, {"training": {"steps": 70, "minutes": None}, "data": {"target": "c"}}, run=tmp_path)
    assert (longer.training.steps, longer.training.epochs, longer.training.keep) == (70, None, 3), (
        "a length replaces all"
    )
    assert (longer.data.source, longer.data.target, longer.data.batch_tokens) == ("a", "c", 300)
    path = tmp_path / "my.toml"
    path.write_text('[data]\ncorpus = "cldr:en-de"\n[training]\nsteps = 5\n', encoding="utf-8")
    assert load_recipe(str(path), {}, run=tmp_path) == made(training={"steps": 5}), "a given recipe counts"
    for text in ("{}", "[]", '{"recipe": {"preset": "tiny", "model": {}, "data": 3}}', "{"):
        (tmp_path / "run.json").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"run\.json: damaged"):
            load_recipe(None, {}, run=tmp_path)


def test_the_recipes_page_is_the_help():
    page = (RECIPES / "README.md").read_text(encoding="utf-8")
    assert f"```toml\n{recipe_help()}```" in page, "write `mlx-transformer train --help-recipe` into recipes/README.md"
    for name in BUILT_IN:
        assert f"`{name}`" in page


def test_files_that_are_no_recipe(tmp_path):
    for name, data in {"syntax": b"[data\n", "binary": b"\xff\xfe", "deep": b"a=" + b"[" * 50_000}.items():
        path = tmp_path / f"{name}.toml"
        path.write_bytes(data)
        with pytest.raises(UserError, match=rf"{name}\.toml: (not a TOML recipe|cannot be read \(not UTF-8)"):
            load_recipe(str(path), {})
    with pytest.raises(UserError, match=r"no such recipe file, and no built-in recipe of that name \(classifier, "):
        load_recipe("nothing", {})
    with pytest.raises(UserError, match="no such recipe file"):
        load_recipe(str(tmp_path), {})
