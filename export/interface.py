"""Inputs, outputs and settings of every graph: names, types and axes, declared once. No ONNX and no arrays here.

A `Port` is an input or output of a graph. Its `value` is our word for its content, the same in all graphs, e.g.
"source_ids". Its `name` is the graph's own, e.g. "input_ids", as Optimum, transformers.js and genai expect it. Graphs
are built, run, checked and described from these tables, so a new input is a new line here.

Values:

    source_ids or inputs_embeds, source_mask, target_ids, target_mask, positions, memory, logits, attention
    pooled, start, end               outputs of other heads
    vector                           of a text
    token_weights, token_vectors     of a text's tokens
    cache.N.key, cache.N.value       self-attention of decoder layer N: its earlier positions
    cache.N.state                    the same for a recurrent layer (SSRU)
    cross.N.key, cross.N.value       cross-attention of decoder layer N: the source
    others                           belong to a single target or to the search, under the names they have there

A `Request` says which graphs to declare: a model and the options of its package. `SETTINGS` are the inputs of the graph
with the search inside, with their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import SPANS
from mlx_transformer.core.inputs import INPUTS, MASK, SOURCE_IDS, VECTORS, companions
from mlx_transformer.decoding.options import ID_FIELDS, PENALTY_OFFSETS, Options

if TYPE_CHECKING:
    from mlx_transformer.core.heads import Kind
    from mlx_transformer.core.text_embedding import TextEmbedding


class Setting(NamedTuple):
    """A search option that is an input of the search graph, with the file's default."""

    dtype: str
    default: Any
    axes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    """Shape of the default; in a run every axis may be longer."""


_USUAL = Options()
KINDS = {
    "int64": ("beam", "n_best", "min_new_tokens", "top_k", "seed", "no_repeat_ngram"),
    "float32": ("length_penalty", "temperature", "top_p", "repetition_penalty", "max_length_factor"),
    "bool": ("early_stopping", "sample", "heuristic_stop", "forced_end"),
}
SETTINGS = {
    **{name: Setting(dtype, getattr(_USUAL, name)) for dtype, names in KINDS.items() for name in names},
    **{name: Setting("int64", getattr(_USUAL, name), (name,), (0,)) for name in ID_FIELDS},
    "start_id": Setting("int64", -1),
    "max_new_tokens": Setting("int64", 0, ("max_new_tokens",), (1,)),
    "penalty_offset": Setting("float32", PENALTY_OFFSETS[_USUAL.penalty_form]),
    "rows": Setting("int64", -1, ("rows",), (1,)),
    "prefix": Setting("int64", -1, ("prefixes", "prefix"), (1, 0)),
    "candidates": Setting("int64", -1, ("candidate_rows", "candidates"), (1, 0)),
    "banned_sequences": Setting("int64", -1, ("banned_sequences", "banned_length"), (0, 1)),
}
"""The options are explained in `search/options.py`."""
TEXT_SETTINGS = {name: Setting("int64", 0, (name,), (0,)) for name in ("source_prefix", "source_suffix")}
"""Further settings of a graph that takes text: ids before and after each line's, e.g. a language token."""


