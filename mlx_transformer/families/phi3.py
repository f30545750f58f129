"""Phi-3, Phi-3.5 and Phi-4-mini (Abdin et al. 2024): Llama's network with joint matrices, and frequencies for texts up
to a length and beyond (longrope).
"""

from __future__ import annotations

from typing import Any

from .decoder_keys import ORIGINAL, Layers, Rotary, Specials, Unread, head_width
from .engine import QKV, At, joint
from .keys import Fixed, Key, Values
from .llama import ACTIVATION, LAYER, NO_BIAS, UNTIED, like_llama, names, sizes

OURS = "decoder.layers.*"


class LongRope(Rotary):
    """Version 4 takes three keys in rope_scaling, and the length beside it."""

    @property
    def defaults(self) -> Values:
        return {**super().defaults, ORIGINAL: 4096}

    def write(self, config: Any) -> Values:
        table = self.table(config)
        plain = table["rope_type"] == "default"
        old = {"type": table["rope_type"], **{key: table.get(key) for key in ("short_factor", "long_factor")}}
        length = {ORIGINAL: table[ORIGINAL]} if ORIGINAL in table else {}
        return {**super().write(config), "rope_scaling": None if plain else old, **length}


def of_phi(config: Any) -> dict[str, str | At]:
    c = config
    rows = dict(zip(QKV, (c.heads * c.d_k, c.key_value_heads * c.d_k, c.key_value_heads * c.d_v), strict=True))
    both = dict.fromkeys(("gate", "up"), c.d_ff)
    return {
        **joint(At(f"{LAYER}.self_attn.qkv_proj"), OURS + ".self_attention.{}_proj", rows),
        f"{OURS}.self_attention.output_proj": f"{LAYER}.self_attn.o_proj",
        **joint(At(f"{LAYER}.mlp.gate_up_proj"), OURS + ".feed_forward.{}_proj", both),
        f"{OURS}.feed_forward.down_proj": f"{LAYER}.mlp.down_proj",
        **names(config),
    }


PHI3 = like_llama(
    *("Phi-3", "phi3", "Phi3ForCausalLM", *sizes(32064, 3072, 8192, 32, 32, None, 4096, 1e-5), head_width()),
    *(ACTIVATION, LongRope(), Layers(lambda i, keys: True, None, listed=False), UNTIED, Specials(1, 32000, 32000)),
    *(Key("resid_pdrop", "dropout", 0.0), Fixed("embd_pdrop", 0.0, checked=False), Unread()),
    ours=NO_BIAS,
    names=of_phi,
)
