"""Recipes: a TOML file says what a training run does, flags override it, and it is checked as a whole.

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
from typing import Any

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import Head
from mlx_transformer.core.presets import PRESETS
from mlx_transformer.core.tokenizer import MIN_VOCAB_SIZE
from mlx_transformer.system.errors import Text, UserError, joined
from mlx_transformer.system.fields import check_fields, unknown_keys
from mlx_transformer.system.files import read_json, read_text

from .data_problems import SCORES, data_problems
from .objectives import OBJECTIVES, Objective
from .options import (
    ENDLESS,
    FILES,
    FROM_TOKENIZER,
    NORM_PLACEMENT,
    CorpusOptions,
    DataOptions,
    ModelOptions,
    TrainingOptions,
    find_recipe,
    is_there,
)
from .run_folder import RECORD

MAX_RECIPE_BYTES = 1 << 16  # a hundred times as many keys as there are
LENGTHS = ("epochs", "steps", "minutes")
PATHS = (*FILES, "tokenizer", "cache")
# The presets are encoder-decoders; these fields make one stack alone of them.
SHAPES = {"encoder": {"decoder_layers": 0}, "decoder": {"encoder_layers": 0, "tie_embeddings": "target-output"}}
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
SECONDS = ("perplexity", "accuracy", "cosine")


@dataclass(frozen=True, kw_only=True)
class Recipe(ModelOptions):
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig that differ from the preset."""
    data: DataOptions = field(default_factory=DataOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise UserError("recipe: {}", joined(problems))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def objective(self) -> Objective:
        return OBJECTIVES[self.training.objective]

    def head(self, plain: Head) -> Head:
        """Return the head that labelled text needs, with what [model] says of it."""
        own = self.model.get("head", {})
        if not isinstance(own, dict):
            raise UserError(f"model.head = {own!r:.60} must be a table of fields")
        if decided := [name for name in ("kind", "labels", "several", "scores") if name in own]:
            raise UserError(f"model.head: {decided[0]} follows from the labelled text: leave it out")
        return Head.from_dict({**plain.to_dict(), **own})

    def config(
        self, vocab_size: int, source_vocab_size: int | None = None, head: Head | None = None
    ) -> TransformerConfig:
        """Return the config of a model that starts from fresh weights; `UserError` if [model] has no sense.

        `source_vocab_size`: the size of the source's own vocabulary, where it has one. `head`: of labelled text, None
        where it isn't read yet.
        """
        architecture = self.objective.architecture
        fitting = {"architecture": architecture, "norm_placement": self._placement, **SHAPES.get(architecture, {})}
        if source_vocab_size is not None:
            fitting |= {"source_vocab_size": source_vocab_size, "tie_embeddings": "target-output"}
        fitting |= self.model
        if self.objective.reads == "labelled":
            fitting = {
                "output_bias": True,
                **fitting,
                "head": head or self.head(Head(kind="classes", labels=("0", "1"))),
            }
        elif self.objective.embeds:
            fitting.setdefault("head", {"kind": "hidden"})
        return TransformerConfig.preset(self.preset, vocab_size, **fitting)

    @property
    def _placement(self) -> str:
        """Where norms are, if [model] doesn't say."""
        return PRESETS[self.preset].get("norm_placement", NORM_PLACEMENT)

    def recorded(self, batch_tokens: int) -> Recipe:
        """Return the recipe for the record of a run, which then goes on from any folder as it began.

        It has whole paths, and a choice where the recipe made none: the batch by the text, the norms' place and the
        optimizer.
        """
        places = {name: getattr(self.training, name) for name in ("start_from", "teacher")}
        whole = {name: place and os.path.abspath(place) for name, place in places.items()}
        training = replace(self.training, **whole, optimizer=self.training.optimizer_name)
        corpora = tuple(_with_whole_paths(corpus) for corpus in self.data.corpora)
        of_tokens = self.objective.reads != "matches"
        data = replace(_with_whole_paths(self.data), batch_tokens=batch_tokens if of_tokens else None, corpora=corpora)
        model = self.model if whole["start_from"] is not None else {"norm_placement": self._placement, **self.model}
        return replace(self, model=model, data=data, training=training)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "recipe") -> Recipe:
        """Make a recipe of the nested tables of a TOML file; `UserError` lists every unknown or ill-typed key."""
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
                values[table] = _options(kind, values.get(table, {}), table, problems)
        if problems:
            raise UserError("{}: {}", where, joined(problems))
        return cls(preset=preset, model=model, data=values["data"], training=values["training"])


