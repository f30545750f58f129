"""BERT (Devlin et al. 2019): an encoder with learned positions, token types, and a norm over the embeddings.

Positions are counted from the first column, so padding belongs on the right.

RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2020) are BERT with positions counted from pad_token_id + 1. Only
tokens are counted, so padding may be on the left. No token reads the rows of the table before pad_token_id + 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .engine import At, Family
from .keys import ACTIVATIONS, Architectures, Fixed, Heads, Key, PositionRows, Special

LAYER, QKV = "bert.encoder.layer.*", "(query|key|value)"
HEADS = {
    "BertModel": dict(kind="pooled", activation="tanh"),
    **{key: dict(activation="@activation", norm=True) for key in ("BertForMaskedLM", "BertForPreTraining")},
    "BertForSequenceClassification": dict(kind="classes", activation="tanh"),
    "BertForTokenClassification": dict(kind="token-classes"),
    "BertForQuestionAnswering": dict(kind="spans"),
}
OUTPUTS = {"vocabulary": "cls.predictions.decoder", "spans": "qa_outputs"}
"""{kind of head: name of its classifier}; other kinds have "classifier"."""


def names(config: Any) -> dict[str, str | At]:
    kind, words, transform = config.head.kind, "bert.embeddings.word_embeddings", "cls.predictions.transform"
    output = OUTPUTS.get(kind, "classifier")
    bias = At("cls.predictions.bias", ("cls.predictions.decoder.bias",), config.tie_embeddings == "none", last=True)
    return {
        "embedding": At(words, copies=("cls.predictions.decoder",)) if kind == "vocabulary" else words,
        "source_embedding": words,
        "token_type_embedding": "bert.embeddings.token_type_embeddings",
        "encoder.positions": "bert.embeddings.position_embeddings",
        "encoder.embedding_norm": "bert.embeddings.LayerNorm",
        f"encoder.layers.*.self_attention.{QKV}_proj": f"{LAYER}.attention.self.{QKV}",
        "encoder.layers.*.self_attention.output_proj": f"{LAYER}.attention.output.dense",
        "encoder.layers.*.self_attention_norm": f"{LAYER}.attention.output.LayerNorm",
        "encoder.layers.*.feed_forward.(up|down)_proj": f"{LAYER}.(intermediate|output).dense",
        "encoder.layers.*.feed_forward_norm": f"{LAYER}.output.LayerNorm",
        "head_proj": f"{transform}.dense" if kind == "vocabulary" else "bert.pooler.dense",
        "head_norm": f"{transform}.LayerNorm",
        "output_proj.weight": f"{output}.weight",
        "output_proj.bias": bias if kind == "vocabulary" else f"{output}.bias",
    }


SIZES = (
    Key("vocab_size", "vocab_size", 30522),
    Key("hidden_size", "d_model", 768),
    Key("num_hidden_layers", "encoder_layers", 12),
    Heads("num_attention_heads", "heads", 12),
    Key("intermediate_size", "d_ff", 3072),
    Key("hidden_act", "activation", "gelu", ACTIVATIONS),
    Key("hidden_dropout_prob", "dropout", 0.1),
    Key("attention_probs_dropout_prob", "attention_dropout", 0.1),
    Key("type_vocab_size", "token_types", 2),
    Key("layer_norm_eps", "norm_epsilon", 1e-12),
    Key("tie_word_embeddings", "tie_embeddings", True, {True: "all", False: "none"}),
    Fixed("position_embedding_type", "absolute"),
    *(Fixed(key, False) for key in ("is_decoder", "add_cross_attention")),
)
BERT = Family(
    name="BERT",
    model_type="bert",
    architecture="BertModel",
    ours=dict(architecture="encoder", decoder_layers=0, positions="learned", embedding_norm=True)
    | dict(scale_embeddings=False, attention_bias=True),
    keys=(
        *SIZES,
        Key("max_position_embeddings", "max_positions", 512),
        Key("pad_token_id", "pad_id", 0),
        Special("cls_token_id", "bos_id", 101),
        Special("sep_token_id", "eos_id", 102),
        Architectures(HEADS),
    ),
    names=names,
    prefix="bert.",
    spellings={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    ignored=("bert.embeddings.position_ids", "bert.pooler.dense", "cls.seq_relationship"),
)

ROBERTA_WORDS = dict(activation="gelu", norm=True)
"""The masked-LM head; it has GELU even if the model's activation is another."""


def roberta_names(config: Any) -> dict[str, str | At]:
    """BERT's names, with RoBERTa's heads and position table."""
    kind, body = config.head.kind, "roberta."
    words, output = "roberta.embeddings.word_embeddings", {**OUTPUTS, "vocabulary": "lm_head.decoder"}
    dense = {"vocabulary": "lm_head.dense", "classes": "classifier.dense"}.get(kind, "roberta.pooler.dense")
    place = "classifier.out_proj" if kind == "classes" else output.get(kind, "classifier")
    bias = At("lm_head.bias", ("lm_head.decoder.bias",), config.tie_embeddings == "none", last=True)
    encoder = {ours: At(at.replace("bert.", body, 1)) for ours, at in names(config).items() if isinstance(at, str)}
    return {
        **encoder,
        "embedding": At(words, copies=("lm_head.decoder",)) if kind == "vocabulary" else words,
        "encoder.positions": At("roberta.embeddings.position_embeddings", unread=config.pad_id + 1),
        "head_proj": dense,
        "head_norm": "lm_head.layer_norm",
        "output_proj.weight": f"{place}.weight",
        "output_proj.bias": bias if kind == "vocabulary" else f"{place}.bias",
    }


def roberta_heads(name: str) -> Architectures:
    return Architectures(
        {
            f"{name}Model": dict(kind="pooled", activation="tanh"),
            f"{name}ForMaskedLM": ROBERTA_WORDS,
            f"{name}ForSequenceClassification": dict(kind="classes", activation="tanh"),
            f"{name}ForTokenClassification": dict(kind="token-classes"),
            f"{name}ForQuestionAnswering": dict(kind="spans"),
        }
    )


ROBERTA_KEYS = (
    *SIZES,
    Key("pad_token_id", "pad_id", 1),
    PositionRows("max_position_embeddings", "max_positions", 512),
    Key("bos_token_id", "bos_id", 0),
    Special("eos_token_id", "eos_id", 2),
)
ROBERTA = replace(
    BERT,
    name="RoBERTa",
    model_type="roberta",
    architecture="RobertaModel",
    keys=(*ROBERTA_KEYS, roberta_heads("Roberta")),
    names=roberta_names,
    counts_tokens=True,
    prefix="roberta.",
    ignored=("roberta.embeddings.position_ids", "roberta.pooler.dense"),
)
XLM_ROBERTA = replace(
    ROBERTA,
    name="XLM-R",
    model_type="xlm-roberta",
    architecture="XLMRobertaModel",
    keys=(*ROBERTA_KEYS, roberta_heads("XLMRoberta")),
)
