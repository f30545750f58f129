"""M2M100 (Fan et al. 2020), NLLB (2022) and SMaLL-100: norms before each sub-layer, and tensor2tensor's sinusoids.

Positions are counted over tokens, from pad_id + 1 on, so padding may be on either side.

`transformers` computes the sinusoids from angles in float32, which are off by 7e-6 at position 100 and by 7e-5 at 1000
(d_model 1024); ours are float64 rounded once. The difference shows in logits from position 150 to 300 on. In random
models of d_model 16 and 256 it is 1.5e-5 to 2.4e-5 at position 1000, up to 1.8 times the rule of `validate`.
"""

from __future__ import annotations

from dataclasses import replace

from .bart import SPECIAL, TIES
from .engine import Family
from .keys import Counted, Key, Values
from .marian import SIZES, names

DEFAULTS = dict(scale_embedding=True, activation_function="relu", attention_dropout=0.1)


def derived(fields: Values) -> Values:
    return {**fields, "first_position": fields["pad_id"] + 1}


M2M100 = Family(
    name="M2M100",
    model_type="m2m_100",
    architecture="M2M100ForConditionalGeneration",
    ours=dict(positions="sinusoidal_concat", norm_placement="pre", attention_bias=True, feed_forward_bias=True),
    keys=(
        Key("vocab_size", "vocab_size", 128112),
        Key("tie_word_embeddings", "tie_embeddings", True, TIES),
        *(replace(k, default=DEFAULTS.get(str(k.theirs), k.default)) if isinstance(k, Key) else k for k in SIZES),
        *SPECIAL,
        Counted("decoder_start_token_id", "bos_id", 2),
    ),
    names=names,
    derived=derived,
    sinusoids=("model.(encoder|decoder).embed_positions", "model.(encoder|decoder).embed_positions.weights"),
    ignored=("model.shared",),
    counts_tokens=True,
    untied_alike=True,
)
