"""Llama's network with other positions, factors, norms or joint matrices: Granite 3, HunYuan dense, OLMo 2, Qwen, Phi-3
and SmolLM3.

Qwen 2, 2.5 and 3 (Yang et al. 2024, 2025) have biases of queries, keys and values, or in Qwen 3 norms of queries and
keys instead; the last layers may be local. Phi-3, Phi-3.5 and Phi-4-mini (Abdin et al. 2024) have joint matrices, and
frequencies for texts up to a length and beyond (longrope). In SmolLM3 (Bakouch et al. 2025) some layers have no
positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .decoder_keys import ORIGINAL, Factor, Layers, Rotary, Specials, Unread, head_width
from .engine import QKV, At, joint
from .keys import Fixed, Given, Key, Values
from .llama import ACTIVATION, ATTENTION_BIAS, BIASES, LAYER, NO_BIAS, SIZES, TIED, UNTIED, like_llama, names, sizes


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


LATER = Layers(lambda i, keys: i >= keys["max_window_layers"], switched=True, keys=(("max_window_layers", 28),))
"""Layers from max_window_layers on are local."""

QWEN2 = like_llama(
    *("Qwen2", "qwen2", "Qwen2ForCausalLM", *sizes(151936, 4096, 22016, 32, 32, 32, 32768, 1e-6), head_width()),
    *(ACTIVATION, Rotary(), LATER, UNTIED, Specials(), Unread()),
    ours={**NO_BIAS, "attention_bias": True, "attention_output_bias": False},
)
QWEN3 = like_llama(
    *("Qwen3", "qwen3", "Qwen3ForCausalLM", *sizes(151936, 4096, 22016, 32, 32, 32, 32768, 1e-6), head_width(128)),
    *(ACTIVATION, Rotary(), LATER, ATTENTION_BIAS, UNTIED, Specials(), Unread()),
    ours={**NO_BIAS, "query_key_norm": True},
)


OURS = "decoder.layers.*"


class LongRope(Rotary):
    """Version 4 takes three keys in rope_scaling, and the length beside it."""

    @property
    def defaults(self) -> Values:
        return {**super().defaults, ORIGINAL: 4096}

    def write(self, config: Any) -> Values:
        table = self.table(config)
        plain = table["rope_type"] == "default"
        old = {"type": table["rope_type"], **{key: table.get(key) for key in ("short_factor", "long_factor")}}
        length = {ORIGINAL: table[ORIGINAL]} if ORIGINAL in table else {}
        return {**super().write(config), "rope_scaling": None if plain else old, **length}


def of_phi(config: Any) -> dict[str, str | At]:
    c = config
    rows = dict(zip(QKV, (c.heads * c.d_k, c.key_value_heads * c.d_k, c.key_value_heads * c.d_v), strict=True))
    both = dict.fromkeys(("gate", "up"), c.d_ff)
    return {
        **joint(At(f"{LAYER}.self_attn.qkv_proj"), OURS + ".self_attention.{}_proj", rows),
        f"{OURS}.self_attention.output_proj": f"{LAYER}.self_attn.o_proj",
        **joint(At(f"{LAYER}.mlp.gate_up_proj"), OURS + ".feed_forward.{}_proj", both),
        f"{OURS}.feed_forward.down_proj": f"{LAYER}.mlp.down_proj",
        **names(config),
    }


PHI3 = like_llama(
    *("Phi-3", "phi3", "Phi3ForCausalLM", *sizes(32064, 3072, 8192, 32, 32, None, 4096, 1e-5), head_width()),
    *(ACTIVATION, LongRope(), Layers(lambda i, keys: True, None, listed=False), UNTIED, Specials(1, 32000, 32000)),
    *(Key("resid_pdrop", "dropout", 0.0), Fixed("embd_pdrop", 0.0, checked=False), Unread()),
    ours=NO_BIAS,
    names=of_phi,
)


@dataclass(frozen=True)
class Unturned:
    """SmolLM3's layers without rotation: 0 in no_rope_layers, by default every n-th. Comes after their number."""

    @property
    def defaults(self) -> Values:
        return dict(no_rope_layers=None, no_rope_layer_interval=4)

    def read(self, theirs: Given, fields: Values) -> list[str]:
        layers, every = fields.get("decoder_layers"), theirs.value("no_rope_layer_interval", 4)
        turned = theirs.value("no_rope_layers", None)
        if problems := theirs.mistyped("no_rope_layer_interval", 4):
            return problems
        if not isinstance(layers, int) or not 0 <= layers <= 1000:
            return []
        turned = [int((i + 1) % max(every, 1) != 0) for i in range(layers)] if turned is None else turned
        if not isinstance(turned, list) or len(turned) != layers or not all(x in (0, 1) for x in turned):
            return [f"no_rope_layers={turned!r:.60} must be 0 or 1 for each of {layers} layers"]
        fields["layer_pattern"] = [{} if x else {"positions": "none"} for x in turned]
        return []

    def write(self, config: Any) -> Values:
        return dict(no_rope_layers=[int(layer.positions == "rotary") for layer in config.layers("decoder")])


SMOLLM3 = like_llama(
    *("SmolLM3", "smollm3", "SmolLM3ForCausalLM", *sizes(128256, 2048, 11008, 36, 16, 4, 32768, 1e-6), head_width()),
    *(ACTIVATION, Rotary(2e6), *BIASES, TIED, Unturned()),
    *(Layers(lambda i, keys: "positions" in keys, None, switched=True), Specials(128000, 128001, 128004), Unread()),
)
