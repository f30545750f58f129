"""T5 1.0 and 1.1, FLAN-T5 and MADLAD-400 (Raffel et al. 2020): RMSNorm before each sub-layer, relative positions, no
biases, and scores without the division by sqrt(d_k).

All layers of a stack use the table of relative positions stored in its first layer. mT5 (Xue et al. 2021) and mT0 are
T5 1.1 with other defaults. umT5 (Chung et al. 2023) is mT5 with a table of relative positions in each layer. Version 5
of `transformers` takes every umT5 for tied, and keeps apart whether the classifier's input is divided by sqrt(d_model).
Files of version 4, as the published models have, are read as version 4 computes them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .engine import At, Family
from .keys import Fixed, Key, ScaledTie, Values

BOTH, QKVO, PARTS = "(encoder|decoder)", "(query|key|value|output)_proj", "(gate|up|down)_proj"
FEED_FORWARD = {"relu": ("relu", False), "gelu": ("gelu", False), "silu": ("silu", False)}
FEED_FORWARD |= {"gelu_new": ("gelu_tanh", False), "gated-gelu": ("gelu_tanh", True)}
FEED_FORWARD |= {"gated-relu": ("relu", True), "gated-silu": ("silu", True)}
"""{feed_forward_proj: (activation, gated)}; T5's gated-gelu is the tanh approximation."""


def names(config: Any) -> dict[str, str | At]:
    up, head = "wi_1" if config.gated else "wi", () if config.own_classifier else ("lm_head",)
    return {
        "embedding": At("shared", copies=("encoder.embed_tokens", "decoder.embed_tokens", *head)),
        "source_embedding": "encoder.embed_tokens",
        "target_embedding": At("decoder.embed_tokens", copies=head),
        f"{BOTH}.positions": f"{BOTH}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{BOTH}.layers.*.self_attention.{QKVO}": f"{BOTH}.block.*.layer.0.SelfAttention.(q|k|v|o)",
        f"{BOTH}.layers.*.self_attention_norm": f"{BOTH}.block.*.layer.0.layer_norm",
        f"decoder.layers.*.cross_attention.{QKVO}": "decoder.block.*.layer.1.EncDecAttention.(q|k|v|o)",
        "decoder.layers.*.cross_attention_norm": "decoder.block.*.layer.1.layer_norm",
        f"encoder.layers.*.feed_forward.{PARTS}": f"encoder.block.*.layer.1.DenseReluDense.(wi_0|{up}|wo)",
        f"decoder.layers.*.feed_forward.{PARTS}": f"decoder.block.*.layer.2.DenseReluDense.(wi_0|{up}|wo)",
        "encoder.layers.*.feed_forward_norm": "encoder.block.*.layer.1.layer_norm",
        "decoder.layers.*.feed_forward_norm": "decoder.block.*.layer.2.layer_norm",
        f"{BOTH}.norm": f"{BOTH}.final_layer_norm",
        "output_proj": "lm_head",
    }


def derived(fields: Values) -> Values:
    """Derive d_v, logit_scale (a tied classifier's input is divided by sqrt(d_model)) and the dropout rates."""
    scale = fields["d_model"] ** -0.5 if fields["logit_scale"] else None
    rates = dict.fromkeys(("attention_dropout", "activation_dropout"), fields["dropout"])
    return {**fields, "d_v": fields["d_k"], "logit_scale": scale, **rates}


SIZES = (
    Key("vocab_size", "vocab_size", 32128),
    Key("d_model", "d_model", 512),
    Key("num_layers", "encoder_layers", 6),
    Key("num_decoder_layers", "decoder_layers", "@num_layers"),
    Key("num_heads", "heads", 8),
    Key("d_kv", "d_k", 64),
    Key("d_ff", "d_ff", 2048),
    Key("feed_forward_proj", ("activation", "gated"), "relu", FEED_FORWARD),
    Key("relative_attention_num_buckets", "relative_buckets", 32),
    Key("relative_attention_max_distance", "relative_distance", 128),
    Key("n_positions", "max_positions", 512),
    Key("layer_norm_epsilon", "norm_epsilon", 1e-6),
    Key("dropout_rate", "dropout", 0.1),
    Key("pad_token_id", "pad_id", 0),
    Key("decoder_start_token_id", "bos_id", "@pad_token_id"),
    Key("eos_token_id", "eos_id", 1),
    Fixed("is_encoder_decoder", True),
)
T5 = Family(
    name="T5",
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    ours=dict(norm="rmsnorm", norm_placement="pre", positions="relative", feed_forward_bias=False)
    | dict(scale_embeddings=False, attention_scale=1.0),
    keys=(*SIZES, ScaledTie(True, scale="scale_decoder_outputs")),
    names=names,
    derived=derived,
    counts_tokens=True,
    ignored=("decoder.block.*.layer.1.EncDecAttention.relative_attention_bias",),
)


OF_MT5 = dict(vocab_size=250112, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu")

MT5 = replace(
    T5,
    name="mT5",
    model_type="mt5",
    architecture="MT5ForConditionalGeneration",
    keys=(
        *(replace(k, default=OF_MT5.get(str(k.theirs), k.default)) if isinstance(k, Key) else k for k in SIZES),
        ScaledTie(False, until_5=True),
    ),
)


def names_in_layers(config: Any) -> dict[str, str | At]:
    table = f"{BOTH}.block.*.layer.0.SelfAttention.relative_attention_bias"
    return {**names(config), f"{BOTH}.positions.layers.*": table}


UMT5 = replace(
    MT5,
    name="umT5",
    model_type="umt5",
    architecture="UMT5ForConditionalGeneration",
    ours={**MT5.ours, "positions": "relative_layers"},
    keys=(*MT5.keys[:-1], ScaledTie(True, scale="scale_decoder_outputs")),
    names=names_in_layers,
)
