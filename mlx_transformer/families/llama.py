"""Llama (Touvron et al. 2023) and families that differ from it by a few lines: RMSNorm before each sub-layer, rotary
positions, grouped heads, and a gated feed-forward net. Mistral; Qwen3, which norms queries and keys.
"""

from __future__ import annotations

from typing import Any

from .decoder_keys import Rotary, Specials, Windows, head_width, heads_of_keys
from .engine import At, Family
from .keys import ACTIVATIONS, Fixed, Key, Line

LAYER = "model.layers.*"
OURS = dict(architecture="decoder", encoder_layers=0, norm="rmsnorm", norm_placement="pre", positions="rotary")
OURS |= dict(gated=True, scale_embeddings=False, dropout=0.0)


def names(config: Any) -> dict[str, str | At]:
    return {
        "target_embedding": At("model.embed_tokens", copies=() if config.own_classifier else ("lm_head",)),
        "decoder.layers.*.self_attention_norm": f"{LAYER}.input_layernorm",
        "decoder.layers.*.self_attention.(query|key|value|output)_proj": f"{LAYER}.self_attn.(q|k|v|o)_proj",
        "decoder.layers.*.self_attention.(query|key)_norm": f"{LAYER}.self_attn.(q|k)_norm",
        "decoder.layers.*.feed_forward_norm": f"{LAYER}.post_attention_layernorm",
        "decoder.layers.*.feed_forward.(gate|up|down)_proj": f"{LAYER}.mlp.(gate|up|down)_proj",
        "decoder.norm": "model.norm",
        "output_proj": "lm_head",
    }


def sizes(vocabulary: int, width: int, inner: int, layers: int, heads: int, positions: int) -> tuple[Line, ...]:
    return (
        Key("vocab_size", "vocab_size", vocabulary),
        Key("hidden_size", "d_model", width),
        Key("num_hidden_layers", "decoder_layers", layers),
        Key("num_attention_heads", "heads", heads),
        Key("intermediate_size", "d_ff", inner),
        Key("hidden_act", "activation", "silu", ACTIVATIONS),
        Key("max_position_embeddings", "max_positions", positions),
        Key("attention_dropout", "attention_dropout", 0.0),
    )


def tied(default: bool) -> Key:
    return Key("tie_word_embeddings", "tie_embeddings", default, {True: "target-output", False: "none"})


def epsilon(default: float) -> Key:
    return Key("rms_norm_eps", "norm_epsilon", default)


BIASES = (Key("attention_bias", "attention_bias", False), Key("mlp_bias", "feed_forward_bias", False))


def like_llama(name: str, model_type: str, architecture: str, *keys: Line, **ours: Any) -> Family:
    """A family with Llama's names; `ours` are its fields that differ."""
    return Family(
        name=name,
        model_type=model_type,
        architecture=architecture,
        ours={**OURS, **ours},
        keys=keys,
        names=names,
        counts_tokens=True,
        prefix="model.",
        ignored=(f"{LAYER}.self_attn.rotary_emb.inv_freq",),
    )


LLAMA = like_llama(
    *("Llama", "llama", "LlamaForCausalLM", *sizes(32000, 4096, 11008, 32, 32, 2048), heads_of_keys(None)),
    *(head_width(), epsilon(1e-6), Rotary(), *BIASES, tied(False), Specials(1, 2)),
)
MISTRAL = like_llama(
    *("Mistral", "mistral", "MistralForCausalLM", *sizes(32000, 4096, 14336, 32, 32, 131072), heads_of_keys(8)),
    *(head_width(), epsilon(1e-6), Rotary(), Windows(4096), tied(False), Specials(1, 2)),
    feed_forward_bias=False,
)
QWEN3 = like_llama(
    *("Qwen3", "qwen3", "Qwen3ForCausalLM", *sizes(151936, 4096, 22016, 32, 32, 32768), heads_of_keys(32)),
    *(head_width(128), epsilon(1e-6), Rotary(), BIASES[0], Fixed("use_sliding_window", False), tied(False)),
    Specials(),
    feed_forward_bias=False,
    query_key_norm=True,
)
