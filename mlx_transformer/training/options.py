"""The keys of a recipe's tables: types, bounds, defaults and meanings, each in one place. Those of [model] are the
fields of `TransformerConfig` but for `preset`.

Help is made of them, so nothing is imported here that takes time."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from mlx_transformer.core.config import AdapterAlpha, AdapterKind, AdapterRank, TransformerConfig
from mlx_transformer.core.heads import Pooling
from mlx_transformer.core.tokenizer_files import MIN_VOCAB_SIZE
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import Bounds
from mlx_transformer.system.files import check_name

OptimizerName = Literal["adam", "adamw", "adafactor", "lion", "muon"]
Schedule = Literal["inverse-square-root", "noam", "constant", "linear", "cosine", "warmup-stable-decay"]
PresetName = Literal["tiny", "small", "base", "big", "student"]
VocabModel = Literal["bpe", "unigram"]
ObjectiveName = Literal[
    "translation",
    "language-model",
    "masked-language-model",
    "denoising",
    "contrastive",
    "classification",
    "distillation",
]
RECIPES = Path(__file__).parent.parent / "recipes"
FILES = ("source", "target", "pairs", "valid_source", "valid_target", "valid_pairs", "text", "valid_text")
FILES += ("labelled", "valid_labelled")
# Fields of TransformerConfig that follow from the tokenizer, and so are no keys.
FROM_TOKENIZER = ("vocab_size", "source_vocab_size", "pad_id", "bos_id", "eos_id")
# The placement that is trained where [model] doesn't say; TransformerConfig's own default, and that of runs whose
# record has no such key, is the paper's. Post-norm learns less at every rate that was tried, and nothing at the rates
# that suit pre-norm (benchmarks/RESULTS.md, "What the defaults learn").
NORM_PLACEMENT = "pre"
ENDLESS = ("constant", "linear", "cosine")  # schedules that a falling end doesn't go with

# A number above these bounds is a slip; below them float32 may round it to nothing.
Count = Annotated[int, Bounds(at_least=0, at_most=2**32 - 1)]
Some = Annotated[int, Bounds(at_least=1, at_most=2**32 - 1)]
Tokens = Annotated[int, Bounds(at_least=1, at_most=2**20)]
Long = Annotated[float, Bounds(above=0, at_most=1e9)]
Rate = Annotated[float, Bounds(above=0, at_most=1e3)]
Decay = Annotated[float, Bounds(at_least=0, at_most=1 - 1e-6)]


# The text under a key is its help: `train --help-recipe` prints it, `train --help` its first sentence.
@dataclass(frozen=True, kw_only=True)
class TextFiles:
    source: str | None = None
    """File of source sentences, one a line; also packed, as .gz or .zst."""
    target: str | None = None
    """File of their translations, line by line."""
    pairs: str | None = None
    """One file of both: .tsv, .jsonl, .parquet or .arrow. The first two may be packed (.gz, .zst); a folder that
    datasets' save_to_disk wrote will do too."""
    languages: str | None = None
    """Names of the two columns of pairs, such as "en-de"; unset: source and target."""


