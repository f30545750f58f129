"""`TransformerConfig`: a frozen, validated description of a model, from which both MLX and ONNX models are built.

Source: "Attention Is All You Need" (Vaswani et al., 2017), section 3 and table 3. Defaults are the paper's choices; the
other values are needed by later published models, such as T5, BERT or Qwen3. `PRESETS` has common sizes by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, cast

from mlx_transformer.page import table
from mlx_transformer.system.errors import Text, UserError, first_of
from mlx_transformer.system.fields import Bounds, check_fields, field_types, unknown_keys
from mlx_transformer.system.files import parse_json

from .heads import VOCABULARY, Head
from .relations import RELATIVE as RELATIVE
from .relations import SINUSOIDS as SINUSOIDS
from .relations import relations, scaling_problems

# Heads are 64 wide except in student, as Metal has no fused attention for 32. base and big are rows of the paper's
# table 3; student is Marian's "tiny", which Marian's own engines can run.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(encoder_layers=2, decoder_layers=2, d_model=128, heads=2, d_ff=512, dropout=0.1),
    "small": dict(encoder_layers=3, decoder_layers=3, d_model=256, heads=4, d_ff=1024, dropout=0.1),
    "base": dict(encoder_layers=6, decoder_layers=6, d_model=512, heads=8, d_ff=2048, dropout=0.1),
    "big": dict(encoder_layers=6, decoder_layers=6, d_model=1024, heads=16, d_ff=4096, dropout=0.3),
    "student": dict(
        encoder_layers=6,
        decoder_layers=2,
        d_model=256,
        heads=8,
        d_ff=1536,
        dropout=0.1,
        decoder_self_attention="ssru",
        norm_placement="post",
        norm_epsilon=1e-6,
        attention_bias=True,
        output_bias=True,
        positions="sinusoidal_concat",
    ),
}


Architecture = Literal["encoder-decoder", "encoder", "decoder"]
KINDS = {"encoder-decoder": "an encoder with a decoder", "encoder": "an encoder alone", "decoder": "a decoder alone"}
"""{architecture: its name in errors}"""
NormPlacement = Literal["post", "pre", "sandwich", "after"]
Norm = Literal["layernorm", "rmsnorm"]
QueryKeyNormPlace = Literal["before", "after", "width"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Positions = Literal[
    "sinusoidal", "sinusoidal_halves", "sinusoidal_concat", "learned", "rotary", "relative", "relative_layers", "none"
]
DecoderSelfAttention = Literal["attention", "ssru"]
TieEmbeddings = Literal["none", "target-output", "source-target", "all"]

# Larger than in any model, but small enough that a damaged config can't fill the memory.
Width = Annotated[int, Bounds(at_least=1, at_most=2**16)]
Length = Annotated[int, Bounds(at_least=1, at_most=2**20)]
MOST_LAYERS = 1000
Layers = Annotated[int, Bounds(at_least=0, at_most=MOST_LAYERS)]
TokenId = Annotated[int, Bounds(at_least=0)]
Epsilon = Annotated[float, Bounds(at_least=1e-30, at_most=1)]
Base = Annotated[float, Bounds(at_least=1, at_most=1e12)]
FirstPosition = Annotated[int, Bounds(at_least=0, at_most=2**20)]
Types = Annotated[int, Bounds(at_least=0, at_most=2**16)]
Rate = Annotated[float, Bounds(at_least=0, below=1)]
Scale = Annotated[float, Bounds(above=0, at_most=1e6)]

# Here and not in adapter.py, because recipes are read without loading NumPy.
AdapterKind = Literal["lora", "dora"]
AdapterRank = Annotated[int, Bounds(at_least=1, at_most=2**16)]
AdapterAlpha = Annotated[float, Bounds(above=0, at_most=1e6)]

SIZES = ("architecture", "vocab_size", "d_model", "encoder_layers", "decoder_layers", "heads", "d_ff")
"""Fields that `summary` always shows, even with default values."""
YOUNGER = ("attention_scale", "decoder_self_attention", "logit_scale", "logit_cap", "token_types", "decoder")
YOUNGER += ("embedding_norm", "first_position", "head")
YOUNGER += ("norm_bias", "first_norm", "window", "layer_pattern", "attention_output_bias")
YOUNGER += ("embedding_scale", "residual_scale", "score_cap", "query_key_norm_place", "rotary_width", "rotary_scaling")
YOUNGER += ("causal",)
"""Fields added after the first config.json files. Default values aren't written, so that older models' files stay the
same byte for byte."""


Stack = Literal["encoder", "decoder"]
PATTERN = "layer_pattern"
LAYER_FIELDS = ("heads", "key_value_heads", "d_k", "d_v", "d_ff", "activation", "gated", "attention_bias")
LAYER_FIELDS += ("attention_output_bias", "feed_forward_bias", "query_key_norm", "query_key_norm_place")
LAYER_FIELDS += ("attention_scale", "score_cap", "window", "positions", "rotary_base", "rotary_width", "rotary_scaling")
"""Fields that may differ in the decoder (`decoder`) or in single layers (`layer_pattern`)."""


class Table(Mapping[str, Any]):
    """An immutable, hashable dict of fields, so that a config with `decoder` or `layer_pattern` can be hashed.

    Lists in it become tuples, and tables tables of this kind.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = {name: _hashable(value) for name, value in (values or {}).items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, Table):
        return Table(value)
    return tuple(_hashable(each) for each in value) if isinstance(value, list | tuple) else value


