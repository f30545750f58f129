"""Set up a run: its first weights, config and vocabulary, its model, optimizer and step, and a distillation's teacher.

A run starts either from fresh weights and a vocabulary trained on its text, or from a checkpoint with its own config
and vocabulary. With an adapter the checkpoint's weights stay as stored, quantised integers included; only the
adapter's arrays, and those of a new head, have gradients and optimizer state.

Distillation learns the vectors of a teacher (Reimers and Gurevych 2020, "Making Monolingual Sentence Embeddings
Multilingual using Knowledge Distillation", section 2). If the student's vectors are narrower, the teacher's vectors V
are projected to its width. Of all projections the first eigenvectors of V^T V keep most of the texts' inner products.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from mlx_transformer.core.adapter import AdapterConfig, linear_maps
from mlx_transformer.core.checkpoint import Checkpoint, digests, open_checkpoint, resolve, weights_digest
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import Head
from mlx_transformer.core.outputs import is_within
from mlx_transformer.core.parameters import parameter_count, parameter_shapes
from mlx_transformer.core.text_embedding import TextEmbedding, read_embedding
from mlx_transformer.data.labelled import Labelled
from mlx_transformer.generation.settings import CHAT_TEMPLATES, SPECIAL_TOKENS, read_settings
from mlx_transformer.nn.checkpointing import checkpoint_layers
from mlx_transformer.nn.lora import add_adapter
from mlx_transformer.nn.quantize import as_mlx
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.durable import previous
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import check_memory
from mlx_transformer.system.progress import quiet_progress
from mlx_transformer.system.tensors import is_float, to_float32
from mlx_transformer.text.chat import ChatTemplates
from mlx_transformer.text.tokenizer import MIN_VOCAB_SIZE, Tokenizer, checked_tokenizer

from .data import RunData, train_tokenizer
from .group import ALONE, Group
from .loss import logits_within
from .objectives import OBJECTIVES, Reading
from .optimizers import Optimizer, freeze, matching
from .options import TrainingOptions
from .recipe import DROPOUTS, PATHS, Recipe
from .run_folder import PARTS, check_wandb
from .step import Arithmetic, TrainStep


def check_teacher(folder: str) -> None:
    """Raise UserError unless the checkpoint is an encoder with a vocabulary and an embedding.json."""
    checkpoint = open_checkpoint(folder, verify=False)
    if checkpoint.config.architecture != "encoder" or checked_tokenizer(checkpoint) is None:
        raise UserError(f"teacher = {folder!r}: isn't an encoder with a vocabulary; give another checkpoint")
    if read_embedding(checkpoint.folder, checkpoint.config.d_model) is None:
        raise UserError(f"teacher = {folder!r}: doesn't say how a text's vector is made (embedding.json)")


class Teacher:
    """`teacher(texts)` -> vectors (N, width). If they must be projected, the first call's texts decide how."""

    def __init__(self, folder: str, width: int):
        self.model, self.folder, self.width = Transformer.load(folder), folder, width
        self._projection: NDArray[np.float64] | None = None
        own = self.model.embedder().width
        if own < width:
            raise UserError(
                "teacher = {!r}: its vectors have {} numbers, the student's {}: lower {d_model}", folder, own, width
            )

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        with quiet_progress("teacher") as report:
            vectors = self.model.embed(texts, done=lambda share: report(share, "vectors"))
        if vectors.shape[1] == self.width:
            return vectors
        wide = vectors.astype(np.float64)
        if self._projection is None:
            _, directions = np.linalg.eigh(wide.T @ wide)
            self._projection = directions[:, ::-1][:, : self.width]
        narrow = wide @ self._projection
        unit = self.model.text_embedding is not None and self.model.text_embedding.normalize
        lengths = np.linalg.norm(narrow, axis=1, keepdims=True)
        return (narrow / np.maximum(lengths, 1e-12) if unit else narrow).astype(np.float32)


MOST_EPOCHS_PER_STEP = 100
HEAD = ("head_proj", "head_norm", "output_proj")
"""Module names of an encoder's head."""
ADAPTER_TARGETS = "*.query_proj, *.value_proj"  # as in section 4.2 of LoRA's paper


