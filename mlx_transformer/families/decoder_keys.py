"""Keys of config.json that decoders share: sizes that may be null, rotary positions, and ids of special tokens."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_transformer.core.config import MOST_LAYERS

from .keys import FULL, LOCAL, Given, Values


@dataclass(frozen=True)
class Implied:
    """A size that, if it is null, follows from sizes listed before it.

    E.g. Implied("num_key_value_heads", ("key_value_heads",), 8, lambda fields: fields["heads"]).
    """

    theirs: str
    ours: tuple[str, ...]
    default: int | None
    """Value in `transformers` if the key is missing."""
    follows: Callable[[Values], int]

    @property
    def defaults(self) -> Values:
        return {self.theirs: self.default}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        value = None if theirs.is_null(self.theirs) else theirs.value(self.theirs, self.default)
        if value is None:
            try:
                value = self.follows(fields)
            except (KeyError, TypeError, ZeroDivisionError):  # the other line has told the problem
                return []
        elif problems := theirs.mistyped(self.theirs, 0):
            return problems
        fields |= dict.fromkeys(self.ours, value)
        return []

    def write(self, config: Any) -> Values:
        return {self.theirs: getattr(config, self.ours[0])}


def heads_of_keys(default: int | None) -> Implied:
    return Implied("num_key_value_heads", ("key_value_heads",), default, lambda fields: fields["heads"])


def head_width(default: int | None = None) -> Implied:
    return Implied("head_dim", ("d_k", "d_v"), default, lambda fields: fields["d_model"] // fields["heads"])


@dataclass(frozen=True)
class Specials:
    """The ids of a decoder's start, end and padding tokens. Comes after vocab_size.

    Each may be missing or outside the vocabulary. Our config needs all three:

    end        the first end token, or the last id
    start      the end, if there is no start token or if it is also an end token, as in Qwen
    padding    the start, if there is no padding token or if it is an end token; if that is an end token, too, `spare`,
               else the last id that isn't an end token

    Padding is never generated, nor is a start token that isn't the end token.
    """

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    """Values in `transformers` if the keys are missing."""
    spare: int = -1
    """An id that no text contains, e.g. that of a byte that UTF-8 never has; -1: the last id."""

    @property
    def defaults(self) -> Values:
        return dict(bos_token_id=self.bos, eos_token_id=self.eos, pad_token_id=self.pad)

    def read(self, theirs: Given, fields: Values) -> list[str]:
        size, ids, problems = fields.get("vocab_size"), dict[str, list[int]](), list[str]()
        for key, default in self.defaults.items():
            values = theirs.values(key) or [default]
            each = [id for value in values for id in (value if isinstance(value, list) else [value]) if id is not None]
            wrong = [id for id in each if type(id) is not int]
            problems += [f"{key}={wrong[0]!r:.60} must be a whole number"] if wrong else []
            ids[key] = [id for id in each if not wrong and isinstance(size, int) and 0 <= id < size]
        if problems or not isinstance(size, int) or size < 2:
            return problems
        start, ends, padding = ids.values()
        eos = (ends or [size - 1])[0]
        bos = next((id for id in start[:1] if id not in ends), eos)
        likely = [*padding, bos, self.spare % size, size - 1, size - 2, *range(min(size, len(ends) + 2))]
        pad = next((id for id in likely if id not in (eos, *ends)), likely[0])
        fields |= dict(bos_id=bos, eos_id=eos, pad_id=pad)
        return []

    def write(self, config: Any) -> Values:
        return dict(bos_token_id=config.bos_id, eos_token_id=config.eos_id, pad_token_id=config.pad_id)


ORIGINAL = "original_max_position_embeddings"
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": None},
    "llama3": {"factor": None, "low_freq_factor": None, "high_freq_factor": None},
    "yarn": {"factor": None, "beta_fast": 32, "beta_slow": 1, "truncate": True},
    "longrope": {"short_factor": None, "long_factor": None},
}
"""{rope_type: {its key: default, or None if it is required}}"""
OURS = {"low_freq_factor": "low", "high_freq_factor": "high", "short_factor": "short", "long_factor": "long"}
OURS |= {ORIGINAL: "length"}
MORE = {"linear": (), "llama3": (ORIGINAL,)}
"""{rope_type: further optional keys}; other types have the original length and attention_factor."""


@dataclass(frozen=True)
class Rotary:
    """Rotary positions, in both forms of transformers: rope_theta and rope_scaling, or since version 5 rope_parameters
    with the keys of both. Both forms are written. Comes after the width of heads."""

    base: float = 10000.0
    kind: str = "rope_type"
    """The key of the kind in rope_scaling; in its older form, "type" and factor, some classes of version 4 want it."""

    @property
    def defaults(self) -> Values:
        tables = dict(rope_scaling=None, rope_parameters=None)
        return {"rope_theta": self.base, **tables, "partial_rotary_factor": 1.0, ORIGINAL: None}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        tables = {key: theirs.value(key, None) or {} for key in ("rope_scaling", "rope_parameters")}
        if wrong := [key for key, table in tables.items() if not isinstance(table, dict)]:
            return [f"{key}={tables[key]!r:.60} must be an object" for key in wrong]
        numbers = {key: self.defaults[key] for key in ("rope_theta", "partial_rotary_factor")}
        if problems := [problem for key, default in numbers.items() for problem in theirs.mistyped(key, default)]:
            return problems
        table = {key: theirs.value(key, default) for key, default in numbers.items()}
        own, problems = self.turned(table | tables["rope_scaling"] | tables["rope_parameters"], theirs, fields)
        fields |= own
        return problems

    def turned(self, table: Values, theirs: Given, fields: Values) -> tuple[Values, list[str]]:
        """Convert a table of rotary positions to (fields, problems)."""
        kind, width = table.get("rope_type", table.get("type")), fields.get("d_k")
        numbers = [table["rope_theta"], table["partial_rotary_factor"], width]
        if not all(isinstance(number, int | float) for number in numbers):
            return {}, [f"rope_theta={numbers[0]!r:.60} and partial_rotary_factor={numbers[1]!r:.60} must be numbers"]
        own: Values = {"rotary_base": numbers[0]}
        if (part := int(numbers[2] * numbers[1])) != width:
            own["rotary_width"] = part
        if kind in (None, "default"):
            return own, []
        kind = {"su": "longrope"}.get(kind, kind) if isinstance(kind, str) else kind
        if kind not in [*SCALINGS]:
            return own, [f"rope_type={kind!r:.60} is not one of default, {', '.join(SCALINGS)}"]
        of_kind = {key: table.get(key, default) for key, default in SCALINGS[kind].items()}
        if lacking := [key for key, value in of_kind.items() if value is None]:
            return own, [f"rope_type {kind} needs {', '.join(lacking)}"]
        more = MORE.get(kind, (ORIGINAL, "attention_factor"))
        if ORIGINAL in more:
            of_kind[ORIGINAL] = theirs.value(ORIGINAL, table.get(ORIGINAL)) or fields.get("max_positions")
        own["rotary_scaling"] = {"kind": kind, **{OURS.get(key, key): value for key, value in of_kind.items()}}
        if "attention_factor" in more:
            try:
                factor = table.get("attention_factor") or _attention_factor(kind, table, of_kind, fields)
            except (TypeError, ValueError, ZeroDivisionError):
                return own, [f"rope_type {kind}: its numbers must be above 0"]
            own["rotary_scaling"]["attention_factor"] = factor
        return own, []

    def write(self, config: Any) -> Values:
        table = self.table(config)
        base, plain = table["rope_theta"], table["rope_type"] == "default"
        others = {key: value for key, value in table.items() if key not in ("rope_type", "rope_theta")}
        scaling = None if plain else {self.kind: table["rope_type"], **others}
        part = {key: table[key] for key in ("partial_rotary_factor",) if key in table}
        return {"rope_theta": base, **part, "rope_scaling": scaling, "rope_parameters": table}

    def table(self, config: Any) -> Values:
        """The contents of rope_parameters."""
        theirs = {ours: key for key, ours in OURS.items()}
        numbers = {theirs.get(key) or key: _plain(x) for key, x in config.rotary_scaling.items() if key != "kind"}
        kind, part = config.rotary_scaling.get("kind", "default"), config.rotary_width
        share = {} if part is None else {"partial_rotary_factor": part / config.d_k}
        return {"rope_type": kind, "rope_theta": config.rotary_base, **share, **numbers}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _attention_factor(kind: str, table: Values, numbers: Values, fields: Values) -> float:
    """The default factor of cosines and sines, from the papers."""
    length, factor = numbers[ORIGINAL], table.get("factor")
    factor = fields["max_positions"] / length if factor is None else factor
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(length))
    first, second = table.get("mscale") or 0, table.get("mscale_all_dim") or 0
    first, second = (first, second) if first and second else (1, 0)
    return (0.1 * first * math.log(factor) + 1) / (0.1 * second * math.log(factor) + 1)


@dataclass(frozen=True)
class Layers:
    """The layers with local attention (layer_types), in which a query sees `sliding_window` keys, its own included.
    Comes after the number of layers."""

    local: Callable[[int, Values], bool]
    """(i, values of `keys` and fields) -> whether layer i is local, if the file doesn't list the layers."""
    default: int | None = 4096
    """sliding_window if it is missing."""
    switched: bool = False
    """Windows also need use_sliding_window to be true."""
    listed: bool = True
    """The family knows layer_types."""
    keys: tuple[tuple[str, Any], ...] = ()

    @property
    def defaults(self) -> Values:
        switch = {"use_sliding_window": False} if self.switched else {}
        return {"sliding_window": self.default, **switch, **dict(self.keys)} | dict(layer_types=None)

    def read(self, theirs: Given, fields: Values) -> list[str]:
        problems = [p for key, default in self.defaults.items() for p in theirs.mistyped(key, default)]
        layers = fields.get("decoder_layers")
        if problems or not isinstance(layers, int) or layers > MOST_LAYERS:  # TransformerConfig refuses the latter two
            return problems
        width = None if theirs.is_null("sliding_window") else theirs.value("sliding_window", self.default)
        width = None if self.switched and not theirs.value("use_sliding_window", False) else width
        if width is not None and type(width) is not int:
            return [f"sliding_window={width!r:.60} must be a whole number"]
        types = theirs.value("layer_types", None) if self.listed else None
        if types is not None and not (isinstance(types, list) and all(kind in (FULL, LOCAL) for kind in types)):
            return [f"layer_types={types!r:.60} must name {FULL} or {LOCAL} for each of {layers} layers"]
        if types is not None and len(types) != layers:
            return [f"layer_types has {len(types)} entries, for {layers} layers"]
        values = {key: theirs.value(key, default) for key, default in self.keys}
        before = fields.get("layer_pattern", [{}] * layers)
        try:
            local = [self.local(i, values | before[i]) if types is None else types[i] == LOCAL for i in range(layers)]
        except (TypeError, LookupError, ZeroDivisionError):
            return [f"{', '.join(f'{key}={value!r:.60}' for key, value in values.items())} fit no {layers} layers"]
        if types is not None and width is None and any(local):
            return [f"layer_types has {LOCAL}, and sliding_window is {'off' if self.switched else 'null'}"]
        own = [{"window": width} if is_local and width is not None else {} for is_local in local]
        fields["layer_pattern"] = [{**a, **b} for a, b in zip(before, own, strict=True)]
        return []

    def write(self, config: Any) -> Values:
        each = [layer.window for layer in config.layers("decoder")]
        width = next((window for window in each if window is not None), None)
        types = {"layer_types": [FULL if window is None else LOCAL for window in each]} if self.listed else {}
        switch = {"use_sliding_window": width is not None} if self.switched else {}
        return {"sliding_window": width, **switch, **types}