SAME = Table()
"""No field differs."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and choices of a Transformer.

    `fields.py` checks each field by its annotation, relations.py the rules between fields. Four fields may be left
    unset and are numbers after construction: `d_k` and `d_v` (width of one head's keys and values) default to
    `d_model / heads`, `key_value_heads` to `heads` (fewer: grouped-query attention, Ainslie et al. 2023), and
    `source_vocab_size` to `vocab_size`.

    The fields apply to every layer of both stacks, except for values in `decoder` (for the decoder) and in
    `layer_pattern` (for single layers). `of("decoder", 3)` is the config of decoder layer 3 with these values applied.

    >>> config = TransformerConfig(vocab_size=100, decoder={"heads": 4}, layer_pattern=[{}, {"d_ff": 512}])
    >>> config.of("decoder", 1).heads, config.of("decoder", 1).d_ff
    (4, 512)

    Raises `UserError` listing every problem at once.
    """

    architecture: Architecture = "encoder-decoder"
    """Stacks of the model: encoder, decoder or both."""
    vocab_size: Length
    """Size of the target vocabulary (encoder-only: the only vocabulary); also the width of the logits."""
    source_vocab_size: Length = None  # type: ignore[assignment]
    """Size of the source vocabulary; unset: vocab_size."""

    d_model: Width = 512
    """Width of embeddings and of each layer's output."""
    encoder_layers: Layers = 6
    """Layers of the encoder."""
    decoder_layers: Layers = 6
    """Layers of the decoder."""
    heads: Width = 8
    """Attention heads (of queries)."""
    key_value_heads: Width = None  # type: ignore[assignment]
    """Heads of keys and values; unset: heads."""
    d_k: Width = None  # type: ignore[assignment]
    """Width of one head's queries and keys; unset: d_model / heads."""
    d_v: Width = None  # type: ignore[assignment]
    """Width of one head's values; unset: d_model / heads."""
    d_ff: Length = 2048
    """Inner width of the feed-forward nets."""

    norm_placement: NormPlacement = "post"
    """Norms of each sub-layer. post, as in the paper: LayerNorm(x + Sublayer(x)); pre: x + Sublayer(LayerNorm(x));
    sandwich (Gemma 2): x + LayerNorm(Sublayer(LayerNorm(x))); after (OLMo 2): x + LayerNorm(Sublayer(x)). All but post
    have one final norm per stack."""
    norm: Norm = "layernorm"
    """Kind of norm."""
    norm_bias: bool = True
    """Bias of layernorm; rmsnorm has none."""
    residual_scale: Scale | None = None
    """Factor of each sub-layer's output in the sum, x + residual_scale * Sublayer(x), as in Granite; unset: none."""
    first_norm: bool = True
    """Norm before the first layer's attention, with norm_placement "pre"; ModernBERT has none there."""
    norm_epsilon: Epsilon = 1e-5
    """Added to the variance (rmsnorm: to the mean square) in each norm."""
    activation: Activation = "relu"
    """Activation of the feed-forward nets."""
    gated: bool = False
    """down(activation(gate(x)) * up(x)) instead of down(activation(up(x))) (Shazeer 2020, GLU variants)."""
    attention_bias: bool = False
    """Biases of the query, key, value and output projections; the paper's formula has none."""
    attention_output_bias: bool | None = None
    """Bias of the output projection alone, e.g. none in Qwen2; unset: attention_bias."""
    query_key_norm: bool = False
    """RMSNorm of queries and keys (Henry et al. 2020), e.g. in Qwen3."""
    query_key_norm_place: QueryKeyNormPlace = "before"
    """What query_key_norm normalises: each head, before any rotation (before) or after it (after, as in HunYuan), or
    all heads together, before it (width, as in OLMo 2)."""
    attention_scale: Scale | None = None
    """Factor of the dot products of queries and keys, e.g. 1 in T5; unset: 1 / sqrt(d_k)."""
    causal: bool = False
    """Causal attention in an encoder: a position sees none behind it, as in decoders that make text vectors
    (Qwen3-Embedding). A decoder's always is."""
    score_cap: Scale | None = None
    """Bound of the attention scores, which become cap * tanh(scores / cap) before the mask, e.g. 50 in Gemma 2; of an
    encoder or a decoder alone; unset: none."""
    window: Length | None = None
    """Local attention, of an encoder or a decoder alone. Each position sees keys up to this many positions away; in a
    decoder and with causal this many keys, the last its own, as in Mistral and Gemma; unset: all keys."""
    decoder_self_attention: DecoderSelfAttention = "attention"
    """Self-attention of the decoder, or in its place a simpler simple recurrent unit, which keeps one vector per layer
    instead of keys and values (ssru; Kim et al. 2019, as in Marian's students)."""
    feed_forward_bias: bool = True
    """Biases of the feed-forward nets."""
    output_bias: bool = False
    """Bias of the final classifier."""
    logit_scale: Scale | None = None
    """Factor of the classifier's input, e.g. 1 / sqrt(d_model) in T5; unset: none."""
    logit_cap: Scale | None = None
    """Bound of the logits, which become cap * tanh(logits / cap), e.g. 30 in Gemma 2; unset: none."""

    positions: Positions = "sinusoidal"
    """Kind of position encoding; sinusoidal_halves: the paper's, all sines, then all cosines, as in published Marian
    models; sinusoidal_concat: tensor2tensor's, all sines, then all cosines; relative: T5's, by a table shared by all
    layers of a stack; relative_layers: by a table in each layer, as in umT5."""
    max_positions: Length = 1024
    """Rows of a learned position table; longest sequence of the exported model, and of a decoder alone with rotary
    positions. Other models' positions are computed beyond it in MLX."""
    first_position: FirstPosition = 0
    """Position of the first token, sinusoids only, e.g. pad_id + 1 in M2M100."""
    rotary_base: Base = 10000.0
    """Base of rotary positions: pair i of a head turns by rotary_base^(-2 i / rotary_width) per position."""
    rotary_width: Width | None = None
    """Numbers at the beginning of a head that turn; the others stay as they are, e.g. in Phi-4-mini; unset: d_k."""
    rotary_scaling: Table = SAME
    """Other frequencies of rotary positions, for long texts: a kind (linear, llama3, yarn, longrope or divisors) and
    its numbers, e.g. {"kind": "linear", "factor": 8}; {}: none."""
    relative_buckets: Length = 32
    """Rows of a table of relative positions: near distances have a row each, farther distances share rows (T5)."""
    relative_distance: Length = 128
    """Relative distances from this on share the last row."""
    tie_embeddings: TieEmbeddings = "all"
    """Which of source embedding, target embedding and classifier share one matrix (section 3.4: all three);
    source-target: the classifier has its own, as in T5 1.1."""
    scale_embeddings: bool = True
    """Multiply embeddings by sqrt(d_model) (section 3.4)."""
    embedding_scale: Scale | None = None
    """Factor of the embeddings with scale_embeddings, e.g. 25.25 in Gemma 3 270M; unset: sqrt(d_model)."""
    embedding_norm: bool = False
    """Norm over embedding + position at the start of each stack, as in BART (Lewis et al. 2020)."""
    token_types: Types = 0
    """Number of token types, encoder-only, e.g. 2 for BERT's segments (Devlin et al. 2019): each type has a row added
    to the embedding; 0: none."""

    head: Head = VOCABULARY
    """Output of an encoder-only model: logits over the vocabulary or over classes, or vectors."""

    dropout: Rate = 0.1
    """Dropout of every sub-layer's output and of embedding + position (section 5.4)."""
    attention_dropout: Rate = 0.0
    """Dropout of the attention weights."""
    activation_dropout: Rate = 0.0
    """Dropout of the inner activations of the feed-forward nets."""

    decoder: Table = SAME
    """Fields with another value in the decoder, such as heads, d_ff or layer_pattern."""

    layer_pattern: tuple[Table, ...] = ()
    """Fields with another value in single layers, such as window or rotary_base. Layer i takes entry i, and the pattern
    repeats: [{}, {"window": 64}] gives every second layer a window."""

    pad_id: TokenId = 0
    """Id of the padding token."""
    bos_id: TokenId = 1
    """Id of the decoder's start token."""
    eos_id: TokenId = 2
    """Id of the token at the end of a sequence."""

    def __post_init__(self) -> None:
        problems = [*check_fields(self), *self._keep_head(), *self._keep_scaling(), *self._keep_pattern()]
        if not problems:
            if self.d_model % self.heads and None in (self.d_k, self.d_v):
                sizes = {"d_model": self.d_model, "heads": self.heads}
                problems.append(Text("{d_model} is not a multiple of {heads}: give {d_k} and {d_v}", **sizes))
            for name, value in self._following().items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)
            problems += relations(self)
        if not problems:
            problems += self._keep_decoder()
        if not problems and (self.decoder or self.layer_pattern):
            problems += self._check_layers()
        if problems:
            raise UserError("TransformerConfig: {}", first_of(problems), problems=problems)

    def _following(self) -> dict[str, int]:
        """{field: its value if unset}"""
        width = self.d_model // self.heads
        return dict(source_vocab_size=self.vocab_size, key_value_heads=self.heads, d_k=width, d_v=width)

    def _keep_head(self) -> list[str]:
        """Convert a head given as a dict of its fields; returns the problems."""
        if isinstance(self.head, Head):
            return []
        if not isinstance(self.head, Mapping):
            return [f"head={self.head!r:.60} must be a table of fields"]
        try:
            object.__setattr__(self, "head", Head.from_dict(self.head))
        except UserError as error:
            return [error.text]
        return []

    def _keep_scaling(self) -> list[str]:
        """Make `rotary_scaling` hashable; returns the problems."""
        if problems := scaling_problems(self.rotary_scaling):
            return problems
        object.__setattr__(self, "rotary_scaling", _hashable(self.rotary_scaling))
        return []

    def _keep_pattern(self) -> list[str]:
        """Store the shortest equivalent pattern, without values equal to the stack's; returns the problems."""
        pattern = self.layer_pattern
        if not isinstance(pattern, list | tuple) or not all(isinstance(layer, Mapping) for layer in pattern):
            return [f"layer_pattern={pattern!r:.60} must be a list of tables of fields"]
        if unknown := [name for layer in pattern for name in layer if name not in LAYER_FIELDS]:
            return [f"layer_pattern: {unknown[0]!r} is not one of {', '.join(LAYER_FIELDS)}"]
        decoder = self.decoder if isinstance(self.decoder, Mapping) else SAME
        pattern = [Table(layer) for layer in pattern]
        own = [Table({n: x for n, x in layer.items() if x != getattr(self, n) or n in decoder}) for layer in pattern]
        layers = [n for n in (self.encoder_layers, self.decoder_layers) if isinstance(n, int) and n <= MOST_LAYERS]
        if own and (count := max(layers, default=0)) > 0:
            each = [own[i % len(own)] for i in range(count)]
            periods = (n for n in range(1, len(each) + 1) if all(x == each[i % n] for i, x in enumerate(each)))
            own = each[: next(periods)]
        object.__setattr__(self, PATTERN, tuple(own) if any(own) else ())
        kinds = field_types(TransformerConfig)
        each = [(name, x) for layer in own for name, x in layer.items()]
        wrong = [(name, x) for name, x in each if name in kinds and not kinds[name].accepts(x)]
        problems = [f"layer_pattern: {name}={x!r:.60} {kinds[name].expectation}" for name, x in wrong]
        scalings = [x for name, x in each if name == "rotary_scaling"]
        return problems + [f"layer_pattern: {problem}" for x in scalings for problem in scaling_problems(x)]

    def _keep_decoder(self) -> list[str]:
        """Store `decoder` without values that change nothing; returns the problems."""
        table = self.decoder
        if not isinstance(table, Mapping):
            return [f"decoder={table!r:.60} must be a table of fields"]
        if unknown := [name for name in table if name not in (*LAYER_FIELDS, PATTERN)]:
            return [f"decoder: {unknown[0]!r} is not one of {', '.join((*LAYER_FIELDS, PATTERN))}"]
        if table and self.architecture != "encoder-decoder":
            return [f"decoder: an architecture of {self.architecture!r} alone has one stack"]
        object.__setattr__(self, "decoder", SAME)
        if not table:
            return []
        try:
            stack, own = _with_own(self, table), dict(table)
            for name in table:
                without = {other: value for other, value in own.items() if other != name}
                own = without if _with_own(self, without) == stack else own
        except UserError as error:
            return [str(error).replace("TransformerConfig", "decoder", 1)]
        if PATTERN in own:
            own[PATTERN] = stack.layer_pattern
        object.__setattr__(self, "decoder", Table(own))
        return []

    def _check_layers(self) -> list[str]:
        """Build the config of every entry of the patterns; returns the problems."""
        for stack in self.stacks:
            pattern = self.of(stack).layer_pattern
            for entry in range(len(pattern)):
                try:
                    layer = self.of(stack, entry)
                except UserError as error:
                    return [str(error).replace("TransformerConfig", PATTERN, 1)]
                if layer.positions != self.positions and {layer.positions, self.positions} != {"rotary", "none"}:
                    return [f"positions={layer.positions!r}: layers can differ in 'rotary' and 'none' only"]
        return []

    def is_causal(self, stack: Stack) -> bool:
        """Whether a position of a stack sees no later position."""
        return stack == "decoder" or self.causal

    @property
    def has_encoder(self) -> bool:
        return self.architecture != "decoder"

    @property
    def has_decoder(self) -> bool:
        return self.architecture != "encoder"

    @property
    def stacks(self) -> tuple[Stack, ...]:
        stacks: dict[Stack, bool] = {"encoder": self.has_encoder, "decoder": self.has_decoder}
        return tuple(stack for stack, exists in stacks.items() if exists)

    @property
    def recurrent(self) -> bool:
        """Whether decoder layers keep one vector (SSRU) instead of keys and values."""
        return self.decoder_self_attention == "ssru"

    @property
    def output_proj_bias(self) -> bool:
        """Whether the output projections of attentions have biases."""
        return self.attention_bias if self.attention_output_bias is None else self.attention_output_bias

    @property
    def embedding_factor(self) -> float:
        """What embeddings are multiplied by; 1 without `scale_embeddings`."""
        return (self.embedding_scale or math.sqrt(self.d_model)) if self.scale_embeddings else 1.0

    @property
    def one_embedding(self) -> bool:
        """Whether source and target share one embedding matrix."""
        return self.tie_embeddings in ("source-target", "all")

    @property
    def own_classifier(self) -> bool:
        """Whether there is a classifier that isn't tied to an embedding."""
        own = self.tie_embeddings in ("none", "source-target") or self.head.kind != "vocabulary"
        return own and self.head.classifies

    @property
    def turned(self) -> int:
        """Numbers of a head that rotary positions turn."""
        return self.rotary_width or self.d_k

    @property
    def outputs(self) -> int:
        """Width of the classifier's logits."""
        return {"vocabulary": self.vocab_size, "spans": 2}.get(self.head.kind, len(self.head.labels))

    def of(self, stack: Stack, layer: int | None = None) -> TransformerConfig:
        """The config of a stack or a layer, with the values of `decoder` and `layer_pattern` in place.

        Derived fields are derived again, e.g. d_k = d_model / heads if the layer has other heads.
        """
        config = _of(self, stack) if self.decoder else self
        if layer is None or not config.layer_pattern:
            return config
        return _of_layer(config, layer % len(config.layer_pattern))

    def at(self, name: str) -> TransformerConfig:
        """The config of the layer or stack that a parameter or module belongs to.

        e.g. `at("decoder.layers.3.feed_forward")` is `of("decoder", 3)`.
        """
        place = re.match(r"(encoder|decoder)\.(?:layers\.(\d+))?", name)
        if place is None:
            return self
        return self.of(cast(Stack, place[1]), None if place[2] is None else int(place[2]))

    def layers(self, stack: Stack) -> tuple[TransformerConfig, ...]:
        """The configs of a stack's layers."""
        return _layers(self, stack)

    def to_dict(self) -> dict[str, Any]:
        """{field: JSON value}, without fields of `YOUNGER` that have their default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.name in YOUNGER}
        written = {name: value for name, value in vars(self).items() if name not in defaults or value != defaults[name]}
        return {name: _plain(value) for name, value in written.items()}

    def summary(self) -> dict[str, str]:
        """{field: text} for a table: the sizes, and all other fields that differ from their default."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        implied = self._following()
        return {
            name: str(value)
            for name, (value, default) in values.items()
            if name in SIZES or value != implied.get(name, default)
        }

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        return table("TransformerConfig", self.summary().items())

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TransformerConfig:
        """Build a config from `to_dict`'s form. Raises `UserError` for unknown keys, with the nearest known name."""
        problems = unknown_keys(values, cls)
        if "vocab_size" not in values:
            problems.append(Text("{vocab_size} is missing"))
        if problems:
            raise UserError("TransformerConfig: {}", first_of(problems), problems=problems)
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> TransformerConfig:
        return cls.from_dict(parse_object(text))

    @classmethod
    def preset(cls, name: str, vocab_size: int, **changes: Any) -> TransformerConfig:
        """A preset, with some fields changed.

        >>> TransformerConfig.preset("base", vocab_size=32000, dropout=0.3)
        """
        if name not in PRESETS:
            raise UserError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
        return cls.from_dict({**PRESETS[name], "vocab_size": vocab_size, **changes})


