"""Gemma 1, 2 and 3 (Gemma Team 2024, 2025): embeddings times sqrt(d_model), RMSNorm with 1 + w, a gate of GELU by tanh.

Gemma 2 and 3 have a norm on both sides of each sub-layer, and layers with local attention. Gemma 2 bounds scores and
logits; Gemma 3 norms queries and keys, and turns its local layers by another base.
"""

from __future__ import annotations

from typing import Any

from .decoder_keys import Factor, Layers, Rotary, RoundedRoot, Specials, TwoBases, Unread, head_width
from .engine import At
from .keys import ACTIVATIONS, Fixed, Key
from .llama import ATTENTION_BIAS, LAYER, NO_BIAS, TIED, like_llama, names, sizes

OURS = "decoder.layers.*"


def of_one(config: Any) -> dict[str, str | At]:
    norms = ("decoder.norm", f"{OURS}.self_attention_norm", f"{OURS}.feed_forward_norm")
    norms += (f"{OURS}.self_attention.(query|key)_norm",)
    return {ours: At(str(at), offset=1) if ours in norms else at for ours, at in names(config).items()}


def of_two(config: Any) -> dict[str, str | At]:
    """As of Gemma 1, whose second norm stands behind the attention here."""
    return of_one(config) | {
        f"{OURS}.self_attention_post_norm": At(f"{LAYER}.post_attention_layernorm", offset=1),
        f"{OURS}.feed_forward_norm": At(f"{LAYER}.pre_feedforward_layernorm", offset=1),
        f"{OURS}.feed_forward_post_norm": At(f"{LAYER}.post_feedforward_layernorm", offset=1),
    }


OLD = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS, "gelu": "gelu_tanh"}
"""Files of old say gelu of the approximation, as transformers 5 takes it."""
GEMMA_IDS = Specials(2, 1, 0)
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
ACTIVATION = Key("hidden_activation", "activation", "gelu_pytorch_tanh", ACTIVATIONS)
QUERY_SCALE = Factor("query_pre_attn_scalar", "attention_scale", 256, power=-0.5)
GLOBAL = Fixed("use_bidirectional_attention", False)
GEMMA = like_llama(
    *("Gemma", "gemma", "GemmaForCausalLM", *sizes(256000, 3072, 24576, 28, 16, 16, 8192, 1e-6), head_width(256)),
    *(Key("hidden_act", "activation", "gelu_pytorch_tanh", OLD), Rotary()),
    *(ATTENTION_BIAS, TIED),
    *(RoundedRoot(), GLOBAL, GEMMA_IDS, Unread()),
    ours={**NO_BIAS, "scale_embeddings": True},
    names=of_one,
)
GEMMA2 = like_llama(
    *("Gemma 2", "gemma2", "Gemma2ForCausalLM", *sizes(256000, 2304, 9216, 26, 8, 4, 8192, 1e-6), head_width(256)),
    *(ACTIVATION, Rotary(), ATTENTION_BIAS, TIED, RoundedRoot(), QUERY_SCALE, Layers(lambda i, keys: i % 2 == 0)),
    Factor("attn_logit_softcapping", "score_cap", 50.0),
    Factor("final_logit_softcapping", "logit_cap", 30.0),
    *(GLOBAL, GEMMA_IDS, Unread(CAPS)),
    ours={**NO_BIAS, "scale_embeddings": True, "norm_placement": "sandwich"},
    names=of_two,
)
EVERY = "sliding_window_pattern"
GEMMA3 = like_llama(
    *("Gemma 3", "gemma3_text", "Gemma3ForCausalLM", *sizes(262208, 2304, 9216, 26, 8, 4, 131072, 1e-6)),
    *(head_width(256), ACTIVATION, Layers(lambda i, keys: (i + 1) % keys[EVERY] > 0, keys=((EVERY, 6),))),
    *(TwoBases(1e6), ATTENTION_BIAS, TIED, RoundedRoot(), QUERY_SCALE, GLOBAL, GEMMA_IDS, Unread()),
    ours={**NO_BIAS, "scale_embeddings": True, "norm_placement": "sandwich", "query_key_norm": True},
    names=of_two,
)