def uniform(fields: Values) -> Values:
    """Move fields with equal values in all layers to the stack."""
    pattern = fields.pop("layer_pattern", None) or [{}]
    same = {name: value for name, value in pattern[0].items() if all(layer.get(name) == value for layer in pattern)}
    return {**fields, **same, "layer_pattern": pattern}


@dataclass(frozen=True)
class Factor:
    """A number that may be null, or whose `neutral` value stands for an unset field of ours."""

    theirs: str
    ours: str
    default: float | None
    """Value in `transformers` if the key is missing."""
    neutral: float | None = None
    power: float = 1
    """Our value is theirs to this power, e.g. -1 for a divisor."""

    @property
    def defaults(self) -> Values:
        return {self.theirs: self.default}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        value = None if theirs.is_null(self.theirs) else theirs.value(self.theirs, self.default)
        if value is not None and (type(value) not in (int, float) or value <= 0):
            return [f"{self.theirs}={value!r:.60} must be a number above 0"]
        fields[self.ours] = None if value in (None, self.neutral) else value**self.power
        return []

    def write(self, config: Any) -> Values:
        value = getattr(config, self.ours)
        if value is None:
            return {self.theirs: self.neutral}
        exact = value ** (1 / self.power)
        plain = next((x for x in (round(exact), round(exact, 6)) if x and x**self.power == value), exact)
        return {self.theirs: float(plain) if isinstance(self.default, float) else plain}  # version 5 wants its own type


