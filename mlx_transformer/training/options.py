"""The recipe keys of [data], [training] and [model]: types, bounds, defaults and help.

Apart from `preset`, the keys of [model] are the fields of `TransformerConfig`. `train --help` is made from this module,
so it imports nothing slow.
"""

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
# Fields of TransformerConfig that follow from the tokenizer and are therefore not recipe keys.
FROM_TOKENIZER = ("vocab_size", "source_vocab_size", "pad_id", "bos_id", "eos_id")
# Default placement of norms in training. The default of TransformerConfig, also for runs recorded without this key, is
# the paper's "post". Post-norm learned less at every rate tried, and nothing at rates that suit pre-norm
# (benchmarks/RESULTS.md, "What the defaults learn").
NORM_PLACEMENT = "pre"
ENDLESS = ("constant", "linear", "cosine")  # schedules without a cooldown

# Larger numbers are typos; smaller numbers could be rounded to 0 in float32.
Count = Annotated[int, Bounds(at_least=0, at_most=2**32 - 1)]
Some = Annotated[int, Bounds(at_least=1, at_most=2**32 - 1)]
Tokens = Annotated[int, Bounds(at_least=1, at_most=2**20)]
Long = Annotated[float, Bounds(above=0, at_most=1e9)]
Rate = Annotated[float, Bounds(above=0, at_most=1e3)]
Decay = Annotated[float, Bounds(at_least=0, at_most=1 - 1e-6)]


# The text under a key is its help: `train --help-recipe` prints all of it, `train --help` the first sentence. The words
# after "; unset: " are shown as the default.
@dataclass(frozen=True, kw_only=True)
class TextFiles:
    source: str | None = None
    """File of source sentences, one per line; also .gz or .zst."""
    target: str | None = None
    """File of their translations, line by line."""
    pairs: str | None = None
    """One file with sources and targets: .tsv, .jsonl, .parquet or .arrow. The first two may be packed (.gz, .zst). A
    folder written by save_to_disk of Hugging Face's datasets works too."""
    languages: str | None = None
    """Names of the two columns of pairs, e.g. "en-de"; unset: source and target."""


