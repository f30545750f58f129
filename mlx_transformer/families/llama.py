"""Llama (Touvron et al. 2023) and families that differ from it by a few lines: RMSNorm before each sub-layer, rotary
positions, grouped heads, and a gated feed-forward net.
"""

from __future__ import annotations

from typing import Any

from .decoder_keys import Layers, Rotary, Specials, Unread, head_width, heads_of_keys, uniform
from .engine import At, Family
from .keys import ACTIVATIONS, Key, Line

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


def like_llama(name: str, model_type: str, architecture: str, *keys: Line, ours: Any = (), **more: Any) -> Family:
    """A family with Llama's names. ours: the fields that are other than Llama's; more: of `Family`."""
    fixed: dict[str, Any] = dict(names=names, derived=uniform, ignored=(f"{LAYER}.self_attn.rotary_emb.inv_freq",))
    fixed |= dict(name=name, model_type=model_type, architecture=architecture, counts_tokens=True, prefix="model.")
    return Family(ours={**OURS, **dict(ours)}, keys=keys, **{**fixed, **more})


def sizes(
    vocabulary: int, width: int, inner: int, layers: int, heads: int, keys: int | None, positions: int, eps: float
) -> tuple[Line, ...]:
    """The lines that all have, with their values in `transformers` if they are missing."""
    return (
        Key("vocab_size", "vocab_size", vocabulary),
        Key("hidden_size", "d_model", width),
        Key("num_hidden_layers", "decoder_layers", layers),
        Key("num_attention_heads", "heads", heads),
        heads_of_keys(keys),
        Key("intermediate_size", "d_ff", inner),
        Key("max_position_embeddings", "max_positions", positions),
        Key("attention_dropout", "attention_dropout", 0.0),
        Key("rms_norm_eps", "norm_epsilon", eps),
    )


ACTIVATION = Key("hidden_act", "activation", "silu", ACTIVATIONS)
ATTENTION_BIAS = Key("attention_bias", "attention_bias", False)
BIASES = (ATTENTION_BIAS, Key("mlp_bias", "feed_forward_bias", False))
TIED, UNTIED = (
    Key("tie_word_embeddings", "tie_embeddings", tied, {True: "target-output", False: "none"}) for tied in (True, False)
)
SIZES = sizes(32000, 4096, 11008, 32, 32, None, 2048, 1e-6)
NO_BIAS = dict(feed_forward_bias=False)

LLAMA = like_llama(
    *("Llama", "llama", "LlamaForCausalLM", *SIZES, head_width(), ACTIVATION, Rotary(), *BIASES, UNTIED),
    *(Specials(1, 2), Unread()),
)
MISTRAL = like_llama(
    *("Mistral", "mistral", "MistralForCausalLM", *sizes(32000, 4096, 14336, 32, 32, 8, 131072, 1e-6), head_width()),
    *(ACTIVATION, Rotary(), Layers(lambda i, keys: True, listed=False), UNTIED, Specials(1, 2), Unread()),
    ours=NO_BIAS,
)
