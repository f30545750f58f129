"""Keys of config.json: what each line of it means among the fields of our config, read and written; and words that
several families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Values = dict[str, Any]

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
ACTIVATIONS |= {"swish": "silu", "gelu_python": "gelu"}
ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh")
"""{their word: ours}; of several for one of ours the first is written."""


def their_activation(ours: str) -> str:
    """Return the word of `transformers` for an activation of ours."""
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


class Given:
    """The values of a folder's two files; a key that neither has is as their library takes it to be."""

    def __init__(self, config: Values, generation: Values, defaults: Values) -> None:
        self._files, self._defaults = (config, generation), defaults

    def value(self, key: str, default: Any) -> Any:
        """Return the key's value; null is as missing. `default` "@other": what the key `other` has."""
        values = (file[key] for file in self._files if file.get(key) is not None)
        return next(values, self.value(default[1:], self._defaults[default[1:]]) if _follows(default) else default)

    def is_null(self, key: str) -> bool:
        """Return whether config.json has the key, with null."""
        return self._files[0].get(key, key) is None

    def mistyped(self, key: str, default: Any) -> list[str]:
        """Return the problem that the value is of another kind than the default, or none."""
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
    """One line of config.json (or several that belong together), read and written."""

    @property
    def defaults(self) -> Values:
        """The values that their library takes where a key is missing."""
        ...

    def read(self, theirs: Given, fields: Values) -> list[str]:
        """Put what it says into the fields of our config; returns what is wrong with it."""
        ...

    def write(self, config: Any) -> Values:
        """Return the line of a model of ours."""
        ...


@dataclass(frozen=True)
class Key:
    """A key of config.json (or several) and a field of ours (or several) that mean the same; "decoder.heads": that
    of the decoder. As many of theirs as of ours are the same one by one; of other numbers, and where values have other
    names, `words` says which mean which. A field that has a key's value, or what follows from it, beside another field
    is `derived` (`Family`)."""

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    default: Any
    """The value that their library takes where the key is missing, of each of several; "@other": what the key `other`
    has."""
    words: Mapping[Any, Any] | None = None
    """{their value: ours}; of several for one of ours the first is written."""

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
                    fields[self.ours] = value  # so that nothing else is said of it
                wrong = " and ".join(f"{key}={x!r:.60}" for key, x in zip(self.defaults, values, strict=True))
                return [f"{wrong} is not one of {', '.join(map(str, self.words))}"]
            value = self.words[value]
        fields |= zip(_several(self.ours), value if isinstance(self.ours, tuple) else (value,), strict=True)
        return []

    def write(self, config: Any) -> Values:
        own = tuple(_field(config, name) for name in _several(self.ours))
        value: Any = own if isinstance(self.ours, tuple) else own[0]
        if self.words is not None:
            # A value without a word can't be said. It is read back as another value, or is no word, and so refused.
            unsaid = value if type(value) is type(self.default) else self.default
            value = next((theirs for theirs, ours in self.words.items() if ours == value), unsaid)
        return dict(zip(self.defaults, value if isinstance(self.theirs, tuple) else (value,), strict=True))


@dataclass(frozen=True)
class Fixed:
    """A key of which the family has one value: written, and with another one, where it is `checked`, refused."""

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
    """A whole number of ours that has a second key, for others who read config.json: written, and of the right kind."""

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
    """A count of heads that share d_model, which is read before; so are the encoder's."""

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
    """The size of the decoder's vocabulary, read after which embeddings are shared: one that both share has one size.

    Version 4 of transformers makes both embeddings of one size; version 5 loads two.
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
    """Whether T5's classifier is the embedding, and whether what it reads is divided by sqrt(d_model).

    It says of the field `logit_scale` whether there is one; the number is `derived`. Where the versions of transformers
    differ, the file decides.
    """

    default: bool
    """How tie_word_embeddings is read and written."""
    scale: str = ""
    """The key that says whether it is divided, since version 5, which ties whatever is not stored twice; where it is
    missing, a classifier that is tied is."""
    until_5: bool = False
    """Version 5 no longer divides: its number in the file says whose logits are meant."""

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
    """The id of a token that config.json need not have, read after vocab_size and pad_token_id: where it is beyond a
    vocabulary without the usual one, or padding's, the first token but padding stands for it."""

    def read(self, theirs: Given, fields: Values) -> list[str]:
        problems, ours = super().read(theirs, fields), str(self.ours)
        size, pad = fields.get("vocab_size"), fields.get("pad_id")
        beyond = isinstance(size, int) and fields.get(ours) == self.default and self.default >= size
        if isinstance(pad, int) and (beyond or fields.get(ours) == pad):
            fields[ours] = next(id for id in (0, 1) if id != pad)
        return problems


@dataclass(frozen=True)
class Counted(Key):
    """The id of a token that begins a text where padding's id has no position, whatever it stands for; read after
    pad_token_id."""

    def read(self, theirs: Given, fields: Values) -> list[str]:
        if problems := super().read(theirs, fields):
            return problems
        id, pad = fields[str(self.ours)], fields.get("pad_id")
        return [f"{self.theirs}={id} is pad_token_id, which has no position"] if id == pad else []


@dataclass(frozen=True)
class PositionRows(Key):
    """The rows of a table of positions whose first that is read is after that of padding's number, read before."""

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
"""{field of our head: the problem_type that says so}; without one a text is in one class."""
MOST_LABELS = 2**20


@dataclass(frozen=True)
class Architectures:
    """Which class an encoder is of, which says what its head is, and the head's labels; the last line of a family.

    A class of the bare encoder has a pooler, unless add_pooling_layer is off, which is our word in its config.json.
    """

    heads: Mapping[str, Mapping[str, Any]]
    """{class: the fields of our head}; the first is that of a file that names none. "@activation": the model's own."""

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
        if head.get("kind") is not None:  # logits of words alone may be tied
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
