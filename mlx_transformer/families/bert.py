"""BERT (Devlin et al. 2019): an encoder with learned positions, token types, and a norm over the embeddings.

Positions are counted from the first column, so padding belongs on the right.
"""

from __future__ import annotations

from typing import Any

from .engine import At, Family
from .keys import ACTIVATIONS, Architectures, Fixed, Heads, Key, Special

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
