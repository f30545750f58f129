"""SmolLM3 (Bakouch et al. 2025): Llama's network, in which some layers have no positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .decoder_keys import Layers, Rotary, Specials, Unread, head_width
from .keys import Given, Values
from .llama import ACTIVATION, BIASES, TIED, like_llama, sizes


@dataclass(frozen=True)
class Unturned:
    """SmolLM3's layers without rotation: 0 in no_rope_layers, by default every n-th. Comes after their number."""

    @property
    def defaults(self) -> Values:
        return dict(no_rope_layers=None, no_rope_layer_interval=4)

    def read(self, theirs: Given, fields: Values) -> list[str]:
        layers, every = fields.get("decoder_layers"), theirs.value("no_rope_layer_interval", 4)
        turned = theirs.value("no_rope_layers", None)
        if problems := theirs.mistyped("no_rope_layer_interval", 4):
            return problems
        if not isinstance(layers, int) or not 0 <= layers <= 1000:
            return []
        turned = [int((i + 1) % max(every, 1) != 0) for i in range(layers)] if turned is None else turned
        if not isinstance(turned, list) or len(turned) != layers or not all(x in (0, 1) for x in turned):
            return [f"no_rope_layers={turned!r:.60} must be 0 or 1 for each of {layers} layers"]
        fields["layer_pattern"] = [{} if x else {"positions": "none"} for x in turned]
        return []

    def write(self, config: Any) -> Values:
        return dict(no_rope_layers=[int(layer.positions == "rotary") for layer in config.layers("decoder")])


SMOLLM3 = like_llama(
    *("SmolLM3", "smollm3", "SmolLM3ForCausalLM", *sizes(128256, 2048, 11008, 36, 16, 4, 32768, 1e-6), head_width()),
    *(ACTIVATION, Rotary(2e6), *BIASES, TIED, Unturned()),
    *(Layers(lambda i, keys: "positions" in keys, None, switched=True), Specials(128000, 128001, 128004), Unread()),
)
