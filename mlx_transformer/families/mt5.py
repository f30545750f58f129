"""mT5 (Xue et al. 2021) and mT0: T5 1.1 with other defaults."""

from __future__ import annotations

from dataclasses import replace

from .keys import Key, ScaledTie
from .t5 import SIZES, T5

DEFAULTS = dict(vocab_size=250112, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu")

MT5 = replace(
    T5,
    name="mT5",
    model_type="mt5",
    architecture="MT5ForConditionalGeneration",
    keys=(
        *(replace(k, default=DEFAULTS.get(str(k.theirs), k.default)) if isinstance(k, Key) else k for k in SIZES),
        ScaledTie(False, until_5=True),
    ),
)
