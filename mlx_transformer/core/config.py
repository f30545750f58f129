"""What a model is: one frozen, validated description that both sides (MLX and ONNX) are built from.

Source: "Attention Is All You Need" (Vaswani et al., 2017), section 3 and table 3. The defaults are the paper's choices;
every other value is what a later, published model needs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import Bounds, check_fields, unknown_keys
from mlx_transformer.system.files import parse_json
from mlx_transformer.system.page import table

Architecture = Literal["encoder-decoder", "encoder", "decoder"]
NormPlacement = Literal["post", "pre"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Positions = Literal["sinusoidal", "sinusoidal_concat", "learned", "rotary", "relative", "none"]
TieEmbeddings = Literal["none", "target-output", "all"]

# More than any model has, and little enough that a damaged file doesn't fill the memory.
Width = Annotated[int, Bounds(at_least=1, at_most=2**16)]
Length = Annotated[int, Bounds(at_least=1, at_most=2**20)]
Layers = Annotated[int, Bounds(at_least=0, at_most=1000)]
TokenId = Annotated[int, Bounds(at_least=0)]
Epsilon = Annotated[float, Bounds(at_least=1e-30, at_most=1)]
Base = Annotated[float, Bounds(at_least=1, at_most=1e12)]
Types = Annotated[int, Bounds(at_least=0, at_most=2**16)]
Rate = Annotated[float, Bounds(at_least=0, below=1)]

SIZES = ("architecture", "vocab_size", "d_model", "encoder_layers", "decoder_layers", "heads", "d_ff")
"""What a summary shows of every model."""
YOUNGER = ("token_types",)
"""Fields that the first config.json files don't have: at their default they are left out, so that files of models
without them stay as they were, byte for byte."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and choices of one Transformer. A field's annotation is its whole description: `fields.py` checks it, and
    the tests vary it. What two fields demand of each other stands in `_relations`.

    Sizes are counts of units; `d_k` and `d_v` (width of one head's keys and values) default to `d_model / heads`,
    `key_value_heads` to `heads` (fewer: grouped-query attention, Ainslie et al. 2023), `source_vocab_size` to
    `vocab_size`. After construction these four hold numbers, never None.

    Raises `UserError` listing every problem at once.
    """

    architecture: Architecture = "encoder-decoder"
    """Both stacks, or one of them alone."""
    vocab_size: Length
    """Target vocabulary (encoder-only: the only one); also the width of the logits."""
    source_vocab_size: Length = None  # type: ignore[assignment]
    """Source vocabulary; unset: the target's."""

    d_model: Width = 512
    """Width of the stream that the sub-layers add to."""
    encoder_layers: Layers = 6
    """Layers of the encoder."""
    decoder_layers: Layers = 6
    """Layers of the decoder."""
    heads: Width = 8
    """Attention heads, of queries."""
    key_value_heads: Width = None  # type: ignore[assignment]
    """Heads of keys and values; unset: heads."""
    d_k: Width = None  # type: ignore[assignment]
    """Width of one head's queries and keys; unset: d_model / heads."""
    d_v: Width = None  # type: ignore[assignment]
    """Width of one head's values; unset: d_model / heads."""
    d_ff: Length = 2048
    """Inner width of the feed-forward nets."""

    norm_placement: NormPlacement = "post"
    """post: LayerNorm(x + Sublayer(x)), the paper's. pre: x + Sublayer(LayerNorm(x)) and one final norm per stack."""
    norm: Norm = "layernorm"
    """What normalises."""
    norm_epsilon: Epsilon = 1e-5
    """Added to the variance (RMSNorm: the mean square) in it."""
    activation: Activation = "relu"
    """Of the feed-forward nets."""
    gated: bool = False
    """down(activation(gate(x)) * up(x)) instead of down(activation(up(x))) (Shazeer 2020, GLU variants)."""
    attention_bias: bool = False
    """Biases on the query, key, value and output projections; the paper's formula has none."""
    query_key_norm: bool = False
    """RMSNorm over each head of queries and keys, before any rotation (Henry et al. 2020, as Qwen3 has it)."""
    feed_forward_bias: bool = True
    """Biases in the feed-forward nets."""
    output_bias: bool = False
    """Bias of the final classifier."""

    positions: Positions = "sinusoidal"
    """How the model knows the order of tokens; sinusoidal_concat: tensor2tensor's, all sines, then all cosines."""
    max_positions: Length = 1024
    """Rows of a learned table; longest sequence of the exported model. MLX extends sinusoids past it."""
    rotary_base: Base = 10000.0
    """Rotary positions turn pair i of a head by rotary_base^(-2 i / d_k) a position."""
    relative_buckets: Length = 32
    """Rows of a stack's table of relative positions: near distances have one each, farther ones share (T5)."""
    relative_distance: Length = 128
    """Distance from which on all share the last row."""
    tie_embeddings: TieEmbeddings = "all"
    """Which of source embedding, target embedding and classifier share one matrix (section 3.4: all three)."""
    scale_embeddings: bool = True
    """Multiply embeddings by sqrt(d_model) (section 3.4)."""
    token_types: Types = 0
    """Kinds of tokens that an encoder alone tells apart, each with a row that is added to the embedding, as BERT's
    segments (Devlin et al. 2019); 0: none."""

    dropout: Rate = 0.1
    """On every sub-layer's output and on embedding + position (section 5.4)."""
    attention_dropout: Rate = 0.0
    """On the attention's weights."""
    activation_dropout: Rate = 0.0
    """On the inner activations of the feed-forward nets."""

    pad_id: TokenId = 0
    """Padding."""
    bos_id: TokenId = 1
    """Start token of the decoder."""
    eos_id: TokenId = 2
    """End of a sequence."""

    def __post_init__(self) -> None:
        problems = check_fields(self)
        if not problems:
            divided, left = divmod(self.d_model, self.heads)
            if left and None in (self.d_k, self.d_v):
                problems.append(f"d_model={self.d_model} is not a multiple of heads={self.heads}: give d_k and d_v")
            following = dict(source_vocab_size=self.vocab_size, key_value_heads=self.heads, d_k=divided, d_v=divided)
            for name, value in following.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)
            problems += _relations(self)
        if problems:
            raise UserError("TransformerConfig: " + "; ".join(problems))

    @property
    def has_encoder(self) -> bool:
        return self.architecture != "decoder"

    @property
    def has_decoder(self) -> bool:
        return self.architecture != "encoder"

    def to_dict(self) -> dict[str, Any]:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = dataclasses.asdict(self)
        return {n: value for n, value in values.items() if n not in YOUNGER or value != defaults[n]}

    def summary(self) -> dict[str, str]:
        """In words for a table: the sizes, and what else isn't as it is by default."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        width = self.d_model // self.heads
        implied = dict(source_vocab_size=self.vocab_size, key_value_heads=self.heads, d_k=width, d_v=width)
        return {
            name: str(value)
            for name, (value, default) in values.items()
            if name in SIZES or value != implied.get(name, default)
        }

    def _repr_html_(self) -> str:
        """For notebooks."""
        return table("TransformerConfig", self.summary().items())

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TransformerConfig:
        """Strict: an unknown key is an error (with the nearest known name), never dropped."""
        problems = unknown_keys(values, cls)
        if "vocab_size" not in values:
            problems.append("vocab_size is missing")
        if problems:
            raise UserError("TransformerConfig: " + "; ".join(problems))
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> TransformerConfig:
        return cls.from_dict(parse_object(text))

    @classmethod
    def preset(cls, name: str, vocab_size: int, **changes: Any) -> TransformerConfig:
        """One of PRESETS for a vocabulary, with single fields changed by keyword."""
        if name not in PRESETS:
            raise UserError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
        return cls.from_dict({**PRESETS[name], "vocab_size": vocab_size, **changes})


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object in a text; `UserError` if it isn't one."""
    values = parse_json(text, "TransformerConfig: not JSON", "restore it from a copy")
    if not isinstance(values, dict):
        raise UserError(f"TransformerConfig: expected a JSON object, found {type(values).__name__}")
    return values


