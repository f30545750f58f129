"""Lines of config.json: each class reads one or more keys into fields of our config, and writes them back.

E.g. Key("hidden_size", "d_model", 768): the key hidden_size is our field d_model, by default 768.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_transformer.core.config import MOST_LAYERS

Values = dict[str, Any]

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
ACTIVATIONS |= {"swish": "silu", "gelu_python": "gelu"}
ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh")
"""{their word: ours}; if several mean the same, the first is written."""


def their_activation(ours: str) -> str:
    """The name of our activation in `transformers`, e.g. "gelu_pytorch_tanh" for "gelu_tanh"."""
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


class Given:
    """Values of config.json and generation_config.json; a key in neither has the default of `transformers`."""

    def __init__(self, config: Values, generation: Values, defaults: Values) -> None:
        self._files, self._defaults = (config, generation), defaults

    def value(self, key: str, default: Any) -> Any:
        """The key's value, or `default` if it is missing or null. Default "@other": the value of the key `other`."""
        values = (file[key] for file in self._files if file.get(key) is not None)
        return next(values, self.value(default[1:], self._defaults[default[1:]]) if _follows(default) else default)

    def values(self, key: str) -> list[Any]:
        """The key's values in both files, the first file's before; [] if it is missing, [None] if it is null."""
        found = [file[key] for file in self._files if key in file]
        return [value for value in found if value is not None] or found[:1]

    def is_null(self, key: str) -> bool:
        """Whether config.json has the key with the value null."""
        return self._files[0].get(key, key) is None

    def mistyped(self, key: str, default: Any) -> list[str]:
        """[problem] if value and default differ in type, else []."""
        while _follows(default):
            default = self._defaults[default[1:]]
        value = self.value(key, default)
        if isinstance(default, bool):
            fits, kind = isinstance(value, bool), "true or false"
        elif isinstance(default, int):
            fits, kind = isinstance(value, int) and not isinstance(value, bool), "a whole number"
        elif isinstance(default, float):
            fits, kind = isinstance(value, int | float) and not isinstance(value, bool), "a number"
        else:
            return []
        return [] if fits else [f"{key}={value!r:.60} must be {kind}"]


class Line(Protocol):
    """A line of config.json, or several that belong together."""

    @property
    def defaults(self) -> Values:
        """{key: value in `transformers` if it is missing}"""
        ...

    def read(self, theirs: Given, fields: Values) -> list[str]:
        """Set fields of our config from this line; return its problems."""
        ...

    def write(self, config: Any) -> Values:
        """{key: value} for a model of ours."""
        ...


@dataclass(frozen=True)
class Key:
    """A key of config.json and the field of our config with the same meaning, or several of each.

    E.g. Key("vocab_size", "vocab_size", 32128). With as many keys as fields, each key is one field; otherwise, and if
    values differ, `words` translates. A further field that follows from a key's value belongs in `Family.derived`.
    """

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    """E.g. "heads"; "decoder.heads" is the decoder's own value of that field."""
    default: Any
    """Value in `transformers` if the key is missing, a tuple for several keys; "@other": the value of key `other`."""
    words: Mapping[Any, Any] | None = None
    """{their value: ours}; if several mean the same, the first is written."""

    def __post_init__(self) -> None:
        theirs, ours = len(_several(self.theirs)), len(_several(self.ours))
        if theirs != ours and self.words is None:
            raise ValueError(f"Key {self.theirs!r}: {theirs} of theirs and {ours} of ours need words")

    @property
    def defaults(self) -> Values:
        return dict(zip(_several(self.theirs), _several(self.default), strict=True))

    def read(self, theirs: Given, fields: Values) -> list[str]:
        if problems := [p for key, default in self.defaults.items() for p in theirs.mistyped(key, default)]:
            return problems
        values = tuple(theirs.value(key, default) for key, default in self.defaults.items())
        value = values if isinstance(self.theirs, tuple) else values[0]
        if self.words is not None:
            if value not in list(self.words):
                if isinstance(self.ours, str):
                    fields[self.ours] = value  # a missing field would be a second problem
                wrong = " and ".join(f"{key}={x!r:.60}" for key, x in zip(self.defaults, values, strict=True))
                return [f"{wrong} is not one of {', '.join(map(str, self.words))}"]
            value = self.words[value]
        fields |= zip(_several(self.ours), value if isinstance(self.ours, tuple) else (value,), strict=True)
        return []

    def write(self, config: Any) -> Values:
        own = tuple(_field(config, name) for name in _several(self.ours))
        value: Any = own if isinstance(self.ours, tuple) else own[0]
        if self.words is not None:
            # If our value has no word, write one that `differences` refuses: reading it back gives another value or
            # a problem.
            unsaid = value if type(value) is type(self.default) else self.default
            value = next((theirs for theirs, ours in self.words.items() if ours == value), unsaid)
        return dict(zip(self.defaults, value if isinstance(self.theirs, tuple) else (value,), strict=True))