@dataclass(frozen=True, kw_only=True)
class CorpusOptions(TextFiles):
    weight: Annotated[float, Bounds(above=0, at_most=1e9)] | None = None
    """Share of this corpus in every epoch, relative to the other weights; unset in all tables: each pair once."""
    tag: str = ""
    """Text put before every source, e.g. "<2de> "; put it there when translating, too."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(TextFiles):
    corpus: str | None = None
    """Built-in corpus, e.g. cldr:en-de or sentences:en-de (pairs), or sentences:en (plain text). Or give your own files
    as source and target, pairs, text, or tables [[data.corpora]]."""
    valid_source: str | None = None
    """Source sentences for validation; unset: one pair in a hundred, at most 1000."""
    valid_target: str | None = None
    """Their translations."""
    text: str | None = None
    """Plain text for other objectives: a file, a folder or a pattern, e.g. "src/**/*.py"; also .gz or .zst. Each line
    of a .jsonl file is {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}."""
    valid_text: str | None = None
    """Plain text for validation; unset: one document in a hundred is set aside, at most 1000."""
    documents: Literal["line", "file"] | None = None
    """Whether each line or each file of the text is a document; unset: each line of a single file, else each file."""
    learned: Literal["answers", "all"] = "answers"
    """What a decoder learns of prompts with completions and of messages: the completions, and what the assistant says
    (answers), or all text (all)."""
    chat_date: str | None = None
    """Date that chat templates write into messages, e.g. 2026-01-31; unset: the day on which the run begins."""
    valid_pairs: str | None = None
    """One file with sources and targets for validation, as for pairs."""
    source_prompt: str | None = None
    """Text put before every source in contrastive learning, e.g. "query: "; unset: the model's prompt query, if it has
    one."""
    target_prompt: str | None = None
    """Text put before every target in contrastive learning, e.g. "passage: "; unset: the model's prompt document, if it
    has one."""
    labelled: str | None = None
    """Labelled text for classification, .tsv or .jsonl; also .gz or .zst. TSV columns: text, label; or text, second
    text, label. JSON lines: {"text": ..., "label": ...}, or another form (see the guide to training)."""
    valid_labelled: str | None = None
    """Labelled text for validation; unset: one text in a hundred is set aside, at most 1000."""
    corpora: tuple[CorpusOptions, ...] = ()
    """Several corpora, each in a table [[data.corpora]]."""
    train_pairs: Tokens = 60_000
    """Training pairs of a cldr corpus, chosen by the seed; at most 60000."""
    vocab_size: Annotated[int, Bounds(at_least=MIN_VOCAB_SIZE, at_most=2**20)] = 8000
    """Tokens in the vocabulary. It is trained on the training text; separate vocabularies have so many each."""
    vocab_model: VocabModel = "bpe"
    """Kind of vocabulary: byte-level BPE (bpe), which can spell any text, or a unigram model, which Marian's engines
    read."""
    separate_vocabularies: bool = False
    """A vocabulary and embeddings for each language, in place of a joint vocabulary."""
    vocab_lines: Some | None = None
    """Train the vocabulary on so many lines of each language, chosen at random; unset: on all."""
    tokenizer: str | None = None
    """An existing vocabulary: a tokenizer.json written by this program, or a folder with one. If separate, the folder
    has source_tokenizer.json and target_tokenizer.json."""
    bpe_dropout: Annotated[float, Bounds(at_least=0, below=1)] = 0.0
    """Probability of skipping a BPE merge, drawn anew in each epoch. Only for the training text, which must fit into
    memory."""
    cache: str | None = None
    """Keep the text on disk, and its tokens in this folder; unset: only for over 64 MB of text, in the user's cache
    folder."""
    batch_tokens: Tokens | None = None
    """Target tokens per batch, padding included; unset: 500 batches an epoch, of 500 to 2000 tokens."""
    batch_pairs: Annotated[int, Bounds(at_least=2, at_most=2**20)] = 64
    """Pairs per batch in contrastive learning. The targets of the other pairs are a source's negatives."""
    max_length: Tokens = 256
    """Translations with more tokens on a side are left out of training, and counted; other text is cut to so many."""
    mask_share: Annotated[float, Bounds(above=0, at_most=0.9)] | None = None
    """Share of the tokens to hide; unset: 0.15 for a masked-language-model, 0.3 for denoising."""
    mask_span: Annotated[float, Bounds(above=0, at_most=100)] = 3.0
    """Mean length in tokens of a span hidden by one <mask>, in denoising."""
    whole_words: bool = False
    """Hide all tokens of a word or none, for a masked-language-model."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    preset: PresetName = "small"
    """Sizes of the model. Other keys of [model] change single sizes."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    objective: ObjectiveName = "translation"
    """The task to learn. From pairs: translation. From text: the next token (language-model, a decoder), hidden tokens
    (masked-language-model, an encoder) or hidden spans (denoising, an encoder-decoder). Encoders also learn similar
    vectors for matching texts (contrastive), labels of texts or words (classification), or another encoder's vectors
    (distillation)."""
    epochs: Long | None = None
    """End after so many passes over the data. Give at least one of epochs, steps and minutes; the run ends at the first
    that is reached."""
    steps: Some | None = None
    """End after so many optimizer steps."""
    minutes: Long | None = None
    """End after so many minutes."""
    schedule: Schedule = "inverse-square-root"
    """Curve of the learning rate after warm-up. noam: inverse-square-root with the paper's peak."""
    learning_rate: Rate | None = None
    """Highest learning rate, at the end of warm-up; unset: (d_model * warm-up steps)^-0.5, at most 0.58 / d_model if
    warmup_steps is unset too."""
    learning_rate_scale: Rate = 1.0
    """Factor on the highest learning rate, if learning_rate is unset."""
    warmup_steps: Some | None = None
    """Steps over which the learning rate rises. At most half of the run if the rate falls to 0 at its end; unset: a
    quarter of the run, at most 4000."""
    cooldown: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.5
    """Share of the run, at its end, over which the learning rate falls linearly to 0. In the paper it is 0. Not for the
    schedules constant, linear and cosine."""
    optimizer: OptimizerName | None = None
    """The optimizer. lion uses a fifth of the schedule's learning rate, muon twice. muon updates the matrices inside
    the stacks, adam all other parameters; unset: muon, or adam with start_from."""
    weight_decay: Annotated[float, Bounds(at_least=0, at_most=1e3)] | None = None
    """Each step multiplies parameters by 1 - learning rate * weight_decay; unset: 0 for adam and adafactor, 0.01 for
    adamw and muon, 0.05 for lion."""
    no_decay: str | None = None
    """Parameters without weight decay, as name patterns between commas, e.g. "*.bias, *norm.weight"; unset: biases,
    norms, embeddings and tables of positions."""
    beta1: Decay = 0.9
    """Decay of the mean of gradients, for adam and lion."""
    beta2: Decay = 0.98
    """Decay of the mean of squared gradients for adam; of the stored mean of gradients for lion."""
    epsilon: Annotated[float, Bounds(at_least=1e-30, at_most=1)] = 1e-9
    """Added to the root of adam's mean of squared gradients."""
    temperature: Annotated[float, Bounds(at_least=1e-4, at_most=1e4)] = 0.05
    """Divide similarities by this in contrastive learning; the smaller, the more the nearest negatives count."""
    symmetric: bool = False
    """In contrastive learning, also let each target find its source among the others."""
    chunk: Some | None = None
    """Texts computed at a time in contrastive learning, by cached gradients: the memory is that of so many texts, the
    time a third more; unset: all texts of a batch."""
    teacher: str | None = None
    """Checkpoint of the encoder whose vectors distillation learns."""
    pooling: Pooling | None = None
    """How a text's vector is made from its tokens' vectors, in contrastive learning and distillation; unset: as in
    start_from, or the mean."""
    label_smoothing: Annotated[float, Bounds(at_least=0, below=1)] | None = None
    """Share of each target's probability that is spread evenly over the vocabulary; unset: 0.1 for translation, else
    0."""
    accumulate: Annotated[int, Bounds(at_least=1, at_most=2**16)] = 1
    """Batches per step, computed one after another: a large batch in the memory of a small batch."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type to compute in. Parameters, gradients and the optimizer's moments stay float32."""
    memory: Annotated[float, Bounds(above=0, at_most=1e6)] | None = None
    """GB that MLX's arrays may take in training. Sets accumulate, gradient_checkpointing and the loss's chunks to fit.
    A step keeps its number of tokens."""
    gradient_checkpointing: bool = False
    """Store only each layer's input, and compute the layer again for the gradient: less memory, more time."""
    clip_norm: Annotated[float, Bounds(at_least=0, at_most=1e30)] = 1.0
    """Gradients with a larger norm are scaled down to this norm; 0: never."""
    start_from: str | None = None
    """Checkpoint to start from. The run takes its weights, config and vocabulary; only dropout may be changed."""
    freeze: str | None = None
    """Parameters that are not trained, as name patterns between commas, e.g. "encoder.*, *embedding.*"."""
    adapter: AdapterKind | None = None
    """Train only a low-rank adapter of start_from's linear maps. Its weights may be quantised."""
    adapter_rank: AdapterRank = 8
    """Rank of the adapter."""
    adapter_alpha: AdapterAlpha = 16.0
    """The adapter adds the product of two small matrices times adapter_alpha / adapter_rank."""
    adapter_targets: str | None = None
    """Linear maps to adapt, as name patterns between commas, e.g. "decoder.*, *.up_proj"; "*" is all maps in the
    layers; unset: "*.query_proj, *.value_proj" of attention."""
    adapter_dropout: Annotated[float, Bounds(at_least=0, below=1)] = 0.0
    """Dropout of the adapter's inputs."""
    best: Literal["loss", "perplexity", "bleu", "chrf", "exact_match", "accuracy", "cosine"] | None = None
    """Validation score that decides which checkpoint is kept as OUT/best."""
    patience: Count = 0
    """End the run after so many validations in a row without a better score; 0: never."""
    final: Literal["last", "best", "average", "moving-average"] = "last"
    """Weights of OUT/model; average: the mean of the last checkpoints."""
    average: Annotated[int, Bounds(at_least=1, at_most=1000)] = 5
    """Checkpoints to average and to keep, if final is average."""
    moving_average: Decay = 0.999
    """Decay of the weights' moving average, if final is moving-average."""
    seed: Count = 1
    """Seed of the order of the data, the first weights and dropout. Below 2^32."""
    valid_every: Count = 0
    """Steps between validations; 0: once an epoch."""
    valid_sentences: Count = 200
    """Validation lines to translate for BLEU, chrF and exact match. The loss is computed on all lines."""
    checkpoint_seconds: Annotated[float, Bounds(at_least=0, at_most=1e9)] = 300.0
    """Seconds between checkpoints; a run that ends or is interrupted always writes one."""
    checkpoint_steps: Count = 0
    """Steps between checkpoints; 0: by the clock, every checkpoint_seconds."""
    keep: Some = 2
    """Number of checkpoints to keep."""
    log_every: Some = 50
    """Steps between lines of metrics.jsonl. There is also a line every 2 % of the run, and at least every 30
    seconds."""
    wandb: str | None = None
    """Weights & Biases project that also gets the curves; needs the package wandb."""
    stop_after_bad_steps: Some = 20
    """End the run after so many steps in a row whose gradient is not finite."""

    @property
    def optimizer_name(self) -> OptimizerName:
        """The optimizer, or its default: Muon for fresh weights, Adam with `start_from`, since Muon would push weights
        trained with Adam in other directions (Liu et al. 2025, section 3.5)."""
        if self.optimizer is None:
            return "muon" if self.start_from is None else "adam"
        return self.optimizer

    @property
    def smoothing(self) -> float:
        """The label smoothing, or its default for the objective."""
        if self.label_smoothing is None:
            return 0.1 if self.objective == "translation" else 0.0
        return self.label_smoothing

    @property
    def checkpoints_to_keep(self) -> int:
        return max(self.keep, self.average) if self.final == "average" else self.keep


