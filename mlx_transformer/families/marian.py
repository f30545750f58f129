"""Marian (Junczys-Dowmunt et al. 2018) as `transformers` stores it: the paper's model, a norm after each sub-layer.

Positions are counted from the first column, so padding belongs on the right. The decoder may start with padding.

Pegasus (Zhang et al. 2020) has its norms before each sub-layer and one more after each stack; encoder and decoder share
their embeddings.
"""

from __future__ import annotations

from typing import Any

from .engine import At, Family
from .keys import ACTIVATIONS, Also, Fixed, Heads, Key, TargetVocabulary

TIES = {(True, True): "all", (False, True): "target-output", (False, False): "none", (True, False): "source-target"}
LAYERS, QKVO = "(encoder|decoder).layers.*", "(query|key|value|output)_proj"
BIASES = dict.fromkeys(("attention_bias", "feed_forward_bias", "output_bias"), True)
OTHERS = ("normalize_before", "normalize_embedding", "add_final_layer_norm", "add_bias_logits")
"""Keys that `transformers` ignores but CTranslate2's converter needs; switched on they would mean another network."""


def names(config: Any) -> dict[str, str | At]:
    layer, cross = f"model.{LAYERS}", "model.decoder.layers.*.encoder_attn"
    encoder, decoder = "model.encoder.embed_tokens", "model.decoder.embed_tokens"
    head = () if config.own_classifier else ("lm_head",)
    # If the classifier has its own matrix, version 5 of transformers shares no embedding: it needs each name.
    each = config.own_classifier
    return {
        "embedding": At("model.shared", copies=(encoder, decoder, *head), each=each),
        "source_embedding": encoder,
        "target_embedding": At(decoder, copies=head),
        f"{LAYERS}.self_attention.{QKVO}": f"{layer}.self_attn.(q|k|v|out)_proj",
        f"{LAYERS}.self_attention_norm": f"{layer}.self_attn_layer_norm",
        f"decoder.layers.*.cross_attention.{QKVO}": f"{cross}.(q|k|v|out)_proj",
        "decoder.layers.*.cross_attention_norm": f"{cross}_layer_norm",
        f"{LAYERS}.feed_forward.(up|down)_proj": f"{layer}.(fc1|fc2)",
        f"{LAYERS}.feed_forward_norm": f"{layer}.final_layer_norm",
        "(encoder|decoder).norm": "model.(encoder|decoder).layer_norm",
        "output_proj.weight": "lm_head.weight",
        "output_proj.bias": At("final_logits_bias", leading=True, optional=True),
    }


SIZES = (
    Key("d_model", "d_model", 1024),
    Key("encoder_layers", "encoder_layers", 12),
    Key("decoder_layers", "decoder_layers", 12),
    Heads("encoder_attention_heads", "heads", 16),
    Heads("decoder_attention_heads", "decoder.heads", 16),
    Key("encoder_ffn_dim", "d_ff", 4096),
    Key("decoder_ffn_dim", "decoder.d_ff", 4096),
    Key("max_position_embeddings", "max_positions", 1024),
    Key("scale_embedding", "scale_embeddings", False),
    Key("dropout", "dropout", 0.1),
    Key("attention_dropout", "attention_dropout", 0.0),
    Key("activation_dropout", "activation_dropout", 0.0),
    Key("activation_function", "activation", "gelu", ACTIVATIONS),
    Also("num_hidden_layers", "encoder_layers"),
    Fixed("is_encoder_decoder", True),
    Fixed("use_cache", True, checked=False),
)
STARTS_AS_OURS = (Also("bos_token_id", "bos_id"), Fixed("forced_eos_token_id", None, checked=False))
MARIAN = Family(
    name="Marian",
    model_type="marian",
    architecture="MarianMTModel",
    ours=dict(positions="sinusoidal_halves", norm_placement="post", **BIASES),
    keys=(
        Key("vocab_size", "source_vocab_size", 58101),
        Key(("share_encoder_decoder_embeddings", "tie_word_embeddings"), "tie_embeddings", (True, True), TIES),
        TargetVocabulary("decoder_vocab_size", "vocab_size", "@vocab_size"),
        *SIZES,
        *STARTS_AS_OURS,
        Key("pad_token_id", "pad_id", 58100),
        Key("decoder_start_token_id", "bos_id", 58100),
        Key("eos_token_id", "eos_id", 0),
        *(Fixed(key, False) for key in OTHERS),
    ),
    names=names,
    sinusoids=("model.(encoder|decoder).embed_positions",),
    ignored=("model.shared",),
)


OF_PEGASUS = dict(normalize_before=True, normalize_embedding=False, add_final_layer_norm=True, add_bias_logits=False)
OF_PEGASUS |= dict(static_position_embeddings=True)

PEGASUS = Family(
    name="Pegasus",
    model_type="pegasus",
    architecture="PegasusForConditionalGeneration",
    ours=dict(positions="sinusoidal_halves", norm_placement="pre", **BIASES),
    keys=(
        Key("vocab_size", "vocab_size", 50265),
        Key("tie_word_embeddings", "tie_embeddings", True, {True: "all", False: "source-target"}),
        *SIZES,
        *STARTS_AS_OURS,
        Key("pad_token_id", "pad_id", 0),
        Key("decoder_start_token_id", "bos_id", 0),
        Key("eos_token_id", "eos_id", 1),
        *(Fixed(key, value) for key, value in OF_PEGASUS.items()),
    ),
    names=names,
    sinusoids=("model.(encoder|decoder).embed_positions",),
    ignored=("model.shared",),
    untied_alike=True,
)
