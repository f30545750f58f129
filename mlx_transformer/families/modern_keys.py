"""Lines of ModernBERT's config.json: which layers see near keys alone, and what heads are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_transformer.core.config import MOST_LAYERS

from .keys import ACTIVATIONS, Architectures, Given, Values

FULL, LOCAL = "full_attention", "sliding_attention"
WORDS = {**ACTIVATIONS, "tanh": "tanh"}


@dataclass(frozen=True)
class LocalLayers:
    """Layers that see half of local_attention to either side, and the bases by which they and the others turn; read
    after the number of layers. Version 5 lists the layers, version 4 says that every n-th sees all; with a
    local_rope_theta of null all turn alike there."""

    @property
    def defaults(self) -> Values:
        numbers = dict(global_attn_every_n_layers=3, local_attention=128)
        bases = dict(global_rope_theta=160000.0, local_rope_theta=10000.0)
        return {**numbers, **bases, "layer_types": None, "rope_parameters": None, "rope_scaling": None}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        if problems := [p for key, default in self.defaults.items() for p in theirs.mistyped(key, default)]:
            return problems
        values = {key: theirs.value(key, default) for key, default in self.defaults.items()}
        every, wide, layers = (
            values["global_attn_every_n_layers"],
            values["local_attention"],
            fields.get("encoder_layers"),
        )
        problems = [f"rope_scaling={values['rope_scaling']!r:.60} is not read"] * (values["rope_scaling"] is not None)
        problems += [f"global_attn_every_n_layers={every} must be at least 1"] * (every < 1)
        problems += [f"local_attention={wide} must be at least 2"] * (wide < 2)
        bases = {FULL: values["global_rope_theta"], LOCAL: values["local_rope_theta"]}
        bases[LOCAL] = bases[FULL] if theirs.is_null("local_rope_theta") else bases[LOCAL]
        rope = values["rope_parameters"] or {}
        for kind, own in rope.items() if isinstance(rope, dict) else [("", rope)]:
            if kind not in bases or not isinstance(own, dict) or own.get("rope_type", "default") != "default":
                problems.append(f"rope_parameters: {kind}={own!r:.60} is no default of {FULL} or {LOCAL}")
            else:
                bases[kind] = own.get("rope_theta", bases[kind])
        types = values["layer_types"]
        if (
            layers is not None
            and types is not None
            and not (isinstance(types, list) and len(types) == layers and all(x in (FULL, LOCAL) for x in types))
        ):
            problems.append(f"layer_types={types!r:.60} must name {FULL} or {LOCAL} for each of {layers} layers")
        if problems or not isinstance(layers, int) or layers > MOST_LAYERS:  # which the config refuses
            return problems
        types = types or [LOCAL if i % every else FULL for i in range(layers)]
        local = {"window": wide // 2, "rotary_base": bases[LOCAL]}
        fields["rotary_base"] = bases[FULL]
        fields["layer_pattern"] = [local if kind == LOCAL else {} for kind in types]
        return []

    def write(self, config: Any) -> Values:
        each = config.layers("encoder")
        near = [c for c in each if c.window is not None]
        types = [FULL if c.window is None else LOCAL for c in each]
        bases = {"global_rope_theta": config.rotary_base}
        bases |= {"local_rope_theta": near[0].rotary_base, "local_attention": 2 * near[0].window} if near else {}
        for every in range(1, len(types) + 1):
            if types == [LOCAL if i % every else FULL for i in range(len(types))]:
                return {"global_attn_every_n_layers": every, **bases}
        return {"layer_types": types, **bases}


@dataclass(frozen=True)
class ModernHead(Architectures):
    """Heads behind a dense layer, an activation and a norm, which keys of their own describe."""

    @property
    def defaults(self) -> Values:
        own = dict(classifier_activation="gelu", classifier_bias=False, classifier_pooling="cls", decoder_bias=True)
        return {**super().defaults, **own}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        values = {key: theirs.value(key, default) for key, default in self.defaults.items()}
        problems = super().read(theirs, fields)
        problems += [p for key in ("classifier_bias", "decoder_bias") for p in theirs.mistyped(key, self.defaults[key])]
        pooling, activation = values["classifier_pooling"], values["classifier_activation"]
        problems += [f"classifier_pooling={pooling!r:.60} is not one of cls, mean"] * (pooling not in ("cls", "mean"))
        known = activation in list(WORDS)
        problems += [] if known else [f"classifier_activation={activation!r:.60} is not one of {', '.join(WORDS)}"]
        if problems or fields["head"].get("kind") == "hidden":
            return problems
        fields["head"] |= {"activation": WORDS[activation], "norm": True, "bias": values["classifier_bias"]}
        if fields["head"].get("kind") == "classes":
            fields["head"]["pooling"] = {"cls": "first", "mean": "mean"}[pooling]
        if "kind" not in fields["head"]:
            fields["output_bias"] = values["decoder_bias"]
        return []

    def write(self, config: Any) -> Values:
        head = config.head
        words = {ours: theirs for theirs, ours in reversed(WORDS.items())}
        return {
            **super().write(config),
            "classifier_activation": words[head.activation or "gelu"],
            "classifier_bias": head.bias and head.activation is not None,
            "classifier_pooling": "mean" if head.pooling == "mean" else "cls",
            "decoder_bias": config.output_bias or head.kind != "vocabulary",
        }
