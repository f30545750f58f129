"""Convert published models to ours and back, by the tables of a family: keys of config.json, and names of tensors.

Reading reports all problems at once. A family can write a model if the config.json it writes reads back as the same
config (`differences`); no list of unsupported features is needed. So a new field of our config is refused by every
family without a key for it. Only NumPy is used.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import GGUF
from mlx_transformer.core.heads import Head
from mlx_transformer.core.parameters import parameter_shapes, quantizable_shapes
from mlx_transformer.core.positions import channels, reordered, sinusoids
from mlx_transformer.core.quantization import KEY, SAME_KEY, Packed, from_config, packed_tensors
from mlx_transformer.system.errors import UserError, first_of, refusal
from mlx_transformer.system.fields import field_types
from mlx_transformer.system.tensors import Stored, float_type, is_float

from .keys import Given, Key, Line, Values

Tensors = Mapping[str, Any]
"""{name: array}. A folder's arrays are read when NumPy needs their numbers; together they may exceed memory."""


@dataclass(frozen=True)
class Published:
    """A published model's folder, parsed but not checked."""

    path: Path
    config: Values
    """The contents of config.json."""
    generation: Values
    """The contents of generation_config.json, {} if there is none."""
    tensors: Tensors
    """Arrays in their files (`system/tensors.py`)."""

    @property
    def config_file(self) -> Path:
        """The file with the config, for errors: config.json, or the GGUF file itself."""
        return self.path if self.path.is_file() else self.path / "config.json"


@dataclass(frozen=True)
class At:
    """The place of a parameter of ours in the family's files, and its form there."""

    name: str
    copies: tuple[str, ...] = ()
    """Other names of the same tensor. A file needs only one of the names; if it has several, they must be equal."""
    each: bool = False
    """Write the tensor under each of its names, for models whose tensors `transformers` doesn't share."""
    last: bool = False
    """Read the last name that is present: version 5 of transformers has a separate bias for an untied classifier."""
    leading: bool = False
    """Stored as (1, V) instead of (V,)."""
    unread: int = 0
    """Number of first rows, which the model never reads: dropped on import, written as zeros."""
    rows: tuple[int, int] | None = None
    """(first, all): our rows start at row `first` of a joint matrix of `all` rows (`joint`)."""
    transposed: bool = False
    """A matrix is stored as (in, out), as in GPT-2's Conv1D."""
    offset: int = 0
    """The file has w, and the model uses `offset` + w, as in Gemma's norms. The sum is float32, as in the original."""
    optional: bool = False
    """A missing tensor means zeros."""


QKV = ("query", "key", "value")