TABLES: dict[str, tuple[type, ...]] = {
    "data": (DataOptions,),
    "model": (ModelOptions, TransformerConfig),
    "training": (TrainingOptions,),
}


def find_recipe(name: str) -> Path:
    """The path of a TOML file or of a built-in recipe, e.g. "multi30k". Raises UserError if it is neither."""
    check_name(file := Path(name))
    built_in = RECIPES / f"{name}.toml"
    if file.is_file():
        return file
    if not built_in.is_file():
        names = ", ".join(sorted(path.stem for path in RECIPES.glob("*.toml")))
        raise UserError(f"{name}: no such recipe file, and no built-in recipe of that name ({names})")
    return built_in


def is_there(path: str) -> bool:
    """Whether a path exists, or is a pattern that some file matches."""
    return Path(path).exists() or (glob.has_magic(path) and next(glob.iglob(path, recursive=True), None) is not None)


def recipe_keys() -> Iterator[tuple[str, str, type]]:
    """Yield (table, name, class) for each recipe key. No two tables share a name."""
    for table, classes in TABLES.items():
        for of in classes:
            for field in fields(of):
                if of is not TransformerConfig or field.name not in (*FROM_TOKENIZER, "architecture"):
                    yield table, field.name, of


def tables_of(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort keys into a recipe's tables, with paths as text: {"steps": 9} -> {"training": {"steps": 9}, ...}.

    vocab_size goes to [data], though `TransformerConfig` has a field of that name. Raises UserError for an unknown key.
    """
    homes = {f.name: table for table in ("model", "training", "data") for of in TABLES[table] for f in fields(of)}
    tables: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    for name, value in keys.items():
        if name not in homes:
            near = difflib.get_close_matches(name, homes, n=1)
            raise UserError(f"train: unknown key {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        tables[homes[name]][name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return tables
