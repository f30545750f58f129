"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each sub-layer, biases everywhere.

Its matrices are stored as (in, out), queries, keys and values in one.
"""

from __future__ import annotations

from typing import Any

from .decoder_keys import Divisors, Implied, Specials
from .engine import QKV, At, Family, joint
from .keys import ACTIVATIONS, Also, Fixed, Heads, Key

OURS, THEIRS = "decoder.layers.*", "transformer.h.*"
BYTE_255 = 187
"""The published vocabulary's token of the byte 0xff, which UTF-8 doesn't have."""


def names(config: Any) -> dict[str, str | At]:
    rows = dict.fromkeys(QKV, config.heads * config.d_k)
    return {
        "target_embedding": At("transformer.wte", copies=() if config.own_classifier else ("lm_head",)),
        "decoder.positions": "transformer.wpe",
        f"{OURS}.self_attention_norm": f"{THEIRS}.ln_1",
        **joint(At(f"{THEIRS}.attn.c_attn", transposed=True), OURS + ".self_attention.{}_proj", rows),
        f"{OURS}.self_attention.output_proj": At(f"{THEIRS}.attn.c_proj", transposed=True),
        f"{OURS}.feed_forward_norm": f"{THEIRS}.ln_2",
        f"{OURS}.feed_forward.(up|down)_proj": At(f"{THEIRS}.mlp.(c_fc|c_proj)", transposed=True),
        "decoder.norm": "transformer.ln_f",
        "output_proj": "lm_head",
    }


GPT2 = Family(
    name="GPT-2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    ours=dict(architecture="decoder", encoder_layers=0, norm_placement="pre", positions="learned")
    | dict(scale_embeddings=False, attention_bias=True),
    keys=(
        Key("vocab_size", "vocab_size", 50257),
        Key("n_embd", "d_model", 768),
        Key("n_layer", "decoder_layers", 12),
        Heads("n_head", "heads", 12),
        Implied("n_inner", ("d_ff",), None, lambda fields: 4 * fields["d_model"]),
        Key("activation_function", "activation", "gelu_new", {"gelu_new": "gelu_tanh", **ACTIVATIONS}),
        Key("n_positions", "max_positions", 1024),
        Also("n_ctx", "max_positions"),
        Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Divisors(),
        Fixed("add_cross_attention", False),
        Key("embd_pdrop", "dropout", 0.1),
        Key("resid_pdrop", "dropout", 0.1),
        Key("attn_pdrop", "attention_dropout", 0.1),
        Key("tie_word_embeddings", "tie_embeddings", True, {True: "target-output", False: "none"}),
        Specials(50256, 50256, spare=BYTE_255),
    ),
    names=names,
    counts_tokens=True,
    prefix="transformer.",
    mlx_prefix="model.",
    ignored=(f"{THEIRS}.attn", f"{THEIRS}.attn.masked_bias"),
)