def joint(theirs: At, ours: str, sizes: Mapping[Any, Any]) -> dict[str, str | At]:
    """Lines of `Family.names` for the rows of a joint matrix, in their order.

    ours: the name of each part with `{}` for its key in `sizes`, {part: rows}, e.g. {"query": 64, "key": 16}.
    """
    ends = list(accumulate(sizes.values()))
    first = zip(sizes, [0, *ends], strict=False)
    return {ours.format(part): dataclasses.replace(theirs, rows=(row, ends[-1])) for part, row in first}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family of published models is stored: config.json, tensor names, and fixed properties.

    Patterns in `names`, e.g. {"(encoder|decoder).norm": "model.(encoder|decoder).layer_norm"}: `*` is a layer's number.
    Choices are matched from left to right: if our first `(a|b)` is b, their first `(x|y)` is y, and so on; further
    choices in their name follow our last. A name without `.weight` or `.bias` stands for both, also in `sinusoids` and
    `ignored`.
    """

    name: str
    """Name in messages, e.g. "BART"."""
    model_type: str
    """model_type in config.json, e.g. "bart"."""
    architecture: str
    """Class of `transformers`, e.g. "BartForConditionalGeneration"."""
    ours: Mapping[str, Any]
    """Fields of our config with the same value in all models of the family. For a bias among them, a model of ours
    without it is written with zeros. Fields that are neither here nor in `keys` or `derived` have our defaults; a model
    with another value can't be written."""
    keys: Sequence[Line]
    """The lines of config.json, in the order in which they are written. Other keys of a file are ignored. A missing or
    null key has its value in generation_config.json, if any, else the line's default."""
    names: Callable[[Any], Mapping[str, str | At]]
    """From our config: {parameter or module of ours: where it is stored}, for every parameter of `parameter_shapes`.
    Entries for parameters a config lacks are ignored."""
    derived: Callable[[Values], Values] = dict
    """Adds fields that follow from others, e.g. `d_v` from `d_k`. It is called with fields within their bounds."""
    counts_tokens: bool = False
    """Whether padding takes no position and may be on the left; else it must be on the right."""
    mlx_prefix: str = ""
    """In folders of mlx-lm in place of `prefix`, if they differ; matrices aren't transposed there."""
    prefix: str = ""
    """Prefix of all names, e.g. "bert.", except in a bare encoder; names are read with and without it."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """{end of a name: its spelling in old files}, e.g. {"LayerNorm.weight": "LayerNorm.gamma"}."""
    untied_alike: bool = False
    """Whether "source-target" and "none" look the same in config.json, so that the tensors decide between them."""
    sinusoids: tuple[str, ...] = ()
    """Tensors with the table of sinusoids: compared with ours, then dropped."""
    ignored: tuple[str, ...] = ()
    """Tensors the model doesn't need."""

    @property
    def architecture_of_ours(self) -> str:
        return str(self.ours.get("architecture", "encoder-decoder"))

    def read_config(self, config: Values, generation: Values) -> tuple[Values, list[str]]:
        """Fields of our config from config.json and generation_config.json, and all problems of these files."""
        defaults = {key: default for line in self.keys for key, default in line.defaults.items()}
        lines, fields = Given(config, generation, defaults), dict(self.ours)
        problems = [problem for line in self.keys for problem in line.read(lines, fields)]
        problems += _unread_quantization(config)
        own = {name.partition(".")[2]: fields.pop(name) for name in list(fields) if name.startswith("decoder.")}
        if different := {name: value for name, value in own.items() if fields.get(name) != value}:
            fields["decoder"] = different
        kinds = field_types(TransformerConfig)
        sound = not problems and all(kind.accepts(fields[n]) for n, kind in kinds.items() if n in fields)
        return (self.derived(fields) if sound else fields), problems

    def unread(self, config: Values) -> list[str]:
        """Keys of config.json that no line reads and that may change the model's outputs, e.g. ["alibi=True"]."""
        read = {key for line in self.keys for key in line.defaults}
        said = {key: value for key, value in config.items() if value not in (None, False, "", [], {})}
        return [f"{k}={value!r:.40}" for k, value in said.items() if k not in read and not HARMLESS.fullmatch(k)]

    def write_config(self, config: Any) -> Values:
        """The contents of config.json, without the type of the weights."""
        one_size = config.architecture == "encoder-decoder" and config.source_vocab_size == config.vocab_size
        if self.untied_alike and config.tie_embeddings == "none" and one_size:
            config = dataclasses.replace(config, tie_embeddings="source-target")
        named = {"architectures": [self.architecture], "model_type": self.model_type}
        return named | {key: value for line in self.keys for key, value in line.write(config).items()}

    def read(self, config: TransformerConfig, tensors: Tensors) -> tuple[dict[str, Any], list[str]]:
        """Our parameters from their tensors, and all problems of the tensors."""
        weights: dict[str, Any] = {}
        problems: list[str] = []
        used: set[str] = set()
        places, heads, dtype = self.places(config), self.other_heads(config, tensors), _float_type(tensors)
        for name, shape in parameter_shapes(config).items():
            names, at = places[name]
            present = [n for n in names if n in tensors]
            used.update(present)
            present = present[-1:] if at.last else present
            if not present:
                weights[name] = np.zeros(shape, dtype)
                problems += [] if at.optional else [f"missing {names[0]} {shape}"]
                continue
            array = tensors[present[0]]
            array = array[0] if at.leading and array.shape[:1] == (1,) else array
            array = _transposed(array) if at.transposed else array
            first, rows = at.rows or (0, shape[0] + at.unread)
            stored = (rows, *shape[1:])
            if array.shape != stored:
                sizes = [x[::-1] if at.transposed else x for x in (array.shape, stored)]
                problems.append(f"{present[0]} is {sizes[0]}, expected {sizes[1]}")
            if not is_float(array.dtype):
                problems.append(f"{present[0]} has type {array.dtype}, not floating point")
            differing = (n for n in present[1:] if not _equal(tensors[n], tensors[present[0]]))
            problems += [f"{n} differs from {present[0]}, which config.json ties it to" for n in differing]
            if at.rows and array.shape == stored:
                array = array[first : first + shape[0]]
            array = array[at.unread :] if at.unread else array
            weights[name] = _plus(array, at.offset) if at.offset else array
        for name, array in tensors.items():
            if name in used or name in heads or self._means_nothing(name):
                continue
            if not _is_any(name, self.sinusoids):
                problems.append(f"unknown {name} {array.shape}")
            elif not _holds_sinusoids(array, config):
                problems.append(f"{name} differs from {self.name}'s sinusoids")
        return weights, problems

    def other_heads(self, config: TransformerConfig, tensors: Tensors) -> list[str]:
        """Names of tensors of heads that an encoder-only model doesn't use, e.g. BERT's masked-LM head."""
        if config.architecture != "encoder":
            return []
        each = (dataclasses.replace(config, head=head, output_bias=True, tie_embeddings="all") for head in HEADS)
        own, of_all = (
            {n for c in cs for names, _ in self.places(c).values() for n in names} for cs in ([config], each)
        )
        return sorted(name for name in tensors if name in of_all - own and not self._means_nothing(name))

    def _means_nothing(self, name: str) -> bool:
        return _is_any(name, self.ignored) or _is_any(self.prefix + name, self.ignored)

    def write(self, config: TransformerConfig, weights: Tensors) -> dict[str, NDArray]:
        """Their tensors from our parameters, under the first of their names or (`At.each`) under each."""
        written: dict[str, Any] = {}
        dtype = _float_type(weights)
        for name, (names, at) in self.places(config).items():
            array = weights[name]
            if at.unread:
                array = np.concatenate([np.zeros((at.unread, *array.shape[1:]), array.dtype), array])
            array = array[None] if at.leading else array
            array = _plus(array, -at.offset).astype(dtype) if at.offset else array
            array = _transposed(array) if at.transposed else array
            if at.rows and at.rows[0]:  # parameters come in the order of the rows
                array = _joined(written[names[0]], array, axis=-1 if at.transposed else 0)
            written |= dict.fromkeys(names if at.each else names[:1], array)
        return written

    def places(self, config: TransformerConfig) -> dict[str, tuple[list[str], At]]:
        """{parameter of ours: (its names in their files, the first of which is written; how it is stored)}"""
        table = [
            (_regex(ours), ours, theirs if isinstance(theirs, At) else At(theirs))
            for ours, theirs in self.names(config).items()
        ]
        places = {}
        for name in parameter_shapes(config):
            matches = ((ours, at, match) for regex, ours, at in table if (match := regex.fullmatch(name)))
            place = next(matches, None)
            if place is None:
                raise LookupError(f"{self.name}: no line of its names has {name}")
            ours, at, match = place
            places[name] = self._spelled([_filled(t, ours, match) for t in (at.name, *at.copies)], config), at
        return places

    def _spelled(self, names: list[str], config: TransformerConfig) -> list[str]:
        """The names to write, then those of other files: with or without prefix, old spellings."""
        if not self.prefix:
            return names
        short = [name.removeprefix(self.prefix) for name in names]
        both = [*short, *names] if config.head.kind in BARE else [*names, *short]
        ends = self.spellings.items()
        old = (name.removesuffix(end) + other for name in both for end, other in ends if name.endswith(end))
        return list(dict.fromkeys([*both, *old]))