CROSS_ATTENTION = "cross_attention"
"""Name of the decoders' optional output `attention` (rows, T, S): a layer's cross-attention weights. Also its key in
mlx_transformer.json."""
INPUTS_EMBEDS = "inputs_embeds"
"""Key in mlx_transformer.json: the encoder takes vectors instead of ids."""
DIMENSIONS = "dimensions"
"""Key in mlx_transformer.json: length of a text's vectors."""
BY_TOKEN = "row_per_token"
"""Key in mlx_transformer.json: the encoder-only graph has a row for each token."""
SENTENCE_EMBEDDING = "sentence_embedding"
"""Name of an encoder's optional output `vector` (rows, W), a vector per text. Also its key in mlx_transformer.json."""
TEXT_OUTPUTS: dict[Kind, str] = {"dense": SENTENCE_EMBEDDING, "sparse": "token_weights", "multi": "token_vectors"}
"""Names of these outputs by kind of vector: sparse (rows, L), multi (rows, L, W). Both are 0 on padding, `multi` on the
first token too."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model and the options of its package, which determine its graphs."""

    config: TransformerConfig
    inputs_embeds: bool = False
    """The encoder takes vectors instead of ids."""
    attention_layer: int | None = None
    """Decoder layer whose cross-attention is returned; None: none."""
    text: bool = False
    """The search takes and returns strings."""
    embedding: TextEmbedding | None = None
    """How an encoder-only graph makes vectors of its output (`TextEmbedding.arithmetic`); None: it makes none."""
    dimensions: int | None = None
    """Numbers kept of a text's vector, if fewer than the checkpoint's."""
    by_token: bool = False
    """The encoder-only graph has a row for each token; depends on the target."""

    @classmethod
    def read(cls, values: Mapping[str, Any], config: TransformerConfig) -> Request:
        """Read the request from mlx_transformer.json. Raises `ValueError` for a decoder layer that doesn't exist."""
        layer = values[CROSS_ATTENTION]["layer"] if CROSS_ATTENTION in values else None
        if layer is not None and layer not in range(config.decoder_layers):
            raise ValueError(f"there is no decoder layer {layer!r}")
        vectors = values.get(INPUTS_EMBEDS) is True
        made = values.get(SENTENCE_EMBEDDING)
        embedding = None if made is None else _embedding(**made)
        by_token = values.get(BY_TOKEN) is True
        fields = {"inputs_embeds": vectors, "attention_layer": layer, "embedding": embedding, "by_token": by_token}
        fields |= {"dimensions": values.get(DIMENSIONS)}
        return cls(config=config, **fields)

    def written(self) -> dict[str, Any]:
        """The entries of mlx_transformer.json for `read`, without defaults."""
        attention = {} if self.attention_layer is None else {CROSS_ATTENTION: {"layer": self.attention_layer}}
        facts = {INPUTS_EMBEDS: True} if self.inputs_embeds else {}
        facts |= {BY_TOKEN: True} if self.by_token else {}
        facts |= {DIMENSIONS: self.dimensions} if self.dimensions is not None else {}
        if (e := self.embedding) is None:
            return {**attention, **facts}
        made = {"pooling": [*e.pooling], "dense": [asdict(layer) for layer in e.dense], "normalize": e.normalize}
        made |= {name: getattr(e, name) for name in e.kinds[1:]}
        return {**attention, **facts, SENTENCE_EMBEDDING: made}


def _embedding(pooling: list[Any], dense: list[dict[str, Any]], **more: Any) -> TextEmbedding:
    from mlx_transformer.core.text_embedding import Dense, TextEmbedding  # lazy: few models need it

    return TextEmbedding(pooling=tuple(pooling), dense=tuple(Dense(**layer) for layer in dense), **more)


Axis = str | int
"""A name: any size, the same wherever the name appears. A number: exactly this size."""

# When transformers.js makes an empty cache, it fills in the axis of this name and sets other dynamic axes to 0.
BATCH = "batch_size"
SOURCE, TARGET, PAST = "encoder_sequence_length", "decoder_sequence_length", "past_decoder_sequence_length"
SENTENCES = "sentences"
"""Axis of source inputs shared by several rows, i.e. the beams of a sentence."""
LENGTH = "source_length"
"""Axis of source positions in the graphs of target cpu and in the search."""

ENCODER, DECODER_FIRST = "encoder_model", "decoder_model"
DECODER_NEXT, DECODER_MERGED = "decoder_with_past_model", "decoder_model_merged"
MODEL = "model"
ENCODER_CPU, DECODER_CPU = "encoder_cpu", "decoder_cpu"
ROWS_CPU, LISTED_CPU = "classifier_rows_cpu", "decoder_listed_cpu"
"""Two more graphs for a search among given token ids: the classifier's rows of these ids, and a decoding step that uses
them."""
STEP_CPU, PROMPT_CPU = "step_cpu", "prompt_cpu"
"""A decoder alone in target cpu. `PROMPT_CPU` reads prompts in int4, where other operators are faster for many tokens
than for one (`precision.table.Precision.prompts`)."""
LISTED, ROWS, BIASES, SCALES = "listed", "classifier_rows", "classifier_biases", "classifier_scales"
"""The axis of given ids, and the parts of the classifier that belong to them."""
SEARCH, TEXT_VECTORS = "search_model", "vector_model"
"""Graphs of single-file exports: a translator with its search, and an encoder from texts to vectors."""
CROSS_DECODERS = (DECODER_FIRST, DECODER_NEXT, DECODER_MERGED, DECODER_CPU, LISTED_CPU)
"""Decoders with cross-attention."""

