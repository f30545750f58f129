"""BART (Lewis et al. 2020): the paper's model with learned positions and a norm over the embeddings.

The first two rows of its position tables are never read. Positions are counted from the first column, so padding
belongs on the right. The decoder starts with the end token.

mBART and mBART-50 (Liu et al. 2020) are BART with norms before each sub-layer and one more after each stack. mBART's
decoder starts with the target language's token. mBART-50's starts with the end token, and the target language is forced
as the next one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .engine import At, Family
from .keys import Also, Fixed, Key
from .marian import BIASES, SIZES
from .marian import names as sinusoidal_names

BOTH = "(encoder|decoder)"
TIES = {True: "all", False: "source-target"}
SPECIAL = (
    Key("pad_token_id", "pad_id", 1),
    Key("eos_token_id", "eos_id", 2),
    Fixed("bos_token_id", 0, checked=False),  # the first token of a source
)
FORCED = Also("forced_eos_token_id", "eos_id")
OTHERS = dict(normalize_before=False, normalize_embedding=True, add_final_layer_norm=False)
"""Keys that `transformers` ignores but other readers need, e.g. CTranslate2's converter. Another value would mean
another network."""


def names(config: Any) -> dict[str, str | At]:
    return {
        **sinusoidal_names(config),
        f"{BOTH}.positions.weight": At(f"model.{BOTH}.embed_positions.weight", unread=2),
        f"{BOTH}.embedding_norm": f"model.{BOTH}.layernorm_embedding",
    }


BART = Family(
    name="BART",
    model_type="bart",
    architecture="BartForConditionalGeneration",
    ours=dict(positions="learned", norm_placement="post", embedding_norm=True, **BIASES),
    keys=(
        Key("vocab_size", "vocab_size", 50265),
        Key("tie_word_embeddings", "tie_embeddings", True, TIES),
        *SIZES,
        *SPECIAL,
        FORCED,
        Key("decoder_start_token_id", "bos_id", 2),
        *(Fixed(key, value) for key, value in OTHERS.items()),
    ),
    names=names,
    ignored=("model.shared",),
    untied_alike=True,
)


MBART = replace(
    BART,
    name="mBART",
    model_type="mbart",
    architecture="MBartForConditionalGeneration",
    ours={**BART.ours, "norm_placement": "pre"},
    keys=(
        Key("vocab_size", "vocab_size", 50265),
        Key("tie_word_embeddings", "tie_embeddings", True, TIES),
        *SIZES,
        *SPECIAL,
        FORCED,
        Key("decoder_start_token_id", "bos_id", "@eos_token_id"),
        *(Fixed(key, True) for key in OTHERS),
    ),
)