def imported(family: Family, published: Published) -> tuple[TransformerConfig, dict[str, Any]]:
    """Convert a published model to our config and weights. Raises `UserError` with all problems.

    Quantised matrices are `Packed`, except for tables that are only added (positions, token types): these become
    floats. Biases that are off by default in our config are dropped if all their values are zero, and so is a single
    token type.
    """
    config = config_of(family, published.config, published.generation, published.config_file)
    family = stored_as(family, published)
    tensors = with_integers(family, published).tensors
    config = _tied_as_stored(family, _pooled_as_stored(family, config, tensors), tensors)
    weights, problems = family.read(config, tensors)
    if problems:
        raise refusal(f"{published.path}: weights don't fit config.json", problems, published.path)
    for name in (*_biases(family), *(["token_types"] if config.token_types == 1 else [])):
        without = dataclasses.replace(config, **{name: False if name != "token_types" else 0})
        shapes = parameter_shapes(without)
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        if not defaults[name] and not any(np.any(array) for n, array in weights.items() if n not in shapes):
            config, weights = without, {n: weights[n] for n in shapes}
    matrices = quantizable_shapes(config)
    added = {n: x for n, x in weights.items() if isinstance(x, Packed) and n not in matrices}
    return config, weights | {n: Stored(x.shape, x.dtype, x.__array__) for n, x in added.items()}


