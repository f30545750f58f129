"""umT5 (Chung et al. 2023): mT5 with a table of relative positions in each layer.

Version 5 of `transformers` takes every umT5 for tied, and keeps apart whether the classifier's input is divided by
sqrt(d_model). Files of version 4, as the published models have, are read as version 4 computes them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .engine import At
from .keys import ScaledTie
from .mt5 import MT5
from .t5 import BOTH, names


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
