"""The keyword arguments of `train`, for type checkers and editors; never imported at run time.

They are the recipe keys of `options.py`. `tests/repository/test_arguments.py` checks that names and types agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from .options import ObjectiveName, OptimizerName, PresetName, Schedule, VocabModel


class TrainArguments(TypedDict, total=False):
    """The keys of all recipe tables. A path may be a `Path`; a table such as `head` is a dictionary."""

    source: str | PathLike[str] | None
    target: str | PathLike[str] | None
    pairs: str | PathLike[str] | None
    languages: str | None
    corpus: str | None
    valid_source: str | PathLike[str] | None
    valid_target: str | PathLike[str] | None
    text: str | PathLike[str] | None
    valid_text: str | PathLike[str] | None
    documents: Literal["line", "file"] | None
    learned: Literal["answers", "all"]
    chat_date: str | None
    valid_pairs: str | PathLike[str] | None
    source_prompt: str | None
    target_prompt: str | None
    labelled: str | PathLike[str] | None
    valid_labelled: str | PathLike[str] | None
    corpora: Sequence[Mapping[str, Any]]
    train_pairs: int
    vocab_size: int
    vocab_model: VocabModel
    separate_vocabularies: bool
    vocab_lines: int | None
    tokenizer: str | PathLike[str] | None
    bpe_dropout: float
    cache: str | PathLike[str] | None
    batch_tokens: int | None
    batch_pairs: int
    max_length: int
    mask_share: float | None
    mask_span: float
    whole_words: bool
    preset: PresetName
    d_model: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    key_value_heads: int
    d_k: int
    d_v: int
    d_ff: int
    norm_placement: Literal["post", "pre", "sandwich", "after"]
    norm: Literal["layernorm", "rmsnorm"]
    norm_bias: bool
    residual_scale: float | None
    first_norm: bool
    norm_epsilon: float
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"]
    gated: bool
    attention_bias: bool
    attention_output_bias: bool | None
    query_key_norm: bool
    query_key_norm_place: Literal["before", "after", "width"]
    attention_scale: float | None
    causal: bool
    score_cap: float | None
    window: int | None
    decoder_self_attention: Literal["attention", "ssru"]
    feed_forward_bias: bool
    output_bias: bool
    logit_scale: float | None
    logit_cap: float | None
    positions: Literal[
        "sinusoidal",
        "sinusoidal_halves",
        "sinusoidal_concat",
        "learned",
        "rotary",
        "relative",
        "relative_layers",
        "none",
    ]
    max_positions: int
    first_position: int
    rotary_base: float
    rotary_width: int | None
    rotary_scaling: Mapping[str, Any]
    relative_buckets: int
    relative_distance: int
    tie_embeddings: Literal["none", "target-output", "source-target", "all"]
    scale_embeddings: bool
    embedding_scale: float | None
    embedding_norm: bool
    token_types: int
    head: Mapping[str, Any]
    dropout: float
    attention_dropout: float
    activation_dropout: float
    decoder: Mapping[str, Any]
    layer_pattern: Sequence[Mapping[str, Any]]
    objective: ObjectiveName
    epochs: float | None
    steps: int | None
    minutes: float | None
    schedule: Schedule
    learning_rate: float | None
    learning_rate_scale: float
    warmup_steps: int | None
    cooldown: float
    optimizer: OptimizerName | None
    weight_decay: float | None
    no_decay: str | None
    beta1: float
    beta2: float
    epsilon: float
    temperature: float
    symmetric: bool
    chunk: int | None
    teacher: str | PathLike[str] | None
    pooling: Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"] | None
    label_smoothing: float | None
    accumulate: int
    precision: Literal["float32", "bfloat16", "float16"]
    memory: float | None
    gradient_checkpointing: bool
    clip_norm: float
    start_from: str | PathLike[str] | None
    freeze: str | None
    adapter: Literal["lora", "dora"] | None
    adapter_rank: int
    adapter_alpha: float
    adapter_targets: str | None
    adapter_dropout: float
    best: Literal["loss", "perplexity", "bleu", "chrf", "exact_match", "accuracy", "cosine"] | None
    patience: int
    final: Literal["last", "best", "average", "moving-average"]
    average: int
    moving_average: float
    seed: int
    valid_every: int
    valid_sentences: int
    checkpoint_seconds: float
    checkpoint_steps: int
    keep: int
    log_every: int
    wandb: str | None
    stop_after_bad_steps: int