SOURCE_NAMES = {**{name: entry.published for name, entry in INPUTS.items()}, "source_mask": MASK}
"""{value: name} of all inputs that an encoder may have."""

VECTORS_OF: dict[Kind, str] = {"dense": "vector", "sparse": "token_weights", "multi": "token_vectors"}
"""The value for each kind of vector, in the order of the outputs."""
PARTS, STATE = ("key", "value"), "state"
"""The arrays of a layer's cache: key and value, or the state of an SSRU."""


class Port(NamedTuple):
    """An input or output of a graph. axes: empty for a scalar. default: the value of an input that is left out."""

    value: str
    name: str
    dtype: str = "float32"
    axes: tuple[Axis, ...] = ()
    default: int | None = None

    def without_positions(self, rows: int) -> tuple[int, ...]:
        """The shape of an empty cache (rows, heads, 0, width), or of an SSRU's state (rows, width), which starts at
        0."""
        if len(self.axes) == 2:
            return rows, int(self.axes[1])
        _, heads, _, width = self.axes
        return rows, int(heads), 0, int(width)


class Ports(NamedTuple):
    """The inputs and outputs of a graph, in its order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def input_names(self) -> dict[str, str]:
        """{value: name} of the inputs."""
        return {port.value: port.name for port in self.inputs}

    @property
    def output_names(self) -> dict[str, str]:
        """{value: name} of the outputs."""
        return {port.value: port.name for port in self.outputs}

    def among(self, inputs: Collection[str], outputs: Collection[str]) -> Ports:
        """Keep the ports that a graph has, by name; another exporter's graph may have fewer."""
        return Ports(
            tuple(port for port in self.inputs if port.name in inputs),
            tuple(port for port in self.outputs if port.name in outputs),
        )


class CacheShape(NamedTuple):
    """The fixed sizes of a layer's keys and values (rows, heads, length, width)."""

    heads: int
    key_width: int
    value_width: int

    @property
    def widths(self) -> dict[str, int]:
        return dict(zip(PARTS, self[1:], strict=True))


def cache_shape(layer: TransformerConfig) -> CacheShape:
    """Sizes of a decoder layer's keys and values, for self-attention and cross-attention alike."""
    return CacheShape(layer.key_value_heads, layer.d_k, layer.d_v)


def operator_shape(layer: TransformerConfig) -> CacheShape:
    """Sizes as ONNX Runtime's own operators need them: keys and values of equal width, and a key-value head for every
    head."""
    width = max(layer.d_k, layer.d_v)
    return CacheShape(layer.heads, width, width)