def _unread_quantization(config: Values) -> list[str]:
    """Problems with quantised weights in another format than mlx-lm's."""
    others = config.get(SAME_KEY)
    if config.get("quantize_activations"):
        return ["quantize_activations: its activations are rounded too, which nothing here computes"]
    own = others is None or (isinstance(others, dict) and "group_size" in others and "quant_method" not in others)
    if config.get(KEY) is not None or own:
        return []
    method = others.get("quant_method", "another program") if isinstance(others, dict) else others
    advice = "import the model that it was made from, or what mlx_lm.convert makes of it"
    return [f"its weights are quantised by {method!s:.40}: {advice}"]


def of_mlx_lm(family: Family) -> Family:
    """The family as mlx-lm stores it."""

    def names(config: Any) -> dict[str, str | At]:
        places = ((ours, at if isinstance(at, At) else At(at)) for ours, at in family.names(config).items())
        return {
            ours: dataclasses.replace(at, name=at.name.replace(family.prefix, family.mlx_prefix), transposed=False)
            for ours, at in places
        }

    return dataclasses.replace(family, names=names, prefix=family.mlx_prefix) if family.mlx_prefix else family


def stored_as(family: Family, published: Published) -> Family:
    """The family, in mlx-lm's form if the model's tensors have mlx-lm's names."""
    theirs = family.mlx_prefix and any(name.startswith(family.mlx_prefix) for name in published.tensors)
    return of_mlx_lm(family) if theirs else family


def with_integers(family: Family, published: Published) -> Published:
    """Join the tensors of each matrix that mlx-lm has quantised to a `Packed`."""
    tensors, values = published.tensors, published.config.get(KEY, published.config.get(SAME_KEY))
    if values is None or not any(name.endswith(".scales") for name in tensors):
        return published
    config = config_of(family, published.config, published.generation, published.config_file)
    shapes, matrices = parameter_shapes(config), dict[str, tuple[int, ...]]()
    for parameter, (names, _) in family.places(config).items():
        present = (name for name in names if name in tensors and f"{name.removesuffix('.weight')}.scales" in tensors)
        matrices |= {name: (tensors[name].shape[0], shapes[parameter][1]) for name in present}
    known = {"group_size", "bits", "mode", *(name.removesuffix(".weight") for name in matrices)}
    try:
        read = {k: v for k, v in values.items() if k in known} if isinstance(values, dict) else values
        schemes = from_config(read, {name: tensor.shape for name, tensor in tensors.items()}, matrices)
    except UserError as error:
        raise UserError(f"{published.config_file}: {error}") from error
    return dataclasses.replace(published, tensors=packed_tensors(tensors, schemes))


