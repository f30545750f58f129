"""Pegasus (Zhang et al. 2020) as `transformers` stores it: the paper's model with norms before each sub-layer.

One more norm follows each stack. Encoder and decoder share their embeddings.
"""

from __future__ import annotations

from .engine import Family
from .keys import Fixed, Key
from .marian import BIASES, SIZES, STARTS_AS_OURS, names

OTHERS = dict(normalize_before=True, normalize_embedding=False, add_final_layer_norm=True, add_bias_logits=False)
OTHERS |= dict(static_position_embeddings=True)
"""Keys that `transformers` ignores but other readers need, e.g. CTranslate2's converter. Another value would mean
another network."""

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
        *(Fixed(key, value) for key, value in OTHERS.items()),
    ),
    names=names,
    sinusoids=("model.(encoder|decoder).embed_positions",),
    ignored=("model.shared",),
    untied_alike=True,
)