@dataclass(frozen=True)
class Fixed:
    """A constant key. If `checked`, another value is an error on import."""

    theirs: str
    value: Any
    checked: bool = True

    @property
    def defaults(self) -> Values:
        return {self.theirs: self.value}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        value = theirs.value(self.theirs, self.value)
        if problems := theirs.mistyped(self.theirs, self.value):
            return problems
        if not self.checked or value == self.value:
            return []
        if isinstance(value, bool):
            return [f"{self.theirs} is {'on' if value else 'off'}"]
        return [f"{self.theirs}={value!r:.60} is not {self.value!r}"]

    def write(self, config: Any) -> Values:
        return {self.theirs: self.value}


@dataclass(frozen=True)
class Also:
    """A second key for an integer field of ours, written for other readers of config.json; on import only its type is
    checked."""

    theirs: str
    ours: str

    @property
    def defaults(self) -> Values:
        return {self.theirs: 0}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        return theirs.mistyped(self.theirs, 0)

    def write(self, config: Any) -> Values:
        return {self.theirs: getattr(config, self.ours)}


@dataclass(frozen=True)
class Heads(Key):
    """A number of heads, which must divide d_model. Comes after d_model, and for the decoder after the encoder's."""

    def read(self, theirs: Given, fields: Values) -> list[str]:
        if problems := super().read(theirs, fields):
            return problems
        heads, width = fields[str(self.ours)], fields.get("d_model")
        as_usual = self.ours != "heads" and heads == fields.get("heads")
        if isinstance(width, int) and heads > 0 and width % heads and not as_usual:
            return [f"d_model={width} is not a multiple of {self.theirs}={heads}"]
        return []


@dataclass(frozen=True)
class TargetVocabulary(Key):
    """Size of the decoder's vocabulary, which must be the encoder's if they share embeddings. Comes after the tying.

    Version 4 of transformers creates both embeddings with the same size; version 5 loads two sizes.
    """

    def read(self, theirs: Given, fields: Values) -> list[str]:
        if problems := super().read(theirs, fields):
            return problems
        size, own = fields.get("source_vocab_size"), fields["vocab_size"]
        if fields.get("tie_embeddings") in ("all", "source-target") and own != size:
            return [f"{self.theirs}={own!r:.60} is not vocab_size={size!r:.60}, but both share"]
        return []


@dataclass(frozen=True)
class ScaledTie:
    """Whether T5's classifier is tied to the embedding, and whether its input is divided by sqrt(d_model).

    Sets `logit_scale` to 1.0 if it is divided, else None; `derived` of the family puts in the number. Versions of
    transformers differ; the file decides.
    """

    default: bool
    """Value of tie_word_embeddings if it is missing."""
    scale: str = ""
    """Key for the division, written since version 5, which ties every classifier missing from the file. Without this
    key, the input of a tied classifier is divided."""
    until_5: bool = False
    """Version 5 doesn't divide, so that transformers_version in the file decides."""

    @property
    def defaults(self) -> Values:
        scale = {self.scale: "@tie_word_embeddings"} if self.scale else {}
        return {"tie_word_embeddings": self.default, **scale, "transformers_version": ""}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        switches = {key: value for key, value in self.defaults.items() if key != "transformers_version"}
        if problems := [problem for key, default in switches.items() for problem in theirs.mistyped(key, default)]:
            return problems
        tied, *scaled = (theirs.value(key, default) for key, default in switches.items())
        version = str(theirs.value("transformers_version", "")).partition(".")[0]
        is_5 = version.isdecimal() and int(version[:3]) >= 5
        if tied and self.until_5 and not version:
            return ["tie_word_embeddings is on, and no transformers_version says what that means"]
        divides = scaled[0] if scaled else tied and not (self.until_5 and is_5)
        fields["tie_embeddings"] = "all" if tied else "source-target"
        fields["logit_scale"] = 1.0 if divides else None
        return []

    def write(self, config: Any) -> Values:
        values = {"tie_word_embeddings": config.tie_embeddings == "all", self.scale: config.logit_scale is not None}
        return {key: value for key, value in values.items() if key}


@dataclass(frozen=True)
class Special(Key):
    """The id of a token some models lack, e.g. [CLS]. Comes after vocab_size and pad_token_id.

    If the default is outside the vocabulary, or the id is padding's, the first id other than padding is used instead.
    """

    def read(self, theirs: Given, fields: Values) -> list[str]:
        problems, ours = super().read(theirs, fields), str(self.ours)
        size, pad = fields.get("vocab_size"), fields.get("pad_id")
        beyond = isinstance(size, int) and fields.get(ours) == self.default and self.default >= size
        if isinstance(pad, int) and (beyond or fields.get(ours) == pad):
            fields[ours] = next(id for id in (0, 1) if id != pad)
        return problems


@dataclass(frozen=True)
class Counted(Key):
    """The id of a start token, which must not be pad_token_id: that id has no position in this family. Comes after
    pad_token_id."""

    def read(self, theirs: Given, fields: Values) -> list[str]:
        if problems := super().read(theirs, fields):
            return problems
        id, pad = fields[str(self.ours)], fields.get("pad_id")
        return [f"{self.theirs}={id} is pad_token_id, which has no position"] if id == pad else []