def grouped_shape(layer: TransformerConfig) -> CacheShape:
    """Sizes as GroupQueryAttention needs them: keys and values of equal width, a multiple of 8."""
    width = -(-max(layer.d_k, layer.d_v) // 8) * 8
    return CacheShape(layer.key_value_heads, width, width)


def source(r: Request, *axes: Axis) -> tuple[Port, ...]:
    """Inputs of an encoder, in every target and in the search."""

    def port(value: str, dtype: str, *axes: Axis) -> Port:
        return Port(value, SOURCE_NAMES[value], dtype, axes)

    vectors = port(VECTORS.name, "float32", *axes, r.config.d_model)
    first = vectors if r.inputs_embeds else port(SOURCE_IDS.name, "int64", *axes)
    return first, *(port(name, "int64", *axes) for name in ("source_mask", *(x.name for x in companions(r.config))))


def keys_values(
    value: str, name: str, shapes: Iterable[CacheShape], rows: Axis, length: Axis
) -> list[tuple[Port, ...]]:
    """Ports of each layer's keys and values, with the values VALUE.N.key and VALUE.N.value.

    name: the graph's name for them with "{}" for N, e.g. "present.{}.decoder".
    """
    return [
        tuple(
            Port(f"{value}.{i}.{part}", f"{name.format(i)}.{part}", "float32", (rows, shape.heads, length, width))
            for part, width in shape.widths.items()
        )
        for i, shape in enumerate(shapes)
    ]


def cache(
    r: Request, name: str, rows: Axis, length: Axis, shape: Callable[[TransformerConfig], CacheShape] = cache_shape
) -> list[tuple[Port, ...]]:
    """Ports of each decoder layer's self-attention cache; an SSRU has a state without a position axis instead."""
    layers, axes = r.config.decoder_layers, (rows, r.config.d_model)
    if r.config.recurrent:
        return [(Port(f"cache.{i}.{STATE}", f"{name.format(i)}.{STATE}", "float32", axes),) for i in range(layers)]
    return keys_values("cache", name, map(shape, r.config.layers("decoder")), rows, length)


def cross(r: Request, name: str, rows: Axis, length: Axis) -> list[tuple[Port, ...]]:
    """Ports of each decoder layer's cross-attention keys and values."""
    return keys_values("cross", name, map(cache_shape, r.config.layers("decoder")), rows, length)


def layer_by_layer(*caches: Iterable[tuple[Port, ...]]) -> Iterator[Port]:
    """Yield the first layer's ports of each cache, then the second layer's, and so on."""
    for layer in zip(*caches, strict=True):
        for pair in layer:
            yield from pair


def attention(r: Request, *axes: Axis) -> tuple[Port, ...]:
    return () if r.attention_layer is None else (Port("attention", CROSS_ATTENTION, "float32", axes),)


def memory(r: Request, *axes: Axis, name: str = "last_hidden_state") -> Port:
    return Port("memory", name, "float32", (*axes, r.config.d_model))


def logits(r: Request, *axes: Axis) -> Port:
    return Port("logits", "logits", "float32", (*axes, r.config.outputs))


def head(r: Request, rows: Axis, length: Axis) -> tuple[Port, ...]:
    """Outputs of an encoder-only model's head."""
    made = r.config.head
    if made.kind == "spans":
        return tuple(Port(value, f"{value}_logits", "float32", (rows, length)) for value in SPANS)
    if made.classifies:
        return (logits(r, *((rows,) if made.per_row else (rows, length))),)
    return (Port("pooled", "pooler_output", "float32", (rows, r.config.d_model)),) if made.kind == "pooled" else ()


def vector(r: Request, rows: Axis, length: Axis) -> tuple[Port, ...]:
    """Outputs with a text's vector, named as in sentence-transformers, and with the weights or vectors of its
    tokens."""
    if (e := r.embedding) is None:
        return ()
    axes = {"dense": (rows, e.width(r.config.d_model)), "sparse": (rows, length), "multi": (rows, length, e.multi or 0)}
    return tuple(Port(VECTORS_OF[kind], TEXT_OUTPUTS[kind], "float32", axes[kind]) for kind in e.kinds)


def encoder(r: Request) -> Ports:
    return Ports(source(r, BATCH, SOURCE), (memory(r, BATCH, SOURCE),))


def decoder(r: Request, sentences: str, *, first: bool, later: bool) -> Ports:
    """Declare a decoder in standard operators.

    first: it can start from the encoder's output. later: it can continue from a cache. Both: the merged decoder.
    """
    own = cache(r, "past_key_values.{}.decoder", BATCH, PAST)
    of_source = cross(r, "past_key_values.{}.encoder", sentences, SOURCE)
    inputs = [Port("source_mask", "encoder_attention_mask", "int64", (sentences, SOURCE))]
    inputs += [Port("target_ids", "input_ids", "int64", (BATCH, TARGET))]
    placed = later and r.config.recurrent and r.config.positions != "none"  # an SSRU's state doesn't tell the position
    inputs += [Port("positions", "position_ids", "int64", (BATCH, TARGET))] if placed else []
    inputs += [memory(r, BATCH, SOURCE, name="encoder_hidden_states")] if first else []
    inputs += layer_by_layer(own, of_source) if later else []
    inputs += [Port("later", "use_cache_branch", "bool", (1,))] if first and later else []
    longer = f"{PAST} + {TARGET}" if later else TARGET
    outputs = [logits(r, BATCH, TARGET), *layer_by_layer(cache(r, "present.{}.decoder", BATCH, longer))]
    outputs += layer_by_layer(cross(r, "present.{}.encoder", BATCH, SOURCE)) if first else []
    return Ports(tuple(inputs), (*outputs, *attention(r, BATCH, TARGET, SOURCE)))


def alone(r: Request) -> Ports:
    """Declare model.onnx: an encoder-only model, or a decoder-only model with its cache."""
    now, past = "sequence_length", "past_sequence_length"
    if r.config.has_encoder:
        return Ports(source(r, BATCH, now), (memory(r, BATCH, now), *head(r, BATCH, now), *vector(r, BATCH, now)))
    total = f"{past} + {now}"
    inputs = (
        Port("target_ids", "input_ids", "int64", (BATCH, now)),
        Port("target_mask", "attention_mask", "int64", (BATCH, total)),
        Port("positions", "position_ids", "int64", (BATCH, now)),
        *layer_by_layer(cache(r, "past_key_values.{}", BATCH, past)),
    )
    return Ports(inputs, (logits(r, BATCH, now), *layer_by_layer(cache(r, "present.{}", BATCH, total))))


def encoder_cpu(r: Request) -> Ports:
    mask = Port("source_mask", "source_mask", "int32", (SENTENCES, LENGTH))
    return Ports(source(r, SENTENCES, LENGTH), (*layer_by_layer(_cross_cpu(r)), mask, memory(r, SENTENCES, LENGTH)))


def rows_cpu(r: Request) -> Ports:
    """Declare the graph that returns the classifier's rows for given ids, with `SCALES` in int8."""
    return Ports((Port("target_ids", "input_ids", "int64", (LISTED,)),), _rows_cpu(r))


def listed_cpu(r: Request) -> Ports:
    """Declare a decoding step that computes logits of given ids only; a token is then its index among them."""
    ports = decoder_cpu(r, LISTED)
    unlisted = Port("unlisted", "unlisted", "float32", ("unlisted_rows", LISTED))
    return Ports((*ports.inputs, *_rows_cpu(r), unlisted), ports.outputs)


def _rows_cpu(r: Request) -> tuple[Port, ...]:
    rows = Port(ROWS, ROWS, "float32", (r.config.d_model, LISTED))
    return (rows, Port(BIASES, BIASES, "float32", (LISTED,))) if r.config.output_bias else (rows,)


def decoder_cpu(r: Request, vocabulary: Axis) -> Ports:
    """Declare a decoding step that updates the cache in place. `targets/cpu/graphs.py` explains its special inputs."""

    def named(name: str, dtype: str, *axes: Axis) -> Port:
        return Port(name, name, dtype, axes)

    beams = named("beam_width", "int32", 1), named("cache_indirection", "int32", SENTENCES, "beams", "positions")
    inputs = (
        Port("target_ids", "input_ids", "int64", ("rows",)),
        named("past_length", "int32", 1),
        *(() if r.config.recurrent else beams),
        named("source_mask", "int32", SENTENCES, LENGTH),
        named("bans", "float32", vocabulary),
        named("candidates", "int64", 1),
        named("by_sentence", "int64", 2),
        named("extensions", "int64", 1),
        named("log_p", "float32", "rows", 1),
        named("first_entry", "int64", "rows", 1),
        *layer_by_layer(cache(r, "past.{}", "rows", "positions", operator_shape), _cross_cpu(r)),
    )
    choice = (
        named("candidate_scores", "float32", "choices", "candidates"),
        named("candidate_tokens", "int64", "choices", "candidates"),
    )
    after = layer_by_layer(cache(r, "present.{}", "rows", "positions", operator_shape))
    scores = named("logits", "float32", "rows", vocabulary)
    return Ports(inputs, (*choice, scores, *after, *attention(r, "rows", LENGTH)))


def step_cpu(r: Request) -> Ports:
    """Declare a decoder-only step that updates buffers in place: a new token of each text, or several of a single text.

    attention_mask: 1 on every position of a text with its new tokens, then 0. logits_to_keep: K, for logits behind each
    text's last K new tokens. The names, and an axis of 1 in the logits, are onnxruntime-genai's.
    """
    read, written = prompt_cpu(r)
    return Ports((*read, Port("kept", "logits_to_keep", "int64", default=1)), (logits(r, "kept_tokens", 1), *written))


def prompt_cpu(r: Request) -> Ports:
    """Declare the same without logits.

    dropped, for models with windows: number of first positions that a text's windowed layers no longer have.
    """
    windowed = any(layer.window is not None for layer in r.config.layers("decoder"))
    inputs = (
        Port("target_ids", "input_ids", "int64", ("rows", "tokens")),
        Port("target_mask", "attention_mask", "int64", ("rows", "total_length")),
        *((Port("dropped", "dropped_positions", "int64", ("dropped_rows", 1), default=0),) if windowed else ()),
        *layer_by_layer(cache(r, "past_key_values.{}", "rows", "positions", grouped_shape)),
    )
    return Ports(inputs, tuple(layer_by_layer(cache(r, "present.{}", "rows", "positions", grouped_shape))))


def _cross_cpu(r: Request) -> list[tuple[Port, ...]]:
    return keys_values("cross", "cross.{}", map(operator_shape, r.config.layers("decoder")), SENTENCES, LENGTH)


def search(r: Request) -> Ports:
    rows = (BATCH, "n_best")
    known = SETTINGS | TEXT_SETTINGS if r.text else SETTINGS
    left_out = () if r.config.has_encoder else ("candidates", "start_id")
    settings = [
        Port(name, name, setting.dtype, setting.axes) for name, setting in known.items() if name not in left_out
    ]
    scores = Port("scores", "scores", "float32", rows)
    if r.text:
        text = Port("text", "text", "string", (BATCH,))
        translations = Port("translations", "translations", "string", rows)
        return Ports((text, *settings), (translations, scores))
    sequences = Port("sequences", "sequences", "int64", (*rows, "length"))
    lengths = Port("lengths", "lengths", "int64", rows)
    attended = attention(r, *rows, "length", LENGTH)
    return Ports((*source(r, BATCH, LENGTH), *settings), (sequences, lengths, scores, *attended))


def vectors(r: Request) -> Ports:
    return Ports((Port("text", "text", "string", (BATCH,)),), vector(r, BATCH, LENGTH))


GRAPHS: dict[str, Callable[[Request], Ports]] = {
    ENCODER: encoder,
    DECODER_FIRST: lambda r: decoder(r, BATCH, first=True, later=False),
    DECODER_NEXT: lambda r: decoder(r, SENTENCES, first=False, later=True),
    DECODER_MERGED: lambda r: decoder(r, BATCH, first=True, later=True),
    MODEL: alone,
    ENCODER_CPU: encoder_cpu,
    DECODER_CPU: lambda r: decoder_cpu(r, r.config.vocab_size),
    ROWS_CPU: rows_cpu,
    LISTED_CPU: listed_cpu,
    STEP_CPU: step_cpu,
    PROMPT_CPU: prompt_cpu,
    SEARCH: search,
    TEXT_VECTORS: vectors,
}
"""{graph: its ports}; each is NAME.onnx in a folder."""

HUGGING_FACE: tuple[dict[str, str], dict[str, str]] = (
    {
        **{name: value for value, name in SOURCE_NAMES.items()},
        "position_ids": "positions",
        "decoder_input_ids": "target_ids",
        "encoder_attention_mask": "source_mask",
        "encoder_hidden_states": "memory",
    },
    {"last_hidden_state": "memory", "logits": "logits", "pooler_output": "pooled", **{f"{x}_logits": x for x in SPANS}},
)
"""{name: value} of inputs and of outputs in graphs from other exporters."""
