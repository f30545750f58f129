"""What a training run does: a TOML recipe, overridden by flags, checked as a whole.

[data]      corpus or source/target files, vocabulary, batch sizes
[model]     preset and single fields of TransformerConfig
[training]  length of the run, learning rate, regularisation, intervals
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from mlx_transformer.spec.config import PRESETS, TransformerConfig
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.fields import Bounds, check_fields, unknown_keys
from mlx_transformer.spec.files import read_json, read_text
from mlx_transformer.spec.tokenizer import MIN_VOCAB_SIZE

from .run import RECORD

RECIPES = Path(__file__).parent.parent / "recipes"
LARGEST = 1 << 16  # bytes of a recipe; a hundred times as many keys as there are
LENGTHS = ("epochs", "steps", "minutes")
Schedule = Literal["inverse-square-root", "noam", "constant", "linear", "cosine", "warmup-stable-decay"]
ENDLESS = ("constant", "linear", "cosine")  # schedules that a falling end doesn't go with
FILES = ("source", "target", "valid_source", "valid_target")
# Fields of TransformerConfig that follow from the tokenizer.
FROM_TOKENIZER = ("vocab_size", "source_vocab_size", "pad_id", "bos_id", "eos_id")

# What is over these is a slip; what is under them float32 may round to nothing.
Count = Annotated[int, Bounds(at_least=0, at_most=2**32 - 1)]
Some = Annotated[int, Bounds(at_least=1, at_most=2**32 - 1)]
Tokens = Annotated[int, Bounds(at_least=1, at_most=2**20)]
Long = Annotated[float, Bounds(above=0, at_most=1e9)]
Rate = Annotated[float, Bounds(above=0, at_most=1e3)]
Decay = Annotated[float, Bounds(at_least=0, at_most=1 - 1e-6)]


# What stands under a key is its help: `train --help-recipe` prints it.
@dataclass(frozen=True, kw_only=True)
class DataOptions:
    corpus: str | None = None
    """Built-in corpus, e.g. "cldr:en-de"; or give source and target."""
    source: str | None = None
    """File of source sentences, one a line."""
    target: str | None = None
    """File of their translations, line by line."""
    valid_source: str | None = None
    """Source sentences for validation; unset: one training pair in a hundred is set aside, at most 1000."""
    valid_target: str | None = None
    """Their translations."""
    train_pairs: Tokens = 60_000
    """Pairs of the built-in corpus to compose."""
    vocab_size: Annotated[int, Bounds(at_least=MIN_VOCAB_SIZE, at_most=2**20)] = 8000
    """Tokens of the joint vocabulary, which is made of the training text."""
    batch_tokens: Tokens | None = None
    """Target tokens a batch, padding included; unset: 500 batches an epoch, of 500 to 2000 tokens."""
    max_length: Tokens = 256
    """Pairs with more tokens on a side are left out of training, and counted."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    epochs: Long | None = None
    """End after so many passes over the data. One of epochs, steps and minutes is needed; the first to come counts."""
    steps: Some | None = None
    """End after so many batches."""
    minutes: Long | None = None
    """End after so many minutes."""
    schedule: Schedule = "inverse-square-root"
    """How the learning rate goes on after warm-up. noam: the same curve with the paper's own peak."""
    learning_rate: Rate | None = None
    """Highest learning rate, at the end of warm-up; unset: the paper's (d_model * warm-up steps)^-0.5, where
    warmup_steps is unset too at most 0.58 / d_model."""
    learning_rate_scale: Rate = 1.0
    """Factor on the highest learning rate, where learning_rate is unset."""
    warmup_steps: Some | None = None
    """Steps over which the learning rate rises; unset: a quarter of the run, at most 4000 steps."""
    cooldown: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.5
    """Share of the run, at its end, over which the learning rate falls linearly to zero; the paper's is 0. Schedules
    constant, linear and cosine have no such end."""
    optimizer: Literal["adam", "adamw", "adafactor", "lion", "muon"] = "adam"
    """lion's learning rate is a fifth of the schedule's; muon takes the matrices inside the stacks, adam the others."""
    weight_decay: Annotated[float, Bounds(at_least=0, at_most=1e3)] | None = None
    """Share of a parameter, times the learning rate, that is taken off at each step; unset: 0 of adam and adafactor,
    0.01 of adamw and muon, 0.05 of lion."""
    no_decay: str | None = None
    """Patterns of the names of parameters that don't decay, between commas, such as "*.bias, *norm.weight"; unset:
    biases, norms, embeddings and tables of positions."""
    beta1: Decay = 0.9
    """Adam's and Lion's decay of the mean of gradients."""
    beta2: Decay = 0.98
    """Adam's decay of the mean of their squares; Lion's of the mean that it goes on with."""
    epsilon: Annotated[float, Bounds(at_least=1e-30, at_most=1)] = 1e-9
    """Adam's, beside the root of that mean."""
    label_smoothing: Annotated[float, Bounds(at_least=0, below=1)] = 0.1
    """Probability that the loss's targets spread evenly over the vocabulary."""
    accumulate: Annotated[int, Bounds(at_least=1, at_most=2**16)] = 1
    """Batches a step, one after another: the gradient is that of all their tokens, the memory that of one batch."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """What is computed in. Parameters, their gradients and the optimizer's moments stay float32."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the gradient, and compute the layer again there: less memory, more time."""
    clip_norm: Annotated[float, Bounds(at_least=0, at_most=1e30)] = 1.0
    """Largest gradient norm; 0 leaves gradients alone."""
    seed: Count = 1
    """Decides the data's order, the first weights and dropout; below 2^32."""
    valid_every: Count = 0
    """Steps between validations; 0: once an epoch."""
    valid_sentences: Count = 200
    """Validation lines that are translated for the score (the loss takes all)."""
    checkpoint_seconds: Annotated[float, Bounds(at_least=0, at_most=1e9)] = 300.0
    """Seconds between checkpoints; one is always written when the run ends or is interrupted."""
    keep: Some = 2
    """Checkpoints kept."""
    log_every: Some = 50
    """Steps between lines of metrics.jsonl."""
    stop_after_bad_steps: Some = 20
    """End the run after so many steps in a row whose gradient is not finite."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    preset: str = "small"
    """Sizes of the model: tiny, small, base or big; other keys of [model] change single ones."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig that differ from the preset."""
    data: DataOptions = field(default_factory=DataOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise UserError("recipe: " + "; ".join(problems))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def recorded(self, batch_tokens: int) -> Recipe:
        """As it stands in the record of a run: with the batch that follows from the text, which stays what it is, and
        with whole paths, so that the run goes on from any folder."""
        paths = {name: os.path.abspath(path) for name in FILES if (path := getattr(self.data, name)) is not None}
        return replace(self, data=replace(self.data, batch_tokens=batch_tokens, **paths))

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "recipe") -> Recipe:
        """From the nested tables of a TOML file; every unknown or ill-typed key is listed."""
        values = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
        problems: list[str] = []
        for name in values:
            if name not in ("data", "model", "training"):
                problems.append(f"unknown table [{name}] (tables: data, model, training)")
            elif not isinstance(values[name], dict):
                problems.append(f"{name} must be a table: [{name}]")
        if not problems:
            model = values.get("model", {})
            preset = model.pop("preset", "small")
            for table, kind in (("data", DataOptions), ("training", TrainingOptions)):
                entries, known = values.get(table, {}), {field.name for field in dataclasses.fields(kind)}
                problems += unknown_keys(entries, kind, f"unknown key {table}.{{}}")
                values[table] = kind(**{key: value for key, value in entries.items() if key in known})
                problems += check_fields(values[table], f"{table}.{{}} = {{}}")
        if problems:
            raise UserError(f"{where}: " + "; ".join(problems))
        return cls(preset=preset, model=model, data=values["data"], training=values["training"])