# Heads of 64 everywhere: Metal has no fused attention for heads of 32. base and big are rows of the paper's table 3.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(encoder_layers=2, decoder_layers=2, d_model=128, heads=2, d_ff=512, dropout=0.1),
    "small": dict(encoder_layers=3, decoder_layers=3, d_model=256, heads=4, d_ff=1024, dropout=0.1),
    "base": dict(encoder_layers=6, decoder_layers=6, d_model=512, heads=8, d_ff=2048, dropout=0.1),
    "big": dict(encoder_layers=6, decoder_layers=6, d_model=1024, heads=16, d_ff=4096, dropout=0.3),
}


def _relations(c: TransformerConfig) -> list[str]:
    """What fields that are right by themselves must not be together."""
    found: list[str] = []

    def check(holds: bool, message: str) -> None:
        if not holds:
            found.append(message)

    check(c.heads % c.key_value_heads == 0, f"heads={c.heads} is not a multiple of key_value_heads={c.key_value_heads}")
    for id_name in ("pad_id", "bos_id", "eos_id"):
        smallest = min(c.vocab_size, c.source_vocab_size) if c.architecture == "encoder-decoder" else c.vocab_size
        check(
            getattr(c, id_name) < smallest, f"{id_name}={getattr(c, id_name)} is outside the vocabulary of {smallest}"
        )
    distinct = len({c.pad_id, c.bos_id, c.eos_id}) == 3
    # Marian starts its decoder with the padding token, so bos may equal pad; the others may not coincide.
    check(distinct or (c.bos_id == c.pad_id != c.eos_id), "eos_id must differ from pad_id and bos_id")
    check(c.positions != "rotary" or c.d_k % 2 == 0, f"positions='rotary' turns pairs: d_k={c.d_k} must be even")
    if c.positions == "relative":
        check(c.relative_buckets % 4 == 0, f"relative_buckets={c.relative_buckets} must be a multiple of 4")
        far = c.relative_distance > c.relative_buckets // 2
        check(
            far, f"relative_distance={c.relative_distance} must be over half of relative_buckets={c.relative_buckets}"
        )
    if c.positions in ("sinusoidal", "sinusoidal_concat"):
        check(c.d_model % 2 == 0, f"positions={c.positions!r} needs an even d_model, not {c.d_model}")
    if c.positions == "sinusoidal_concat":
        check(c.d_model >= 4, "positions='sinusoidal_concat' divides by d_model/2 - 1: d_model must be at least 4")
    if c.architecture == "encoder-decoder":
        check(c.encoder_layers > 0, "an encoder-decoder needs encoder_layers of at least 1")
        check(c.decoder_layers > 0, "an encoder-decoder needs decoder_layers of at least 1")
        shared = c.tie_embeddings != "all" or c.source_vocab_size == c.vocab_size
        check(shared, f"tie_embeddings='all' needs source_vocab_size={c.source_vocab_size} equal to vocab_size")
    else:
        same = c.source_vocab_size == c.vocab_size
        check(same, f"source_vocab_size: an architecture of {c.architecture!r} alone has one vocabulary")
    only = f"token_types={c.token_types}: an encoder alone tells kinds of tokens apart, not {c.architecture!r}"
    check(not c.token_types or c.architecture == "encoder", only)
    if c.architecture == "encoder":
        check(c.encoder_layers > 0, "an encoder needs encoder_layers of at least 1")
        check(c.decoder_layers == 0, f"decoder_layers={c.decoder_layers}: an encoder has no decoder (give 0)")
        refused = c.tie_embeddings != "target-output"
        check(refused, "tie_embeddings='target-output': an encoder has no target embedding (use 'all' or 'none')")
    if c.architecture == "decoder":
        check(c.decoder_layers > 0, "a decoder needs decoder_layers of at least 1")
        check(c.encoder_layers == 0, f"encoder_layers={c.encoder_layers}: a decoder has no encoder (give 0)")
        refused = c.tie_embeddings != "all"
        check(refused, "tie_embeddings='all': a decoder has no source embedding (use 'target-output' or 'none')")
    return found
