"""BART (Lewis et al. 2020): the paper's model with learned positions and a norm over the embeddings.

The first two rows of its position tables are never read. Positions are counted from the first column, so padding
belongs on the right. The decoder starts with the end token.

mBART and mBART-50 (Liu et al. 2020) are BART with norms before each sub-layer and one more after each stack. mBART's
decoder starts with the target language's token. mBART-50's starts with the end token, and the target language is forced
as the next one.

M2M100 (Fan et al. 2020), NLLB (2022) and SMaLL-100 have norms before each sub-layer, and tensor2tensor's sinusoids.
Their positions are counted over tokens, from pad_id + 1 on, so padding may be on either side. `transformers` computes
the sinusoids from angles in float32, which are off by 7e-6 at position 100 and by 7e-5 at 1000 (d_model 1024); ours are
float64 rounded once. The difference shows in logits from position 150 to 300 on. In random models of d_model 16 and 256
it is 1.5e-5 to 2.4e-5 at position 1000, up to 1.8 times the rule of `validate`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .engine import At, Family
from .keys import Also, Counted, Fixed, Key, Values
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

M2M_DEFAULTS = dict(scale_embedding=True, activation_function="relu", attention_dropout=0.1)


def counted(fields: Values) -> Values:
    return {**fields, "first_position": fields["pad_id"] + 1}


M2M100 = Family(
    name="M2M100",
    model_type="m2m_100",
    architecture="M2M100ForConditionalGeneration",
    ours=dict(positions="sinusoidal_concat", norm_placement="pre", attention_bias=True, feed_forward_bias=True),
    keys=(
        Key("vocab_size", "vocab_size", 128112),
        Key("tie_word_embeddings", "tie_embeddings", True, TIES),
        *(replace(k, default=M2M_DEFAULTS.get(str(k.theirs), k.default)) if isinstance(k, Key) else k for k in SIZES),
        *SPECIAL,
        Counted("decoder_start_token_id", "bos_id", 2),
    ),
    names=sinusoidal_names,
    derived=counted,
    sinusoids=("model.(encoder|decoder).embed_positions", "model.(encoder|decoder).embed_positions.weights"),
    ignored=("model.shared",),
    counts_tokens=True,
    untied_alike=True,
)
