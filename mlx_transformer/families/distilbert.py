"""DistilBERT (Sanh et al. 2019): BERT with half the layers, without token types and without a pooler.

Positions are counted from the first column, so padding belongs on the right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .bert import BERT
from .engine import At
from .keys import ACTIVATIONS, Architectures, Fixed, Heads, Key, Special

LAYER = "distilbert.transformer.layer.*"
OUTPUTS = {"vocabulary": "vocab_projector", "spans": "qa_outputs"}
HEADS = {
    "DistilBertModel": dict(kind="hidden"),
    "DistilBertForMaskedLM": dict(activation="@activation", norm=True),
    "DistilBertForSequenceClassification": dict(kind="classes", activation="relu"),
    "DistilBertForTokenClassification": dict(kind="token-classes"),
    "DistilBertForQuestionAnswering": dict(kind="spans"),
}


def names(config: Any) -> dict[str, str | At]:
    kind, words = config.head.kind, "distilbert.embeddings.word_embeddings"
    return {
        "embedding": At(words, copies=("vocab_projector",)) if kind == "vocabulary" else words,
        "source_embedding": words,
        "encoder.positions": "distilbert.embeddings.position_embeddings",
        "encoder.embedding_norm": "distilbert.embeddings.LayerNorm",
        "encoder.layers.*.self_attention.(query|key|value|output)_proj": f"{LAYER}.attention.(q|k|v|out)_lin",
        "encoder.layers.*.self_attention_norm": f"{LAYER}.sa_layer_norm",
        "encoder.layers.*.feed_forward.(up|down)_proj": f"{LAYER}.ffn.(lin1|lin2)",
        "encoder.layers.*.feed_forward_norm": f"{LAYER}.output_layer_norm",
        "head_proj": "vocab_transform" if kind == "vocabulary" else "pre_classifier",
        "head_norm": "vocab_layer_norm",
        "output_proj": OUTPUTS.get(kind, "classifier"),
    }


DISTILBERT = replace(
    BERT,
    name="DistilBERT",
    model_type="distilbert",
    architecture="DistilBertModel",
    ours={**BERT.ours, "norm_epsilon": 1e-12},
    keys=(
        Key("vocab_size", "vocab_size", 30522),
        Key("dim", "d_model", 768),
        Key("n_layers", "encoder_layers", 6),
        Heads("n_heads", "heads", 12),
        Key("hidden_dim", "d_ff", 3072),
        Key("activation", "activation", "gelu", ACTIVATIONS),
        Key("dropout", "dropout", 0.1),
        Key("attention_dropout", "attention_dropout", 0.1),
        Key("max_position_embeddings", "max_positions", 512),
        Key("tie_word_embeddings", "tie_embeddings", True, {True: "all", False: "none"}),
        Fixed("sinusoidal_pos_embds", False, checked=False),  # how the position table was initialised, no more
        Key("pad_token_id", "pad_id", 0),
        Special("cls_token_id", "bos_id", 101),
        Special("sep_token_id", "eos_id", 102),
        Architectures(HEADS),
    ),
    names=names,
    prefix="distilbert.",
    ignored=("distilbert.embeddings.position_ids",),
)