@dataclass(frozen=True)
class Divisors:
    """Divisors of GPT-2's scores: the square root of a head's width, if its key is set; with the second key also the
    layer's number, from 1."""

    @property
    def defaults(self) -> Values:
        return dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)

    def read(self, theirs: Given, fields: Values) -> list[str]:
        rooted, numbered = (theirs.value(key, default) for key, default in self.defaults.items())
        problems = [problem for key, default in self.defaults.items() for problem in theirs.mistyped(key, default)]
        sizes: list[Any] = [fields.get(name) for name in ("d_model", "heads", "decoder_layers")]
        if problems or not all(type(size) is int and 0 < size <= 2**16 for size in sizes):
            return problems
        width, heads, layers = sizes
        fields["attention_scale"] = None if rooted else 1.0
        if numbered:
            first = max(width // heads, 1) ** -0.5 if rooted else 1.0
            fields["layer_pattern"] = [{"attention_scale": first / (i + 1)} for i in range(min(layers, MOST_LAYERS))]
        return []

    def write(self, config: Any) -> Values:
        scales = [layer.attention_scale for layer in config.layers("decoder")]
        numbered = None not in scales and scales == [scales[0] / (i + 1) for i in range(len(scales))]
        rooted = config.attention_scale is None
        return dict(zip(self.defaults, (rooted, numbered and (rooted or len(scales) > 1)), strict=True))


class TwoBases(Rotary):
    """Rotary positions whose local layers have another base, without scaling: rope_local_base_freq, or since version 5
    a table for each kind of layer in rope_parameters. Comes after `Layers`."""

    @property
    def defaults(self) -> Values:
        return {**super().defaults, "rope_local_base_freq": 10000.0}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        rope = theirs.value("rope_parameters", None) or {}
        if wrong := [key for key in rope if key not in (FULL, LOCAL) or not isinstance(rope[key] or {}, dict)]:
            return [f"rope_parameters: {wrong[0]!r:.60} is not a table of {FULL} or {LOCAL}"]
        scaling = theirs.value("rope_scaling", None) or {}
        bases = {FULL: ("rope_theta", self.base), LOCAL: ("rope_local_base_freq", 10000.0)}
        own, problems = dict[str, Values](), list[str]()
        for kind, (key, default) in bases.items():
            table = {"rope_theta": theirs.value(key, default), "partial_rotary_factor": 1.0}
            table |= (scaling if kind == FULL and isinstance(scaling, dict) else {}) | (rope.get(kind) or {})
            own[kind], found = self.turned(table, theirs, fields)
            problems += [f"{kind}: {problem}" for problem in found]
        local = {"rotary_scaling": {}, **own[LOCAL]}
        fields |= own[FULL]
        pattern = fields.get("layer_pattern", [])
        fields["layer_pattern"] = [{**layer, **local} if "window" in layer else layer for layer in pattern]
        return problems

    def write(self, config: Any) -> Values:
        layers = config.layers("decoder")
        near = next((layer for layer in layers if layer.window is not None), config)
        far = next((layer for layer in layers if layer.window is None), config)
        tables = {LOCAL: self.table(near), FULL: self.table(far)}
        one = super().write(far)
        return {**one, "rope_local_base_freq": near.rotary_base, "rope_parameters": tables}


@dataclass(frozen=True)
class RoundedRoot:
    """The factor sqrt(d_model) of embeddings, rounded to the weights' type (dtype, before version 5 torch_dtype)."""

    @property
    def defaults(self) -> Values:
        return dict(dtype=None, torch_dtype=None)

    def read(self, theirs: Given, fields: Values) -> list[str]:
        kind, width = theirs.value("dtype", theirs.value("torch_dtype", "float32")), fields.get("d_model")
        if isinstance(width, int) and 0 < width <= 2**16:
            root = _rounded(width**0.5, str(kind).removeprefix("torch."))
            fields["embedding_scale"] = None if root == width**0.5 else root
        return []

    def write(self, config: Any) -> Values:
        root = config.d_model**0.5
        kinds = [kind for kind in ("bfloat16", "float16") if _rounded(root, kind) == config.embedding_scale]
        return {"torch_dtype": kinds[0], "dtype": kinds[0]} if kinds else {}


def _rounded(number: float, kind: str) -> float:
    """Round to bfloat16 or float16; for other types the number itself."""
    if kind == "float16":
        return struct.unpack("<e", struct.pack("<e", number))[0]
    if kind != "bfloat16":
        return number
    bits = int.from_bytes(struct.pack(">f", number))
    return struct.unpack(">f", (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).to_bytes(4))[0]


UNREAD = "num_experts num_local_experts n_routed_experts attn_logit_softcapping final_logit_softcapping logit_scale "
UNREAD += "attention_multiplier residual_multiplier embedding_multiplier logits_scaling scale_emb scale_depth clip_qkv "
UNREAD += "use_mrope use_cla attention_sinks num_kv_shared_layers attn_temperature_tuning parallel_attn layer_scale"


@dataclass(frozen=True)
class Unread:
    """Keys that change a model's computation in some families, and are refused in families that don't read them."""

    known: tuple[str, ...] = ()
    """Keys that the family reads."""

    @property
    def defaults(self) -> Values:
        return {}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        values = {key: theirs.value(key, None) for key in UNREAD.split() if key not in self.known}
        said = {key: value for key, value in values.items() if value not in (None, False, 0, [])}
        # One expert is a plain feed-forward net.
        wrong = [key for key, value in said.items() if value != 1 or not key.endswith("experts")]
        return [f"{key}={said[key]!r:.60} is not read" for key in wrong]

    def write(self, config: Any) -> Values:
        return {}