@lru_cache(maxsize=64)
def _of(config: TransformerConfig, stack: Stack) -> TransformerConfig:
    shared = dataclasses.replace(config, decoder=SAME)
    return _with_own(shared, config.decoder) if stack == "decoder" else shared


@lru_cache(maxsize=256)
def _of_layer(config: TransformerConfig, entry: int) -> TransformerConfig:
    return _with_own(dataclasses.replace(config, layer_pattern=()), config.layer_pattern[entry])


@lru_cache(maxsize=64)
def _layers(config: TransformerConfig, stack: Stack) -> tuple[TransformerConfig, ...]:
    count = config.encoder_layers if stack == "encoder" else config.decoder_layers
    return tuple(config.of(stack, i) for i in range(count))


def _plain(value: Any) -> Any:
    """Convert tables, tuples and heads to dicts and lists, for JSON."""
    if isinstance(value, Head):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _with_own(config: TransformerConfig, own: Mapping[str, Any]) -> TransformerConfig:
    """The config with the values of a stack or layer; fields derived from changed fields are derived again."""
    widths = () if config.d_model % config.heads else ("d_k", "d_v")
    follow = ("key_value_heads", *widths)
    followed = {n: None for n, value in config._following().items() if n in follow and getattr(config, n) == value}
    return dataclasses.replace(config, **{**followed, **own}) if own else config


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; raises `UserError` for anything else."""
    values = parse_json(text, "TransformerConfig: not JSON", "restore it from a copy")
    if not isinstance(values, dict):
        raise UserError(f"TransformerConfig: expected a JSON object, found {type(values).__name__}")
    return values