def _options(kind: type, entries: dict[str, Any], table: str, problems: list[str]) -> Any:
    """Make options of this kind from a table, and add what is wrong with it to `problems`."""
    known = {field.name for field in dataclasses.fields(kind)}
    problems += unknown_keys(entries, kind, f"unknown key {table}.{{}}")
    chosen = {key: value for key, value in entries.items() if key in known}
    if kind is DataOptions:
        tables = chosen.pop("corpora", ())
        if isinstance(tables, list | tuple) and all(isinstance(each, dict) for each in tables):
            names = [f"data.corpora[{i}]" for i in range(len(tables))]
            corpora = (_options(CorpusOptions, *each, problems) for each in zip(tables, names, strict=True))
            chosen["corpora"] = tuple(corpora)
        else:
            problems.append("data.corpora must be tables: [[data.corpora]], once for each corpus")
    options = kind(**chosen)
    problems += check_fields(options, table)
    return options


def _with_whole_paths(options: Any) -> Any:
    paths = {name: path for name in PATHS if (path := getattr(options, name, None)) is not None}
    return replace(options, **{name: os.path.abspath(path) for name, path in paths.items()})


def load_recipe(path: str | None, overrides: dict[str, dict[str, Any]], run: Path | None = None) -> Recipe:
    """Load the recipe of a TOML file or of a built-in name, with `overrides` by table on top.

    `path` None: the recipe of the run in the folder `run` (a length in `overrides` replaces all of its), else the
    defaults.
    """
    values: dict[str, Any] = {}
    where = "flags"
    if path is None and run is not None:
        values, where = _recorded(run / RECORD), str(run / RECORD)
    if path is not None:
        where = str(path)
        text = read_text(find_recipe(path), MAX_RECIPE_BYTES).removeprefix("\ufeff")  # Notepad's mark is no TOML
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
            if isinstance(text, str) and not overrides.get("data", {}).get(name) and not is_there(text):
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{text}: not found, from where {where} has its text; say where it is now by {option}")
    return Recipe.from_dict(values, where)


def _recorded(path: Path) -> dict[str, Any]:
    """Read the tables of a run's record as a TOML file would have them."""
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
    """Return the keys that flags displace: a corpus and files exclude each other, and a new length replaces the old."""
    if "corpus" in flags:
        return (*FILES, "languages", "corpora")
    if "text" in flags or "labelled" in flags:
        return "corpus", "train_pairs", "corpora", "pairs", "source", "target"
    if "pairs" in flags:
        return "corpus", "train_pairs", "corpora", "source", "target"
    if flags.keys() & {"source", "target"}:
        return "corpus", "train_pairs", "corpora", "pairs"
    return LENGTHS if resumed and flags.keys() & set(LENGTHS) else ()


