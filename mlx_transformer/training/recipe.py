"""Recipes: a TOML file describes a training run, flags override it, and the whole is checked.

[data]      corpus or files (e.g. source and target), vocabulary, batch sizes
[model]     preset and single fields of TransformerConfig
[training]  length of the run, learning rate, regularisation, intervals

The `*_problems` functions list contradictory keys, e.g. corpus together with source.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from mlx_transformer.core.config import PRESETS, TransformerConfig
from mlx_transformer.core.heads import Head
from mlx_transformer.data.built_in import NAMES, check, is_of_sentences, languages
from mlx_transformer.data.corpus import language_pair
from mlx_transformer.system.errors import Text, UserError, joined
from mlx_transformer.system.fields import check_fields, unknown_keys
from mlx_transformer.system.files import read_json, read_text
from mlx_transformer.text.tokenizer import MIN_VOCAB_SIZE

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

Reads = Literal["pairs", "documents", "matches", "labelled"]
FOR = {
    "data": {
        **dict.fromkeys(("source_prompt", "target_prompt", "batch_pairs"), ("contrastive",)),
        **dict.fromkeys(("labelled", "valid_labelled"), ("classification",)),
        **dict.fromkeys(("learned", "chat_date"), ("language-model",)),
    },
    "training": {
        **dict.fromkeys(("temperature", "symmetric", "chunk"), ("contrastive",)),
        "teacher": ("distillation",),
        "pooling": ("contrastive", "distillation"),
    },
}
"""Keys that only some objectives use, and these objectives."""
PAIRS = ("corpus", "source", "target", "pairs", "valid_source", "valid_target", "valid_pairs", "languages")
SCORES = ("bleu", "chrf", "exact_match")
"""Scores of translations."""


def data_problems(d: DataOptions, t: TrainingOptions, reads: Reads) -> Iterator[str]:
    """List the problems of [data] for an objective that reads this kind of text."""
    for options in (d, t):
        table = "data" if options is d else "training"
        for name, objectives in FOR[table].items():
            if t.objective not in objectives and getattr(options, name) != getattr(type(options), name):
                yield f"{table}.{name} is for {' and '.join(objectives)}: leave it out of {t.objective}"
    if reads == "pairs":
        yield from _translation_problems(d)
        return
    if t.best in SCORES:
        yield f"best = {t.best!r} is a score of translations: take loss or another one"
    if d.max_length < 2:
        yield Text("{max_length}: a text needs two tokens")
    names = ("bpe_dropout", "cache", "separate_vocabularies", "vocab_model")
    if others := [name for name in names if getattr(d, name) != getattr(DataOptions, name)]:
        yield f"{others[0]} is for translation: leave it out"
    yield from {"documents": _document_problems, "matches": _match_problems, "labelled": _label_problems}[reads](d, t)
    yield from _vocabulary_problems(d)


def _document_problems(d: DataOptions, t: TrainingOptions) -> Iterator[str]:
    """List the problems of plain text."""
    one_language = d.corpus is not None and len(languages(d.corpus)) == 1
    names = [name for name in PAIRS if name != "corpus" or not one_language]
    for_pairs = [name for name in names if getattr(d, name) is not None] + ["corpora"] * bool(d.corpora)
    if for_pairs:
        yield f"data.{for_pairs[0]} is for translation: a {t.objective} is trained on text"
    yield from _corpus_problems(d)
    if one_language and (d.text is not None or d.valid_text is not None):
        yield Text("corpus {} is a text and brings its own for validation: leave out text and {valid_text}", d.corpus)
    if d.text is None and not one_language:
        yield f"a {t.objective} is trained on plain text: set text to a file, a folder or a pattern"
    if t.objective == "distillation" and t.teacher is None:
        yield "distillation learns another encoder's vectors: set teacher to its checkpoint"


def _match_problems(d: DataOptions, t: TrainingOptions) -> Iterator[str]:
    """List the problems of pairs for contrastive learning."""
    if others := [name for name in ("corpus", "text", "valid_text") if getattr(d, name) is not None]:
        yield f"data.{others[0]}: contrastive learning reads pairs: set pairs, or source and target"
    elif d.corpora or (d.pairs is None) == (d.source is None and d.target is None):
        yield "contrastive learning reads one file of pairs, or source and target files: give one of them"
    if d.batch_tokens is not None:
        yield Text("{batch_tokens}: contrastive learning takes a number of pairs a batch: set {batch_pairs}")
    if t.memory is not None:
        yield "memory: a batch of contrastive learning can't be split to fit: set chunk, the texts computed at a time"
    yield from _file_problems(d, "")
    yield from _valid_problems(d)


def _label_problems(d: DataOptions, t: TrainingOptions) -> Iterator[str]:
    """List the problems of labelled text."""
    others = [name for name in (*PAIRS, "text", "valid_text") if getattr(d, name) is not None] + ["corpora"] * bool(
        d.corpora
    )
    if others:
        yield f"data.{others[0]}: classification reads labelled text: set labelled"
    if d.labelled is None:
        yield "classification reads labelled text: set labelled to a file"


def _translation_problems(d: DataOptions) -> Iterator[str]:
    """List the problems of parallel text."""
    if d.text is not None or d.valid_text is not None:
        yield (
            "text is what a language-model, masked-language-model or denoising is trained on: set objective, e.g. "
            "--objective language-model"
        )
        return
    places = [d.corpus is not None, d.source is not None or d.target is not None, d.pairs is not None, bool(d.corpora)]
    if sum(places) != 1:
        yield (
            "give either a corpus (such as cldr:en-de) or source and target files, or one file of pairs, or tables "
            "[[data.corpora]]"
        )
    yield from _file_problems(d, "")
    for i, corpus in enumerate(d.corpora):
        where = f"data.corpora[{i}]: "
        if (corpus.pairs is None) == (corpus.source is None and corpus.target is None):
            yield f"{where}give either source and target files or one file of pairs"
        yield from _file_problems(corpus, where)
    if len({corpus.weight is None for corpus in d.corpora}) > 1:
        yield "data.corpora: give all tables a weight, or none"
    yield from _corpus_problems(d)
    if d.corpus in NAMES and len(languages(d.corpus)) == 1:
        yield f"corpus {d.corpus} has one language: translation learns two, as in sentences:en-de"
    yield from _valid_problems(d)
    if d.corpus is not None and (d.valid_source is not None or d.valid_pairs is not None):
        yield Text(
            "corpus {} brings its own validation text: leave out {valid_source}, {valid_target} and {valid_pairs}",
            d.corpus,
        )
    yield from _vocabulary_problems(d)
    if d.bpe_dropout and d.cache is not None:
        yield Text("{bpe_dropout} makes other tokens in every epoch, which no cache can keep: leave one out")


def _valid_problems(d: DataOptions) -> Iterator[str]:
    if (d.valid_source is None) != (d.valid_target is None):
        yield Text("{valid_source} and {valid_target} files go together")
    if d.valid_source is not None and d.valid_pairs is not None:
        yield Text("{valid_source} and {valid_pairs} exclude each other")


def _corpus_problems(d: DataOptions) -> Iterator[str]:
    if d.corpus is None:
        return
    try:
        check(d.corpus)
    except UserError as error:
        yield str(error)
    if is_of_sentences(d.corpus) and d.train_pairs != DataOptions.train_pairs:
        yield Text("corpus {} has a fixed number of pairs: leave out {train_pairs}", d.corpus)


def _vocabulary_problems(d: DataOptions) -> Iterator[str]:
    if d.tokenizer is not None and (d.vocab_size != DataOptions.vocab_size or d.vocab_lines is not None):
        yield Text("tokenizer is an existing vocabulary: leave out {vocab_size} and {vocab_lines}")
    if d.tokenizer is not None and d.separate_vocabularies:
        yield "tokenizer is a vocabulary that is there, its folder says whether of each language: leave out one of both"
    if d.vocab_model != DataOptions.vocab_model and d.tokenizer is not None:
        yield Text("tokenizer is an existing vocabulary: leave out {vocab_model}")
    if d.vocab_model != DataOptions.vocab_model and d.separate_vocabularies:
        yield Text(
            "{vocab_model} = {!r} makes one vocabulary of both languages: leave out {separate_vocabularies}",
            d.vocab_model,
        )
    if d.vocab_model != DataOptions.vocab_model and d.bpe_dropout:
        yield Text(
            "{bpe_dropout} leaves out merges, of which {vocab_model} = {!r} has none: leave out one of the two",
            d.vocab_model,
        )


def _file_problems(files: DataOptions | CorpusOptions, where: str) -> Iterator[str]:
    if (files.source is None) != (files.target is None):
        yield f"{where}source and target files go together"
    if files.languages is None:
        return
    if files.pairs is None and getattr(files, "valid_pairs", None) is None:
        yield f"{where}languages names columns of pairs: leave it out"
    try:
        language_pair(files.languages)
    except UserError as error:
        yield f"{where}{error}"


MAX_RECIPE_BYTES = 1 << 16  # room for a hundred times all keys
LENGTHS = ("epochs", "steps", "minutes")
PATHS = (*FILES, "tokenizer", "cache")
# The presets are encoder-decoders; these fields keep only one stack.
SHAPES = {"encoder": {"decoder_layers": 0}, "decoder": {"encoder_layers": 0, "tie_embeddings": "target-output"}}
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
SECONDS = ("perplexity", "accuracy", "cosine")


@dataclass(frozen=True, kw_only=True)
class Recipe(ModelOptions):
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of `TransformerConfig` that differ from the preset."""
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
        """Return `plain`, the labelled text's head, with the fields set in [model].

        Raises UserError for fields that follow from the text, such as labels.
        """
        own = self.model.get("head", {})
        if not isinstance(own, dict):
            raise UserError(f"model.head = {own!r:.60} must be a table of fields")
        if decided := [name for name in ("kind", "labels", "several", "scores") if name in own]:
            raise UserError(f"model.head: {decided[0]} follows from the labelled text: leave it out")
        return Head.from_dict({**plain.to_dict(), **own})

    def config(
        self, vocab_size: int, source_vocab_size: int | None = None, head: Head | None = None
    ) -> TransformerConfig:
        """The config of a model with fresh weights. Raises UserError if [model] is inconsistent.

        source_vocab_size: the size of a separate source vocabulary. head: the head for labelled text; None before the
        text is read, when a head with two classes stands in.
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
        """The default of norm_placement: the preset's, or else `NORM_PLACEMENT`."""
        return PRESETS[self.preset].get("norm_placement", NORM_PLACEMENT)

    def dated(self) -> Recipe:
        """The recipe with the date that chat templates write, so that a resumed run writes the same."""
        if self.data.chat_date is not None or self.training.objective != "language-model":
            return self
        return replace(self, data=replace(self.data, chat_date=date.today().isoformat()))

    def recorded(self, batch_tokens: int) -> Recipe:
        """The recipe as run.json records it, so that --resume works from any folder and with later defaults.

        Paths are absolute, and defaults are written out: batch_tokens, norm_placement and the optimizer.
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
        """Make a recipe from a TOML file's tables. Raises UserError with all unknown keys and wrong types."""
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
    """Make options of a class from a table; append errors to `problems`."""
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
    """Load a recipe from a TOML file or by its built-in name, and apply `overrides`, e.g. {"training": {"steps": 9}}.

    Without `path`: the recipe of the run in the folder `run`, or the defaults. There a length in `overrides` (epochs,
    steps or minutes) replaces all lengths of the run. Raises UserError.
    """
    values: dict[str, Any] = {}
    where = "flags"
    if path is None and run is not None:
        values, where = _recorded(run / RECORD), str(run / RECORD)
    if path is not None:
        where = str(path)
        text = read_text(find_recipe(path), MAX_RECIPE_BYTES).removeprefix("\ufeff")  # Notepad's byte order mark
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
    """Read the recipe in run.json, as the tables of a TOML file."""
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
    """Recipe keys that flags replace: e.g. --source replaces a corpus and, with --resume, --steps replaces epochs."""
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
    """List contradictory keys."""
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
        yield "final = 'best' needs a score to choose by: set best"
    if t.patience and t.best is None:
        yield "patience needs a score to watch: set best"
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
    """List the keys of [model] and [data] that contradict `start_from`, which keeps the checkpoint's model."""
    changed = (*DROPOUTS, "head") if recipe.objective.reads == "labelled" else DROPOUTS
    others = [f"model.{name}" for name in recipe.model if name not in changed]
    others += ["model.preset"] if recipe.preset != Recipe.preset else []
    others += ["data.vocab_size"] if recipe.data.vocab_size != DataOptions.vocab_size else []
    if others:
        yield Text("{}: {start_from} keeps the checkpoint's model and vocabulary: leave it out", others[0])


def _model_problems(recipe: Recipe) -> Iterator[str]:
    """List the problems of [model], before time goes into a corpus and a tokenizer."""
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