@dataclass(frozen=True)
class Start:
    config: TransformerConfig
    tokenizer: Tokenizer
    checkpoint: Path | None = None
    """The checkpoint with the first weights; None: fresh weights."""
    adapter: AdapterConfig | None = None
    """The adapter to train; None: train the weights themselves."""
    embedding: TextEmbedding | None = None
    """How a text's vector is made, if the objective learns vectors."""

    @property
    def folder(self) -> Path | None:
        """The folder of the first weights; None for fresh weights."""
        return None if self.checkpoint is None else open_checkpoint(self.checkpoint, verify=False).folder

    @property
    def record(self) -> dict[str, Any]:
        """Digests of the first weights for run.json; {} for fresh weights."""
        if self.checkpoint is None:
            return {}
        weights, *adapter = digests(open_checkpoint(self.checkpoint, verify=False)).values()
        return {"start": {"weights": weights, **({"adapter": adapter[0]} if adapter else {})}}

    def reading(self, recipe: Recipe) -> Reading:
        """Make the `Reading` of the run; loads the teacher, if any."""
        data, prompts = recipe.data, {} if self.embedding is None else self.embedding.prompts
        if recipe.objective.reads == "matches":
            both = {"source_prompt": prompts.get("query"), "target_prompt": prompts.get("document")}
            data = dataclasses.replace(data, **both)
        teach = None
        if recipe.training.teacher is not None and self.embedding is not None:
            teach = Teacher(recipe.training.teacher, self.embedding.width(self.config.d_model))
        return Reading(self.tokenizer, data, self.config, self.embedding, teach, self._chat())

    def _chat(self) -> ChatTemplates | None:
        """The chat templates of the checkpoint; None without some."""
        settings = {} if self.folder is None else read_settings(self.folder, self.config)
        templates = settings.get(CHAT_TEMPLATES)
        return ChatTemplates(templates, settings.get(SPECIAL_TOKENS, {})) if templates else None

    def model(self, precision: str = "float32") -> Transformer:
        """Make the model with its first weights in float32. Under an adapter quantised weights stay integers, and
        linear maps of 16 bits as they are; so does all else if `precision`, which a step computes in, is of 16 bits.

        Fresh weights and an adapter's A come from MLX's random state.
        """
        if self.checkpoint is not None and self.adapter is not None:
            model = self._adapted(open_checkpoint(self.checkpoint), self.adapter, precision)
        else:
            model = Transformer(self.config)
            if self.checkpoint is not None:
                base = open_checkpoint(self.checkpoint)
                weights = [(name, array) for name, array in base.tensors() if self._goes_on(name, array.shape, base)]
                arrays: Any = tree_unflatten([(name, as_mlx(array).astype(mx.float32)) for name, array in weights])
                model.update(arrays)
        model.tokenizer, model.text_embedding = self.tokenizer, self.embedding
        mx.eval(model.parameters())
        return model

    def _goes_on(self, name: str, shape: tuple[int, ...], base: Checkpoint) -> bool:
        """Whether the model starts with this parameter of the checkpoint; a classifier for other labels is fresh."""
        other = name.startswith("output_proj") and base.config.head != self.config.head
        return not other and parameter_shapes(self.config).get(name) == shape

    def _adapted(self, base: Checkpoint, adapter: AdapterConfig, precision: str) -> Transformer:
        """Make the model with an adapter. If the recipe needs another head than the checkpoint's, it is fresh, and all
        its weights are trained."""
        stored = dict(base.stored())
        if precision == "float32":
            stay = {f"{path}.weight" for path in linear_maps(base.config)} | base.quantization.keys()
            stored = {n: a if n in stay or not is_float(a.dtype) else to_float32(a) for n, a in stored.items()}
        quantization, new = base.quantization, base.config.head != self.config.head
        if new:
            fresh = {n: a for n, a in Transformer(self.config).weights().items() if n.startswith(HEAD)}
            old = {n: to_float32(stored[n]) for n in fresh if n in stored}
            fresh |= {n: array for n, array in old.items() if self._goes_on(n, array.shape, base)}
            stored = {n: a for n, a in stored.items() if not n.startswith(HEAD)} | fresh
            quantization = {n: scheme for n, scheme in quantization.items() if not n.startswith(HEAD)}
        model = Transformer.from_weights(self.config, stored, quantization)
        add_adapter(model, adapter)
        if new:
            for name in HEAD:
                if name in model:
                    model[name].unfreeze()
        return model


def check_apart(recipe: Recipe, out: Path) -> None:
    """Raise UserError if the run would overwrite its own input, e.g. start_from is OUT/model of an earlier run."""
    parts = [out / name for name in PARTS]
    parts += [previous(part) for part in parts]
    for path in _read_by(recipe):
        if any(is_within(path, part) for part in parts):
            raise UserError(f"{out}: holds {path}, which is read and would be lost; choose another --out")


