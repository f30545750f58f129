"""mBART and mBART-50 (Liu et al. 2020): BART with norms before each sub-layer and one more after each stack.

mBART's decoder starts with the target language's token. mBART-50's starts with the end token, and the target language
is forced as the next one.
"""

from __future__ import annotations

from dataclasses import replace

from .bart import BART, FORCED, OTHERS, SPECIAL, TIES
from .keys import Fixed, Key
from .marian import SIZES

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