def config_of(family: Family, config: Values, generation: Values, where: Path) -> TransformerConfig:
    """Our config from their files. Raises `UserError` with the path `where` and all problems."""
    fields, problems = family.read_config(config, generation)
    if problems:
        raise refusal(where, problems, where if where.suffix == GGUF else where.parent)
    try:
        return TransformerConfig.from_dict(fields)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def differences(family: Family, config: TransformerConfig) -> list[str]:
    """Reasons why the family can't store such a model, e.g. ["gated=True, BART has False"]; [] if it can.

    Writes config.json, reads it back, and lists the fields that differ.
    """
    c = _as_written(family, config)
    ours = vars(c)
    fields, problems = family.read_config(family.write_config(c), {})
    refused: list[str] = []
    try:
        back = vars(TransformerConfig.from_dict(fields))
    except UserError as error:  # no valid config: compare the fields that are known
        known = {field.name: field.default for field in dataclasses.fields(TransformerConfig)} | fields
        back = {name: value for name, value in known.items() if value is not None}
        refused = [str(error)]
    alike = {"source-target", "none"} if family.untied_alike else set()
    changed = {name: value for name, value in ours.items() if name in back and back[name] != value}
    if {back.get("tie_embeddings"), ours["tie_embeddings"]} <= alike:
        changed.pop("tie_embeddings", None)
    differing = [
        f"{name}={value!r}, {family.name} has {back[name]!r}" for name, value in changed.items() if name not in TRAINING
    ]
    return [*differing, *problems] or refused


def exported(
    family: Family, config: TransformerConfig, tensors: Iterable[tuple[str, Any]], where: Path
) -> tuple[Values, dict[str, Any]]:
    """config.json and tensors of the family's model with the same outputs as ours. Tensors in files aren't read yet.

    where: path of our model, for errors. Raises `UserError` with all reasons if the family has no such model.
    """
    if reasons := differences(family, config):
        raise UserError(f"{where}: {family.name} has no such model: {first_of(reasons)}")
    c, ours = _as_written(family, config), dict(tensors)
    if (order := channel_order(family, config)) is not None:
        ours = reordered(ours, order)
    dtype = _float_type(ours)
    weights = {n: ours[n] if n in ours else np.zeros(shape, dtype) for n, shape in parameter_shapes(c).items()}
    types = dict.fromkeys(("dtype", "torch_dtype"), str(dtype))  # of versions 5 and 4 of transformers
    return {**types, **written_config(family, c)}, family.write(c, weights)


def written_config(family: Family, config: TransformerConfig) -> Values:
    """config.json of the family's model with the same outputs as ours, without the type of the weights."""
    return family.write_config(_as_written(family, config))


def channel_order(family: Family, config: TransformerConfig) -> NDArray[np.intp] | None:
    """The order of the d_model channels in the family's weights, if its sinusoids have another order than ours; else
    None."""
    return None if _as_written(family, config).positions == config.positions else channels(config.d_model)