def _read_by(recipe: Recipe) -> Iterator[Path]:
    """Files and folders that the recipe's run reads."""
    for place in (recipe.training.start_from, recipe.training.teacher):
        if place is not None:
            yield resolve(place)
    for options in (recipe.data, *recipe.data.corpora):
        for name in PATHS:
            if (place := getattr(options, name, None)) is None:
                continue
            is_pattern = glob.has_magic(place) and not Path(place).exists()
            yield from map(Path, glob.glob(place, recursive=True) if is_pattern else [place])


def check_start(recipe: Recipe) -> None:
    """Raise UserError for what can be checked before the text is read, e.g. the teacher, the adapter and memory."""
    check_wandb(recipe.training.wandb)
    if recipe.training.teacher is not None:
        check_teacher(recipe.training.teacher)
    if recipe.training.start_from is None:
        check_fits(recipe.config(MIN_VOCAB_SIZE))
    else:
        chosen_adapter(recipe.training, open_checkpoint(recipe.training.start_from))


def check_fits(config: TransformerConfig) -> None:
    """Raise UserError if the machine lacks memory even for weights, gradients and Adam's two moments."""
    count = parameter_count(config)
    check_memory(
        16 * count, f"training {count:,} parameters", "choose a smaller preset, {d_model}, {d_ff} or {vocab_size}"
    )


def start(recipe: Recipe, data: RunData, known: Tokenizer | None) -> Start:
    """Make the run's `Start`. known: the vocabulary of a resumed run.

    Raises UserError if the checkpoint can't be trained or has no vocabulary.
    """
    path = recipe.training.start_from
    made = _fresh(recipe, data, known) if path is None else _from_checkpoint(Path(path), recipe, data)
    if made.tokenizer.separate and recipe.objective.reads != "pairs":
        raise UserError(f"{recipe.training.objective}: needs one vocabulary; this one has two, source and target")
    if made.adapter is None:  # an adapter needs little more memory than the weights
        check_fits(made.config)
    return made


def _fresh(recipe: Recipe, data: RunData, known: Tokenizer | None) -> Start:
    tokenizer = known or train_tokenizer(data, recipe)
    if tokenizer.is_makers:
        raise UserError("tokenizer: a published decoder's goes with its weights: train from a checkpoint of it")
    head = recipe.head(data.train.head) if isinstance(data.train, Labelled) else None
    config = recipe.config(tokenizer.vocab_size, tokenizer.source.vocab_size if tokenizer.separate else None, head)
    ids = dict(pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id)
    config = dataclasses.replace(config, **ids)
    tokenizer.check_fits(config, "recipe")
    return Start(config, tokenizer, embedding=_embedding(recipe, None) if recipe.objective.embeds else None)


def _from_checkpoint(path: Path, recipe: Recipe, data: RunData) -> Start:
    checkpoint = open_checkpoint(path)
    config, objective = checkpoint.config, recipe.training.objective
    if config.architecture != recipe.objective.architecture:
        fitting = [name for name, each in OBJECTIVES.items() if each.architecture == config.architecture]
        raise UserError(
            f"{path}: architecture={config.architecture!r} doesn't learn {objective}: choose objective "
            f"{' or '.join(fitting)}, or another checkpoint"
        )
    text = checked_tokenizer(checkpoint)
    if text is None:
        raise UserError(f"{checkpoint.folder}: has no tokenizer.json, so it can't be trained on text")
    tokenizer = Tokenizer(text, str(path))
    tokenizer.check_fits(config, str(path))
    if recipe.objective.masks and tokenizer.mask_id is None:
        raise UserError(f"{path}: its vocabulary has no <mask>, which {objective} needs: choose another checkpoint")
    dropouts = {name: value for name, value in recipe.model.items() if name in DROPOUTS}
    config = _with_head(dataclasses.replace(config, **dropouts), recipe, data, path)
    embedding = None
    if recipe.objective.embeds:
        embedding = _embedding(recipe, read_embedding(checkpoint.folder, config.d_model))
    return Start(config, tokenizer, resolve(path), chosen_adapter(recipe.training, checkpoint), embedding)