def defaults() -> dict[str, Any]:
    """ "recipe.training.optimizer": "adam" and so on: what a run did whose version didn't know a key yet."""
    tables = {"data": DataOptions, "training": TrainingOptions}
    return {f"recipe.{t}.{f.name}": f.default for t, kind in tables.items() for f in dataclasses.fields(kind)}


def load_recipe(path: str | None, overrides: dict[str, dict[str, Any]], run: Path | None = None) -> Recipe:
    """The recipe of a TOML file or of a built-in name, with `overrides` by table on top.

    `path` None: of the run in the folder `run` (a length in `overrides` replaces all of its), else the defaults.
    """
    values: dict[str, Any] = {}
    where = "flags"
    if path is None and run is not None:
        values, where = _recorded(run / RECORD), str(run / RECORD)
    if path is not None:
        file = Path(path)
        built_in = RECIPES / f"{path}.toml"
        if not file.is_file() and built_in.is_file():
            file = built_in
        if not file.is_file():
            names = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
            raise UserError(f"{path}: no such recipe file, and no built-in recipe of that name ({names})")
        where = str(path)
        text = read_text(file, LARGEST).removeprefix("\ufeff")  # Notepad's mark is no TOML
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not a TOML recipe ({error})") from error
    for table, changes in overrides.items():
        flags = {key: value for key, value in changes.items() if value is not None}
        if isinstance(values.get(table), dict):
            for name in _displaced(flags, path is None):
                values[table].pop(name, None)
        if isinstance(values.setdefault(table, {}), dict):
            values[table].update(flags)
    if path is None and run is not None:
        for name in FILES:
            text = values["data"].get(name)
            if isinstance(text, str) and not overrides.get("data", {}).get(name) and not Path(text).exists():
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{text}: not found, from where {where} has its text; say where it is now by {option}")
    return Recipe.from_dict(values, where)


