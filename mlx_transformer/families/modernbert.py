"""ModernBERT (Warner et al. 2024) and mmBERT: rotary positions, gated feed-forward, and layers with local attention.

Norms come before each sub-layer and have no bias. The first layer has no attention norm, since the embeddings are
normed. Rotary angles and windows depend on differences of positions, so padding may be on either side.
"""

from __future__ import annotations

from typing import Any

from .engine import QKV, At, Family, joint
from .keys import ACTIVATIONS, Fixed, Heads, Key, LocalLayers, ModernHead, Special

LAYER = "model.layers.*"
HEADS = {
    "ModernBertModel": dict(kind="hidden"),
    "ModernBertForMaskedLM": {},
    "ModernBertForSequenceClassification": dict(kind="classes"),
    "ModernBertForTokenClassification": dict(kind="token-classes"),
    "ModernBertForQuestionAnswering": dict(kind="spans"),
}


def names(config: Any) -> dict[str, str | At]:
    words = config.head.kind == "vocabulary"
    width, ours = config.heads * config.d_k, "encoder.layers.*"
    attention = joint(At(f"{LAYER}.attn.Wqkv"), ours + ".self_attention.{}_proj", dict.fromkeys(QKV, width))
    gated = joint(At(f"{LAYER}.mlp.Wi"), ours + ".feed_forward.{}_proj", dict.fromkeys(("gate", "up"), config.d_ff))
    embedding = "model.embeddings.tok_embeddings"
    return {
        "embedding": At(embedding, copies=("decoder",)) if words else embedding,
        "source_embedding": embedding,
        "encoder.embedding_norm": "model.embeddings.norm",
        **attention,
        "encoder.layers.*.self_attention.output_proj": f"{LAYER}.attn.Wo",
        "encoder.layers.*.self_attention_norm": f"{LAYER}.attn_norm",
        **gated,
        "encoder.layers.*.feed_forward.down_proj": f"{LAYER}.mlp.Wo",
        "encoder.layers.*.feed_forward_norm": f"{LAYER}.mlp_norm",
        "encoder.norm": "model.final_norm",
        "head_proj": "head.dense",
        "head_norm": "head.norm",
        "output_proj": "decoder" if words else "classifier",
    }


MODERNBERT = Family(
    name="ModernBERT",
    model_type="modernbert",
    architecture="ModernBertModel",
    ours=dict(architecture="encoder", decoder_layers=0, positions="rotary", norm_placement="pre", gated=True)
    | dict(embedding_norm=True, first_norm=False, scale_embeddings=False),
    keys=(
        Key("vocab_size", "vocab_size", 50368),
        Key("hidden_size", "d_model", 768),
        Key("num_hidden_layers", "encoder_layers", 22),
        Heads("num_attention_heads", "heads", 12),
        Key("intermediate_size", "d_ff", 1152),
        Key("hidden_activation", "activation", "gelu", ACTIVATIONS),
        Key("max_position_embeddings", "max_positions", 8192),
        Key("norm_eps", "norm_epsilon", 1e-5),
        Key("norm_bias", "norm_bias", False),
        Key("attention_bias", "attention_bias", False),
        Key("mlp_bias", "feed_forward_bias", False),
        Key("mlp_dropout", "dropout", 0.0),
        Key("attention_dropout", "attention_dropout", 0.0),
        Key("tie_word_embeddings", "tie_embeddings", True, {True: "all", False: "none"}),
        LocalLayers(),
        Key("pad_token_id", "pad_id", 50283),
        Special("cls_token_id", "bos_id", 50281),
        Special("sep_token_id", "eos_id", 50282),
        Fixed("sparse_prediction", False, checked=False),  # for training only
        ModernHead(HEADS),
    ),
    names=names,
    counts_tokens=True,
    prefix="model.",
)