@dataclass(frozen=True, kw_only=True)
class CorpusOptions(TextFiles):
    weight: Annotated[float, Bounds(above=0, at_most=1e9)] | None = None
    """Share of this corpus in every epoch, relative to the other weights; unset in all tables: each pair once."""
    tag: str = ""
    """Put before every source, such as "<2de> "; put it there when translating, too."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(TextFiles):
    corpus: str | None = None
    """Built-in corpus, e.g. cldr:en-de or sentences:en-de. "sentences:en" is a text. In its place give source and
    target, pairs, text, or tables [[data.corpora]]."""
    valid_source: str | None = None
    """Source sentences for validation; unset: one pair in a hundred, at most 1000."""
    valid_target: str | None = None
    """Their translations."""
    text: str | None = None
    """Plain text for other objectives: a file, a folder or a pattern ("src/**/*.py"). Packed as .gz or .zst
    too. In a .jsonl file each line is {"text": ...} or {"prompt": ..., "completion": ...}, the prompt not being
    learned."""
    valid_text: str | None = None
    """The same for validation; unset: one document in a hundred is set aside, at most 1000."""
    documents: Literal["line", "file"] | None = None
    """The unit that is one document of a text; unset: a line of a single file, and of several files each file."""
    valid_pairs: str | None = None
    """One file of both for validation, as pairs."""
    source_prompt: str | None = None
    """Put before every source of contrastive pairs, such as "query: "; unset: the model's prompt query, if it has
    one."""
    target_prompt: str | None = None
    """Put before every target of theirs, such as "passage: "; unset: the model's prompt document, if it has one."""
    labelled: str | None = None
    """Labelled text for classification, .tsv or .jsonl. Columns: text, label; or text, second text, label. Lines:
    {"text": ..., "label": ...}, or another form of labelled text (see the guide to training). Packed as .gz or .zst
    too."""
    valid_labelled: str | None = None
    """The same for validation; unset: one text in a hundred is set aside, at most 1000."""
    corpora: tuple[CorpusOptions, ...] = ()
    """Several corpora, each a table [[data.corpora]]."""
    train_pairs: Tokens = 60_000
    """Pairs of a corpus cldr to train on, chosen by the seed; at most 60000."""
    vocab_size: Annotated[int, Bounds(at_least=MIN_VOCAB_SIZE, at_most=2**20)] = 8000
    """Tokens of the vocabulary. It is made of the training text; separate ones have so many each."""
    vocab_model: VocabModel = "bpe"
    """The kind of vocabulary: merges of bytes (bpe), which can spell any text, or pieces of a unigram model, which
    Marian's engines read."""
    separate_vocabularies: bool = False
    """A vocabulary for each language, and so tables of embeddings of their own, in place of a joint one."""
    vocab_lines: Some | None = None
    """Learn the vocabulary from so many lines of each language, chosen at random; unset: from all."""
    tokenizer: str | None = None
    """A vocabulary that is there: a tokenizer.json of this program, or a folder that has one, or one for each language
    as source_tokenizer.json and target_tokenizer.json."""
    bpe_dropout: Annotated[float, Bounds(at_least=0, below=1)] = 0.0
    """Probability that a merge of BPE is left out, anew in each epoch, in the training text alone; needs the text in
    memory."""
    cache: str | None = None
    """Folder for the tokens of text that stays on disk; unset: text of more than 64 MB does, and its tokens are among
    the user's caches."""
    batch_tokens: Tokens | None = None
    """Target tokens a batch, padding included; unset: 500 batches an epoch, of 500 to 2000 tokens."""
    batch_pairs: Annotated[int, Bounds(at_least=2, at_most=2**20)] = 64
    """Pairs a batch of contrastive learning: a source's negatives are the targets of the others."""
    max_length: Tokens = 256
    """Translations with more tokens on a side are left out of training, and counted; other text is cut to so many."""
    mask_share: Annotated[float, Bounds(above=0, at_most=0.9)] | None = None
    """Share of the tokens that are hidden, to be restored; unset: 0.15 of a masked-language-model, 0.3 of denoising."""
    mask_span: Annotated[float, Bounds(above=0, at_most=100)] = 3.0
    """Mean length of a span of tokens that one <mask> stands for, in denoising."""
    whole_words: bool = False
    """Hide all tokens of a word or none, for a masked-language-model."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    preset: PresetName = "small"
    """Sizes of the model. Other keys of [model] change single ones."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    objective: ObjectiveName = "translation"
    """The task that is learned. Pairs: translation. Text: the next token (language-model, a decoder), hidden tokens
    (masked-language-model, an encoder), hidden spans (denoising, an encoder-decoder). Encoders also learn vectors that
    are near for texts that belong together (contrastive), labels of texts or of words (classification), another
    encoder's vectors (distillation)."""
    epochs: Long | None = None
    """End after so many passes over the data. One of epochs, steps and minutes is needed; the first to come counts."""
    steps: Some | None = None
    """End after so many batches."""
    minutes: Long | None = None
    """End after so many minutes."""
    schedule: Schedule = "inverse-square-root"
    """How the learning rate goes on after warm-up. noam: the same curve with the paper's own peak."""
    learning_rate: Rate | None = None
    """Highest learning rate, at the end of warm-up; unset: (d_model * warm-up steps)^-0.5, at most 0.58 / d_model if
    warmup_steps is unset too."""
    learning_rate_scale: Rate = 1.0
    """Factor on the highest learning rate, where learning_rate is unset."""
    warmup_steps: Some | None = None
    """Steps over which the learning rate rises. At most half of a run by whose end it falls to 0; unset: a quarter of
    the run, at most 4000."""
    cooldown: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.5
    """Share of the run, at its end, over which the learning rate falls linearly to zero; the paper's is 0. Schedules
    constant, linear and cosine have no such end."""
    optimizer: OptimizerName | None = None
    """The optimizer, which makes a step of the gradients. lion's learning rate is a fifth of the schedule's, muon's
    twice; muon takes the matrices inside the stacks, adam the others; unset: muon, but adam of an adapter and of a
    model trained further."""
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
    temperature: Annotated[float, Bounds(at_least=1e-4, at_most=1e4)] = 0.05
    """The divisor of the similarities of contrastive learning; the smaller, the more the nearest negatives
    count."""
    symmetric: bool = False
    """In contrastive learning, that each target finds its source among the others, too."""
    chunk: Some | None = None
    """Texts that contrastive learning computes at a time, with cached gradients: a batch then takes the memory of so
    many, and a third more time; unset: all of its texts."""
    teacher: str | None = None
    """Checkpoint of an encoder whose vectors are learned by distillation."""
    pooling: Pooling | None = None
    """How a text's vector is made of its tokens', in contrastive learning and distillation; unset: what start_from
    says, or the mean."""
    label_smoothing: Annotated[float, Bounds(at_least=0, below=1)] | None = None
    """Probability that the loss's targets spread evenly over the vocabulary; unset: 0.1 of translation, else 0."""
    accumulate: Annotated[int, Bounds(at_least=1, at_most=2**16)] = 1
    """Batches a step, one after another: the gradient is that of all their tokens, the memory that of one batch."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type that is computed in. Parameters, their gradients and the optimizer's moments stay float32."""
    memory: Annotated[float, Bounds(above=0, at_most=1e6)] | None = None
    """GB that MLX's arrays may take in training: accumulate, gradient_checkpointing and the loss's chunks follow from
    it; a step has as many tokens as without."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the gradient, and compute the layer again there: less memory, more time."""
    clip_norm: Annotated[float, Bounds(at_least=0, at_most=1e30)] = 1.0
    """Largest gradient norm; 0 leaves gradients alone."""
    start_from: str | None = None
    """Checkpoint to start from. The run takes its weights, config and vocabulary; only its dropout may be changed."""
    freeze: str | None = None
    """Patterns of the names of parameters that stay as they are, between commas, such as "encoder.*, *embedding.*"."""
    adapter: AdapterKind | None = None
    """Train only a low-rank change of start_from's linear maps. Its weights may be quantised."""
    adapter_rank: AdapterRank = 8
    """Rank of the change."""
    adapter_alpha: AdapterAlpha = 16.0
    """The change is the product of two small matrices times adapter_alpha / adapter_rank."""
    adapter_targets: str | None = None
    """Patterns of the names of linear maps to change, between commas, such as "decoder.*, *.up_proj"; "*" is all of
    them inside the layers; unset: the attention's "*.query_proj, *.value_proj"."""
    adapter_dropout: Annotated[float, Bounds(at_least=0, below=1)] = 0.0
    """Dropout of the change's inputs."""
    best: Literal["loss", "perplexity", "bleu", "chrf", "exact_match", "accuracy", "cosine"] | None = None
    """Score of a validation by which the best checkpoint is kept, in OUT/best."""
    patience: Count = 0
    """End the run after so many validations in a row without a better one; 0: don't."""
    final: Literal["last", "best", "average", "moving-average"] = "last"
    """Which weights OUT/model has: average is that of the last checkpoints kept."""
    average: Annotated[int, Bounds(at_least=1, at_most=1000)] = 5
    """Checkpoints that are averaged, where final is average; so many are kept then."""
    moving_average: Decay = 0.999
    """Decay of the moving average of the weights, where final is moving-average."""
    seed: Count = 1
    """Seed of the data's order, the first weights and dropout. Below 2^32."""
    valid_every: Count = 0
    """Steps between validations; 0: once an epoch."""
    valid_sentences: Count = 200
    """Validation lines that are translated for the score (the loss takes all)."""
    checkpoint_seconds: Annotated[float, Bounds(at_least=0, at_most=1e9)] = 300.0
    """Seconds between checkpoints; one is always written when the run ends or is interrupted."""
    checkpoint_steps: Count = 0
    """Steps between checkpoints; 0: by the clock, as checkpoint_seconds says."""
    keep: Some = 2
    """Checkpoints kept."""
    log_every: Some = 50
    """Steps between lines of metrics.jsonl. A short or slow run has more lines: at least one every 2 % of the run, and
    every 30 seconds."""
    wandb: str | None = None
    """Project of Weights & Biases that the curves go to as well, where its package is installed."""
    stop_after_bad_steps: Some = 20
    """End the run after so many steps in a row whose gradient is not finite."""

    @property
    def optimizer_name(self) -> OptimizerName:
        """The optimizer that is used. Muon would push weights that Adam has trained in other directions (Liu et al.
        2025, section 3.5)."""
        if self.optimizer is None:
            return "muon" if self.start_from is None else "adam"
        return self.optimizer

    @property
    def smoothing(self) -> float:
        """The label smoothing that is used."""
        if self.label_smoothing is None:
            return 0.1 if self.objective == "translation" else 0.0
        return self.label_smoothing

    @property
    def checkpoints_to_keep(self) -> int:
        """The number of checkpoints that are kept."""
        return max(self.keep, self.average) if self.final == "average" else self.keep