def _recorded(path: Path) -> dict[str, Any]:
    """The tables of a run's record as a TOML file would have them."""
    record = read_json(path)
    try:
        tables = record["recipe"]
        model = {"preset": tables["preset"], **tables["model"]}
        return {
            table: {key: value for key, value in values.items() if value is not None}
            for table, values in {"data": tables["data"], "model": model, "training": tables["training"]}.items()
        }
    except (AttributeError, LookupError, TypeError) as error:
        raise UserError(f"{path}: damaged (no recipe in it); give the recipe again or restore it") from error


def _displaced(flags: dict[str, Any], resumed: bool) -> tuple[str, ...]:
    """Keys that flags displace: a corpus and files exclude each other, and who resumes for longer means only that."""
    if "corpus" in flags:
        return FILES
    if flags.keys() & {"source", "target"}:
        return "corpus", "train_pairs"
    return LENGTHS if resumed and flags.keys() & set(LENGTHS) else ()


def _problems(recipe: Recipe) -> Iterator[str]:
    """What keys that are right by themselves must not be together."""
    d, t = recipe.data, recipe.training
    yield from _model_problems(recipe)
    if (d.corpus is None) == (d.source is None and d.target is None):
        yield "give either a corpus (such as cldr:en-de) or source and target files"
    if (d.source is None) != (d.target is None):
        yield "source and target files go together"
    if (d.valid_source is None) != (d.valid_target is None):
        yield "valid_source and valid_target files go together"
    if d.corpus is not None and d.valid_source is not None:
        yield f"corpus {d.corpus} brings its own validation text: leave out valid_source and valid_target"
    if all(getattr(t, name) is None for name in LENGTHS):
        yield "say how long to train: epochs, steps or minutes"
    if t.learning_rate is not None and t.learning_rate_scale != 1:
        yield "learning_rate and learning_rate_scale exclude each other"
    if t.learning_rate is not None and t.schedule == "noam":
        yield "schedule noam has the paper's own peak: leave out learning_rate, or take inverse-square-root"
    if t.schedule in ENDLESS and t.cooldown != TrainingOptions.cooldown:
        yield f"schedule {t.schedule} has no falling end: leave out cooldown"
    if t.optimizer == "adam" and t.weight_decay:
        yield "optimizer adam has no weight decay: take adamw"
    if not t.weight_decay and t.weight_decay is not None and t.no_decay is not None:
        yield "no_decay says nothing where weight_decay is 0"


def _model_problems(recipe: Recipe) -> Iterator[str]:
    """The model is checked before a corpus is built and a tokenizer trained for it."""
    if not isinstance(recipe.preset, str) or recipe.preset not in PRESETS:
        yield f"unknown preset {recipe.preset!r}: choose one of {', '.join(PRESETS)}"
        return
    decided = [name for name in FROM_TOKENIZER if name in recipe.model]
    if decided:
        yield f"model.{decided[0]} follows from the tokenizer: leave it out (data.vocab_size sets the vocabulary)"
        return
    try:
        vocab_size = max(MIN_VOCAB_SIZE, recipe.data.vocab_size)
        config = TransformerConfig.preset(recipe.preset, vocab_size, **recipe.model)
    except UserError as error:
        yield f"[model] {error}"
        return
    if config.architecture != "encoder-decoder":
        yield f"model.architecture = {config.architecture!r}: training takes an encoder-decoder"
    if config.positions == "learned" and recipe.data.max_length > config.max_positions:
        yield (
            f"data.max_length = {recipe.data.max_length} is more than model.max_positions = {config.max_positions}, "
            "the rows of the learned table"
        )