TRAINING = ("dropout", "attention_dropout", "activation_dropout")
"""Fields without effect on a model's outputs; a family may have no keys for them."""
BARE = ("hidden", "pooled")
"""Kinds of heads of a bare encoder."""
HEADS = (
    Head(activation="gelu", norm=True),
    *(Head(kind=kind, activation="gelu", labels=("one",)) for kind in ("classes", "token-classes")),
    Head(kind="spans", activation="gelu"),
)
"""A head of each kind with a classifier, with all its parts."""
OF_TRAINING = (
    r"\w*(dropout|layerdrop|gradient_checkpointing|_loss)\w*|init\w*_(std|range|factor|cutoff_factor)|init_std"
)
OF_SEARCH = (
    r"(max|min)_(new_tokens|length)|num_(beams|beam_groups|return_sequences)|do_sample|temperature|top_[kp]|typical_p"
    r"|early_stopping|\w+_penalty|\w*no_repeat_ngram_size|(begin_)?suppress_tokens|bad_words_ids|remove_invalid_values"
    r"|force\w*_(id|ids|generated)|generation_config|prefix|suffix|max_position|task_specific_params"
)
OF_FILES = (
    r"_\w+|architectures|auto_map|model_type|torch_dtype|dtype|transformers\w*|tokenizer_class|torchscript|language|tags"
    r"|(output|return|use_bfloat16|use_cache)\w*|\w*_tokens?(_ids?|_index)?|id2label|label2id|num_labels|problem_type"
    r"|finetuning_task|chunk_size_feed_forward|is_encoder_decoder|pretraining_tp|quantization(_config)?"
)
OF_OLDER_VERSIONS = (
    r"pooler_\w+|directionality|n_positions|n_ctx|static_position_embeddings|extra_pos_embeddings|normalize_\w+"
    r"|add_(final_layer_norm|bias_logits)|save_step|sinusoidal_pos_embds|dense_act_fn|is_gated_act|num_hidden_layers"
    r"|summary_\w+|deterministic_flash_attn|reference_compile|repad_logits_with_grad|sparse_pred_ignore_index"
)
HARMLESS = re.compile("|".join((OF_TRAINING, OF_SEARCH, OF_FILES, OF_OLDER_VERSIONS)))
"""Keys of config.json that no line reads, and that `transformers` doesn't use or uses only in training. Keys of the
search are read by `generation.py`."""
EMBEDDINGS = ("embedding.weight", "source_embedding.weight", "target_embedding.weight", "output_proj.weight")
TIES = ("all", "source-target", "target-output", "none")


def _pooled_as_stored(family: Family, config: TransformerConfig, tensors: Tensors) -> TransformerConfig:
    """The config without a pooler if the files have none; config.json doesn't say."""
    if config.head.kind != "pooled" or any(name in tensors for name in family.places(config)["head_proj.weight"][0]):
        return config
    return dataclasses.replace(config, head=Head(kind="hidden"))


def _tied_as_stored(family: Family, config: TransformerConfig, tensors: Tensors) -> TransformerConfig:
    """The config with embeddings tied as in the files, if config.json ties tensors with different values.

    Version 5 of transformers ties matrices that are stored only once, and may save "all tied" for an untied model.
    """

    def copies(c: TransformerConfig) -> Iterator[list[NDArray]]:
        places = family.places(c)
        return ([tensors[n] for n in places[name][0] if n in tensors] for name in EMBEDDINGS if name in places)

    def agree(arrays: list[NDArray]) -> bool:
        return all(_equal(array, arrays[0]) for array in arrays[1:])

    if all(agree(arrays) for arrays in copies(config)):
        return config
    if config.architecture == "encoder":
        return config if config.head.kind != "vocabulary" else dataclasses.replace(config, tie_embeddings="none")
    one_size = config.has_encoder and config.source_vocab_size == config.vocab_size
    others = [t for t in TIES if t in ("target-output", "none") or one_size]
    looser = (dataclasses.replace(config, tie_embeddings=tie) for tie in others)
    return next((c for c in looser if all(arrays and agree(arrays) for arrays in copies(c))), config)


def _transposed(array: Any) -> Packed | Stored:
    if isinstance(array, Packed):  # these are (out, in) always, as a scale belongs to inputs
        return array
    return Stored(array.shape[::-1], array.dtype, lambda: np.asarray(array).T)


def _float_type(tensors: Tensors) -> np.dtype:
    return float_type(getattr(array, "scales", array) for array in tensors.values())


def _plus(array: Any, offset: int) -> Stored:
    """array + offset, summed in float32."""
    dtype = np.promote_types(array.dtype, np.float32)
    return Stored(array.shape, dtype, lambda: np.asarray(array, dtype) + dtype.type(offset))