def _with_head(config: TransformerConfig, recipe: Recipe, data: RunData, path: Path) -> TransformerConfig:
    """Return the config with a head for the recipe's objective; the checkpoint's own head is kept if it fits."""
    own, objective = config.head, recipe.training.objective
    if isinstance(data.train, Labelled):
        plain = data.train.head
        alike = (own.kind, own.several, own.scores) == (plain.kind, plain.several, plain.scores)
        if alike and {*plain.labels} <= {*own.labels}:
            return config
        if own.kind == plain.kind or (own.kind, plain.kind) == ("pooled", "classes"):  # keep its dense layer
            labels = {"labels": plain.labels, "several": plain.several, "scores": plain.scores}
            plain = dataclasses.replace(own, kind=plain.kind, **labels)
        head = recipe.head(plain)
    elif recipe.objective.embeds:
        head = own if own.kind in ("hidden", "pooled") or recipe.training.adapter is not None else Head(kind="hidden")
    elif own.kind != "vocabulary":
        raise UserError(f"{path}: a head of kind {own.kind!r} doesn't learn {objective}, which needs logits of words")
    else:
        head = own
    if head == own:
        return config
    return dataclasses.replace(config, head=head, output_bias=head.classifies)


def _embedding(recipe: Recipe, own: TextEmbedding | None) -> TextEmbedding:
    """How texts become vectors: the checkpoint's way, or the mean over their tokens, scaled to length 1.

    The recipe's `pooling` and prompts replace the checkpoint's.
    """
    embedding = own or TextEmbedding(normalize=True, similarity="cosine")
    if (pooling := recipe.training.pooling) is not None:
        if embedding.dense:
            raise UserError(f"pooling = {pooling!r}: the checkpoint's dense layers were made for its own; leave it out")
        embedding = dataclasses.replace(embedding, pooling=(pooling,))
    texts = {"query": recipe.data.source_prompt, "document": recipe.data.target_prompt}
    prompts = {**embedding.prompts, **{name: text for name, text in texts.items() if text is not None}}
    if recipe.objective.reads == "matches" and not embedding.prompt_counts and any(prompts.values()):
        raise UserError("prompts whose tokens aren't pooled (prompt_counts) can't be trained")
    return dataclasses.replace(embedding, prompts=prompts)


def chosen_adapter(options: TrainingOptions, base: Checkpoint) -> AdapterConfig | None:
    """The config of the recipe's adapter, if any.

    Raises UserError if a pattern matches no linear map, the rank is too large, or the checkpoint has an adapter.
    """
    if options.adapter is None:
        return None
    if base.adapter is not None:
        raise UserError(
            f"{base.folder}: has an adapter beside its weights already; train another one of the checkpoint that "
            "it was made from, or merge this one first"
        )
    maps = linear_maps(base.config)
    fitting = matching(
        maps, options.adapter_targets or ADAPTER_TARGETS, "adapter_targets", what="linear map of a layer"
    )
    config = AdapterConfig(
        kind=options.adapter,
        rank=options.adapter_rank,
        alpha=options.adapter_alpha,
        dropout=options.adapter_dropout,
        base=weights_digest(base.folder),
        targets=tuple(path for path in maps if path in fitting),
    )
    try:
        config.shapes(base.config)
    except UserError as error:
        raise UserError(
            "{adapter_rank}: {}; lower it, or choose other {adapter_targets}", error, adapter_rank=config.rank
        ) from error
    return config


def model_and_step(
    start: Start,
    options: TrainingOptions,
    group: Group = ALONE,
    streams: Sequence[mx.Stream] | None = None,
    max_logits: int | None = None,
) -> tuple[Transformer, TrainStep]:
    """Make the model and its training step. Fresh weights come from MLX's random state.

    streams: as for `Optimizer`. max_logits: as for `TrainStep`; None: as `memory` allows.
    """
    model = start.model(options.precision)
    if options.freeze is not None:
        freeze(model, options.freeze)
    if options.gradient_checkpointing:
        checkpoint_layers(model)
    optimizer, arithmetic = Optimizer(model, options, streams), Arithmetic(options.precision)
    max_logits = logits_within(options.memory) if max_logits is None else max_logits
    objective = OBJECTIVES[options.objective]
    arguments = {key: getattr(options, key) for key in objective.keys}
    settled = model, optimizer, options.smoothing, options.clip_norm, arithmetic, group, max_logits
    return model, objective.step(*settled, **arguments)


def batches_per_step(options: TrainingOptions, group: Group, epoch: Sized) -> int:
    """Batches per step, of all processes together.

    Raises UserError if a step would repeat the text more than 100 times: its gradient would stay the same, and the
    first line of progress could take hours.
    """
    count = options.accumulate * group.size
    if count > MOST_EPOCHS_PER_STEP * len(epoch):
        raise UserError(
            f"accumulate = {options.accumulate}: a step would take the text {count // len(epoch):,} times, which has "
            f"{len(epoch):,} batches: lower it"
        )
    return count
