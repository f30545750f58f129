"""Granite 3, HunYuan dense and OLMo 2: Llama's network with other positions, factors or norms."""

from __future__ import annotations

from .decoder_keys import Factor, Rotary, Specials, Unread, head_width
from .keys import Given, Values
from .llama import ACTIVATION, ATTENTION_BIAS, BIASES, LAYER, NO_BIAS, SIZES, UNTIED, like_llama, names, sizes


class Stretched(Rotary):
    """HunYuan's: with `alpha`, "dynamic" is another base, whatever a text's length. That base is written."""

    def turned(self, table: Values, theirs: Given, fields: Values) -> tuple[Values, list[str]]:
        alpha, width = table.get("alpha"), fields.get("d_k")
        if table.get("rope_type", table.get("type")) == "dynamic" and isinstance(alpha, int | float) and alpha > 0:
            base = table["rope_theta"] * alpha ** (width / (width - 2)) if width and width > 2 else None
            table = {"rope_theta": base, "partial_rotary_factor": 1.0}
        return super().turned(table, theirs, fields)


HUNYUAN = like_llama(
    *("HunYuan", "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    *(*sizes(290943, 4096, 11008, 32, 32, None, 2048, 1e-5), head_width(), ACTIVATION, Stretched(), ATTENTION_BIAS),
    *(UNTIED, Specials(1, 2, 0), Unread()),
    ours={**NO_BIAS, "query_key_norm": True, "query_key_norm_place": "after"},
    names=lambda config: (
        names(config) | {"decoder.layers.*.self_attention.(query|key)_norm": f"{LAYER}.self_attn.(query|key)_layernorm"}
    ),
)

GRANITE_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
GRANITE = like_llama(
    *("Granite", "granite", "GraniteForCausalLM", *SIZES, head_width(), ACTIVATION, Rotary(), *BIASES, UNTIED),
    Factor("embedding_multiplier", "embedding_scale", 1.0),
    Factor("attention_multiplier", "attention_scale", 1.0),
    Factor("residual_multiplier", "residual_scale", 1.0, neutral=1.0),
    Factor("logits_scaling", "logit_scale", 1.0, neutral=1.0, power=-1),
    *(Specials(1, 2, spare=1), Unread(GRANITE_FACTORS)),
    ours=dict(scale_embeddings=True),
)
OLMO2 = like_llama(
    *("OLMo 2", "olmo2", "Olmo2ForCausalLM", *sizes(50304, 4096, 11008, 32, 32, None, 2048, 1e-5), head_width()),
    *(ACTIVATION, Rotary(kind="type"), ATTENTION_BIAS, UNTIED, Specials(None, 50279, 1), Unread()),
    ours={**NO_BIAS, "norm_placement": "after", "query_key_norm": True, "query_key_norm_place": "width"},
    names=lambda config: (
        names(config)
        | {
            "decoder.layers.*.self_attention_post_norm": f"{LAYER}.post_attention_layernorm",
            "decoder.layers.*.feed_forward_post_norm": f"{LAYER}.post_feedforward_layernorm",
        }
    ),
)