def _problems(recipe: Recipe) -> Iterator[str]:
    """List the keys that are right by themselves and wrong together."""
    d, t = recipe.data, recipe.training
    yield from _model_problems(recipe)
    yield from data_problems(d, t, recipe.objective.reads)
    for name in ("tokenizer", "separate_vocabularies", "vocab_model"):
        if t.start_from is not None and getattr(d, name) != getattr(DataOptions, name):
            yield Text("data.{}: {start_from} keeps the checkpoint's model and vocabulary: leave it out", name)
    if all(getattr(t, name) is None for name in LENGTHS):
        yield "say how long to train: epochs, steps or minutes, such as --epochs 10"
    if t.learning_rate is not None and t.learning_rate_scale != 1:
        yield Text("{learning_rate} and {learning_rate_scale} exclude each other")
    if t.learning_rate is not None and t.schedule == "noam":
        yield Text("schedule noam has the paper's own peak: leave out {learning_rate}, or take inverse-square-root")
    if t.schedule in ENDLESS and t.cooldown != TrainingOptions.cooldown:
        yield f"schedule {t.schedule} has no falling end: leave out cooldown"
    if t.final == "best" and t.best is None:
        yield "final = 'best' needs the score it is best by: set best"
    if t.patience and t.best is None:
        yield "patience needs the score that is to get better: set best"
    if t.final == "average" and not t.checkpoint_steps:
        yield Text("final = 'average' needs {checkpoint_steps}, so that the same run averages the same steps")
    if t.best in SCORES and not t.valid_sentences:
        yield Text("best = {!r} is a score of translations: raise {valid_sentences}", t.best)
    if t.best in SECONDS and t.best != recipe.objective.step.second:
        yield f"best = {t.best!r}: a validation of {t.objective} has loss and {recipe.objective.step.second}"
    yield from _adapter_problems(t)
    if t.optimizer_name == "adam" and t.weight_decay:
        yield "optimizer adam has no weight decay: take adamw"
    if not t.weight_decay and t.weight_decay is not None and t.no_decay is not None:
        yield Text("{no_decay} says nothing where {weight_decay} is 0")


def _adapter_problems(t: TrainingOptions) -> Iterator[str]:
    if t.adapter is None:
        names = ("adapter_rank", "adapter_alpha", "adapter_targets", "adapter_dropout")
        if changed := [name for name in names if getattr(t, name) != getattr(TrainingOptions, name)]:
            yield f"{changed[0]} says nothing without an adapter: set adapter"
        return
    if t.start_from is None:
        yield Text("an adapter changes a trained model: say which by {start_from}")
    if t.freeze is not None:
        yield "an adapter leaves all parameters but its own as they are: leave out freeze"


def _start_problems(recipe: Recipe) -> Iterator[str]:
    """List the keys that would change a model that is trained further."""
    changed = (*DROPOUTS, "head") if recipe.objective.reads == "labelled" else DROPOUTS
    others = [f"model.{name}" for name in recipe.model if name not in changed]
    others += ["model.preset"] if recipe.preset != Recipe.preset else []
    others += ["data.vocab_size"] if recipe.data.vocab_size != DataOptions.vocab_size else []
    if others:
        yield Text("{}: {start_from} keeps the checkpoint's model and vocabulary: leave it out", others[0])


def _model_problems(recipe: Recipe) -> Iterator[str]:
    """Check the model before a corpus is built and a tokenizer trained for it."""
    if not isinstance(recipe.preset, str) or recipe.preset not in PRESETS:
        yield f"unknown preset {recipe.preset!r}: choose one of {', '.join(PRESETS)}"
        return
    if recipe.training.start_from is not None:
        yield from _start_problems(recipe)
        return
    if "architecture" in recipe.model:
        yield "model.architecture follows from training.objective: leave it out"
        return
    decided = [name for name in FROM_TOKENIZER if name in recipe.model]
    if decided:
        yield f"model.{decided[0]} follows from the tokenizer: leave it out (data.vocab_size sets the vocabulary)"
        return
    try:
        vocab_size = max(MIN_VOCAB_SIZE, recipe.data.vocab_size)
        config = recipe.config(vocab_size, vocab_size if recipe.data.separate_vocabularies else None)
    except UserError as error:
        yield Text("[model] {}", error)
        return
    if config.head.kind != "vocabulary" and recipe.objective.reads != "labelled" and "head" in recipe.model:
        yield f"model.head: no objective learns a head of kind {config.head.kind!r}: leave it out"
    if recipe.data.separate_vocabularies and config.one_embedding:
        yield (
            Text(
                "model.tie_embeddings = {!r} is one table for both languages, {separate_vocabularies} make two: "
                "choose target-output or none",
                config.tie_embeddings,
            )
        )
    if config.positions == "learned" and recipe.data.max_length > config.max_positions:
        yield (
            f"data.max_length = {recipe.data.max_length} is more than model.max_positions = {config.max_positions}, "
            "the rows of the learned table"
        )