def _joined(first: Any, second: Any, axis: int) -> Packed | Stored:
    """Join two matrices; floats unless both are quantised by the same scheme."""
    if isinstance(first, Packed) and isinstance(second, Packed) and first.scheme == second.scheme:
        return Packed.joined(first, second)
    shape = list(first.shape)
    shape[axis] += second.shape[axis]
    return Stored(tuple(shape), first.dtype, lambda: np.concatenate([first, second], axis))


def _equal(a: Any, b: Any) -> bool:
    """Compares shapes first, so that no number is read if they differ."""
    return a.shape == b.shape and np.array_equal(a, b)


def _biases(family: Family) -> Iterator[str]:
    """The bias fields with value True in all models of the family."""
    return (name for name, value in family.ours.items() if name.endswith("_bias") and value is True)


def _as_written(family: Family, config: TransformerConfig) -> TransformerConfig:
    """The config of the same model in the family's form: all of its biases, a token type, its order of sinusoids."""
    halves = config.positions == "sinusoidal" and family.ours.get("positions") == "sinusoidal_halves"
    positions = "sinusoidal_halves" if halves else config.positions
    biases = (name for name in _biases(family) if name != "output_bias" or config.head.classifies)
    written: dict[str, Any] = dict(positions=positions, **dict.fromkeys(biases, True))
    output = family.ours.get("attention_output_bias")
    if "attention_bias" in written and (output is not False or not config.output_proj_bias):
        written["attention_output_bias"] = output
    typed = any(isinstance(line, Key) and line.ours == "token_types" for line in family.keys)
    if typed and config.architecture == "encoder":
        written["token_types"] = config.token_types or 1  # `transformers` looks a type up always; a row of zeros
    return dataclasses.replace(config, **written)


def _holds_sinusoids(table: Any, c: TransformerConfig) -> bool:
    if table.ndim != 2 or table.shape[1] != c.d_model:
        return False
    first = min(c.first_position, table.shape[0])  # rows before it are never read
    numbers = np.asarray(table, np.float32)[first:]
    # M2M100 computes angles in float32: at position 1000 its sines are wrong by 7e-5.
    most = 1e-3 if c.positions == "sinusoidal_concat" else 1e-6
    if not (numbers.view(np.uint32) & 0xFFFF).any():  # the table was rounded to bfloat16
        most = 4e-3
    elif np.array_equal(numbers.astype(np.float16), numbers):
        most = 1e-3
    expected = sinusoids(len(numbers), c.d_model, c.positions, first=first)
    return bool(np.abs(numbers - expected).max(initial=0) <= most)


HOLE = re.compile(r"\(([^)]*)\)|\*")
"""A choice `(a|b)`, or `*`, a layer's number."""


def _regex(pattern: str) -> re.Pattern[str]:
    """Compile a name pattern to a regex; without a suffix it matches both .weight and .bias."""
    parts, end = [], 0
    for hole in HOLE.finditer(pattern):
        parts += [re.escape(pattern[end : hole.start()]), hole[0] if hole[1] else r"(\d+)"]
        end = hole.end()
    return re.compile("".join([*parts, re.escape(pattern[end:])]) + r"(\.weight|\.bias|)")


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    return any(_regex(pattern).fullmatch(name) for pattern in patterns)


def _filled(theirs: str, ours: str, match: re.Match[str]) -> str:
    """Their name, with the choices and layer numbers of a match of our pattern."""
    holes = list(zip(HOLE.finditer(ours), match.groups(), strict=False))
    choices = [hole[1].split("|").index(value) for hole, value in holes if hole[1]]
    numbers = iter([value for hole, value in holes if not hole[1]])
    chosen = chain(choices, repeat(choices[-1])) if choices else iter(())

    def fill(hole: re.Match[str]) -> str:
        return hole[1].split("|")[next(chosen)] if hole[1] else next(numbers)

    try:
        return HOLE.sub(fill, theirs) + match.groups()[-1]
    except (IndexError, StopIteration):
        raise LookupError(f"{theirs!r} has other choices or numbers than {ours!r}") from None