@dataclass(frozen=True)
class PositionRows(Key):
    """Rows of a position table in which positions start at row pad_token_id + 1. Comes after pad_token_id."""

    def read(self, theirs: Given, fields: Values) -> list[str]:
        if problems := super().read(theirs, fields):
            return problems
        rows, pad = fields[str(self.ours)], fields.get("pad_id")
        if isinstance(pad, int) and rows <= pad + 1:
            return [f"{self.theirs}={rows} leaves no position behind pad_token_id={pad}"]
        fields[str(self.ours)] = rows - pad - 1 if isinstance(pad, int) else rows
        return []

    def write(self, config: Any) -> Values:
        return {str(self.theirs): config.max_positions + config.pad_id + 1}


PROBLEMS = {"several": "multi_label_classification", "scores": "regression"}
"""{field of our head: its problem_type}; without a problem_type, each text has one class."""
MOST_LABELS = 2**20


@dataclass(frozen=True)
class Architectures:
    """The class of an encoder, which determines its head, and the head's labels. Must be the last line of a family.

    A bare encoder has a pooler unless add_pooling_layer is false, a key that only we write.
    """

    heads: Mapping[str, Mapping[str, Any]]
    """{class: fields of our head}; a file without a class has the first. "@activation": the model's activation."""

    @property
    def defaults(self) -> Values:
        labels = dict(id2label=None, label2id={}, num_labels=2)
        return {"architectures": [next(iter(self.heads))], "add_pooling_layer": True, "problem_type": None, **labels}

    def read(self, theirs: Given, fields: Values) -> list[str]:
        values = {key: theirs.value(key, default) for key, default in self.defaults.items()}
        classes, labels, count = values["architectures"], values["id2label"], values["num_labels"]
        if labels is None:
            if theirs.mistyped("num_labels", 2) or not 1 <= count <= MOST_LABELS:
                return [f"num_labels={count!r:.60} must be a whole number from 1 to {MOST_LABELS}"]
            labels = {str(i): f"LABEL_{i}" for i in range(count)}
        name = classes[0] if isinstance(classes, list) and len(classes) == 1 else classes
        if name not in list(self.heads):
            return [f"architectures={classes!r:.80} is not one of {', '.join(self.heads)}"]
        head = self._head(name, fields.get("activation"))
        if head.get("kind") in ("classes", "token-classes"):
            places = [str(i) for i in range(len(labels))] if isinstance(labels, dict) else []
            if not places or set(places) != set(labels) or not all(isinstance(x, str) for x in labels.values()):
                return [f"id2label={labels!r:.60} must name each of its classes, from 0 on"]
            head |= {"labels": [labels[place] for place in places]}
            problem = values["problem_type"] if head["kind"] == "classes" else None
            head |= {own: True for own, name in PROBLEMS.items() if name == problem}
        if head.get("kind") == "pooled" and values["add_pooling_layer"] is False:
            head = {"kind": "hidden"}
        if head.get("kind") is not None:  # only a head over the vocabulary has a classifier to tie
            fields["tie_embeddings"] = "all"
        fields["head"] = head
        fields["output_bias"] = head.get("kind") not in ("hidden", "pooled")
        return []

    def write(self, config: Any) -> Values:
        kind, own = config.head.kind, {**config.head.to_dict(), "labels": []}
        own = {name: value for name, value in own.items() if name not in PROBLEMS}
        kinds = [name for name in self.heads if self.heads[name].get("kind", "vocabulary") == kind]
        same = [name for name in kinds if {**self._head(name, config.activation), "labels": []} == own]
        name = next(iter([*same, *kinds, *self.heads]))
        labels = {str(i): label for i, label in enumerate(config.head.labels)}
        ids = {label: int(i) for i, label in labels.items()}
        bare = {"add_pooling_layer": False} if kind == "hidden" else {}
        problem = next((value for field, value in PROBLEMS.items() if getattr(config.head, field)), None)
        extra = {} if problem is None else {"problem_type": problem}
        return {"architectures": [name], **bare, **extra, **({"id2label": labels, "label2id": ids} if labels else {})}

    def _head(self, name: str, activation: Any) -> Values:
        return {key: activation if value == "@activation" else value for key, value in self.heads[name].items()}


def _field(config: Any, name: str) -> Any:
    stack, _, own = name.rpartition(".")
    return getattr(config.of(stack) if stack else config, own)


def _follows(default: Any) -> bool:
    return isinstance(default, str) and default.startswith("@")


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


FULL, LOCAL = "full_attention", "sliding_attention"
WORDS = {**ACTIVATIONS, "tanh": "tanh"}


@dataclass(frozen=True)
class LocalLayers:
    """ModernBERT's layers with local attention, and the rotary bases of local and global layers.

    A local layer attends to local_attention / 2 keys on either side. Version 5 of transformers lists the layers
    (layer_types); in version 4 every n-th layer is global. If local_rope_theta is null, all layers have the global
    base. Comes after the number of layers.
    """

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
        if problems or not isinstance(layers, int) or layers > MOST_LAYERS:  # TransformerConfig refuses the latter two
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
    """ModernBERT's heads: a dense layer, an activation and a norm before the classifier, with keys of their own."""

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