TABLES: dict[str, tuple[type, ...]] = {
    "data": (DataOptions,),
    "model": (ModelOptions, TransformerConfig),
    "training": (TrainingOptions,),
}


def find_recipe(name: str) -> Path:
    """Return the TOML file of that name, or the built-in recipe; `UserError` if it is neither."""
    check_name(file := Path(name))
    built_in = RECIPES / f"{name}.toml"
    if file.is_file():
        return file
    if not built_in.is_file():
        names = ", ".join(sorted(path.stem for path in RECIPES.glob("*.toml")))
        raise UserError(f"{name}: no such recipe file, and no built-in recipe of that name ({names})")
    return built_in


def is_there(path: str) -> bool:
    """Return whether a key of `FILES` names a file or folder, or a pattern that some file fits."""
    return Path(path).exists() or (glob.has_magic(path) and next(glob.iglob(path, recursive=True), None) is not None)


def recipe_keys() -> Iterator[tuple[str, str, type]]:
    """Give the table, the name and the class of each key of a recipe. No name stands in two tables."""
    for table, classes in TABLES.items():
        for of in classes:
            for field in fields(of):
                if of is not TransformerConfig or field.name not in (*FROM_TOKENIZER, "architecture"):
                    yield table, field.name, of


def tables_of(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Put keys that are given by their names alone into the tables of a recipe, and paths as text; vocab_size, which a
    config has too, is that of the text. `UserError` for one that is none."""
    homes = {f.name: table for table in ("model", "training", "data") for of in TABLES[table] for f in fields(of)}
    tables: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    for name, value in keys.items():
        if name not in homes:
            near = difflib.get_close_matches(name, homes, n=1)
            raise UserError(f"train: unknown key {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        tables[homes[name]][name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return tables
