"""A family of models that `transformers` keeps like the paper's, with biases everywhere: what Marian and Pegasus share.

A family is a table (`Family`); reading and writing are the same for all. What config.json has no key for is as in the
paper, and as in our defaults. What `write` can write is what `read` would read back equal: nothing here lists what a
family lacks.

Two things differ beyond names. Their position vector holds all sines before all cosines, with the paper's own
frequencies, so its channels are a permutation of ours: `theirs[j] = ours[CHANNELS[j]]`, applied to every axis of width
d_model. And their decoder may start with the padding token. Padding belongs on the right: positions are counted from
the first column, padding included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.positions import sinusoids
from mlx_transformer.families.huggingface import ACTIVATIONS
from mlx_transformer.system.errors import UserError

from .folder import Folder, check_read_back
from .names import BIAS, LAYER, TIES, Ties, channels, permuted, their_names

# Our field: its key in config.json. These have the same meaning on both sides.
FIELDS = {
    "source_vocab_size": "vocab_size",
    "d_model": "d_model",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "heads": "encoder_attention_heads",
    "d_ff": "encoder_ffn_dim",
    "max_positions": "max_position_embeddings",
    "scale_embeddings": "scale_embedding",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "pad_id": "pad_token_id",
    "bos_id": "decoder_start_token_id",
    "eos_id": "eos_token_id",
}
# Sizes that they have twice and we once.
TWINS = {"encoder_attention_heads": "decoder_attention_heads", "encoder_ffn_dim": "decoder_ffn_dim"}
# They have them all; zeros compute what a model without them does.
BIASES = dict(attention_bias=True, feed_forward_bias=True, output_bias=True)
# What else is read of config.json, or means something to who reads it after us.
TYPES: dict[type, tuple[str, ...]] = {
    bool: ("share_encoder_decoder_embeddings", "tie_word_embeddings", "is_encoder_decoder", "use_cache"),
    int: ("decoder_vocab_size", "bos_token_id", "num_hidden_layers", "num_beams", "max_length"),
}
THEIR_ACTIVATIONS = {
    **{their_name: name for name, their_name in ACTIVATIONS.items()},
    "swish": "silu",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What one family's config.json says, and means where it says nothing."""

    model_type: str
    """As config.json names it."""
    name: str
    architectures: str
    """The class of `transformers`."""
    norm_placement: Literal["post", "pre"]
    defaults: Mapping[str, Any]
    """{key of config.json: what `transformers` takes where it is missing}."""
    vocabularies: Literal["one", "two"]
    """Whether encoder and decoder may have embeddings, and vocabularies, of their own."""
    constants: Mapping[str, bool]
    """Keys that `transformers` ignores and other readers, such as CTranslate2's converter, ask for; with another value
    they mean another network."""

    def read(self, folder: Folder) -> tuple[TransformerConfig, dict[str, NDArray], list[str]]:
        """Config and weights of a folder. The attention's biases, or the logits', are left out if all are zero."""
        return _read(self, folder)

    def write(self, checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, NDArray]]:
        """config.json and weights of the model that computes what `checkpoint` does. Biases we lack become zeros."""
        return _write(self, checkpoint)


def _read(family: Family, folder: Folder) -> tuple[TransformerConfig, dict[str, NDArray], list[str]]:
    config, ties = _config(family, folder)
    used: set[str] = set()
    stored: dict[str, NDArray] = {}
    problems: list[str] = []
    for name, shape in parameter_shapes(config).items():
        found_as, _ = their_names(name, ties)
        present = [other for other in found_as if other in folder.tensors]
        used.update(present)
        if found_as == (BIAS,) and not present:  # which transformers makes zeros of
            stored[name] = np.zeros(shape, np.float32)
            continue
        if not present:
            problems.append(f"missing {found_as[0]} {shape}")
            continue
        array = folder.tensors[present[0]]
        if name == "output_proj.bias" and array.shape[:1] == (1,):
            array = array[0]
        if array.shape != shape:
            problems.append(f"{present[0]} is {array.shape}, expected {shape}")
            continue
        copies = [
            other for other in present[1:] if not np.array_equal(folder.tensors[other], folder.tensors[present[0]])
        ]
        problems += [f"{other} differs from {present[0]}, which config.json ties it to" for other in copies]
        stored[name] = array
    for side in ("encoder", "decoder"):
        table = f"model.{side}.embed_positions.weight"
        used.add(table)
        if table in folder.tensors and not _is_sinusoidal(folder.tensors[table], config):
            problems.append(f"{table} holds no sinusoids: its positions are not {family.name}'s")
    problems += [f"unknown {name} {array.shape}" for name, array in folder.tensors.items() if name not in used]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(f"{folder.path}: weights don't fit config.json: {'; '.join(problems[:8])}{more}")
    order = np.argsort(channels(config.d_model))
    weights = {name: permuted(array, their_names(name, ties)[1], order) for name, array in stored.items()}
    return *_without_zero_biases(config, weights), _left_behind(folder, config)


def _write(family: Family, checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, NDArray]]:
    c = dataclasses.replace(checkpoint.config, **BIASES)
    shared = (True, True)  # all that a family of one vocabulary can say: the rest is refused as it is read back
    possible = TIES if family.vocabularies == "two" else {shared: TIES[shared]}
    ties = next((theirs for theirs, ours in possible.items() if ours == c.tie_embeddings), shared)
    values = _values(family, c, ties)
    fields, _, problems = _fields(family, values, {})
    check_read_back(c, fields, problems, family.name, checkpoint.folder)
    order = channels(c.d_model)
    weights = {}
    tensors = dict(checkpoint.tensors())
    dtype = tensors[f"encoder.layers.0.{next(iter(LAYER))}.weight"].dtype
    for name, shape in parameter_shapes(c).items():
        (their_name, *_), side = their_names(name, ties)
        array = permuted(tensors[name] if name in tensors else np.zeros(shape, dtype), side, order)
        weights[their_name] = array[None] if their_name == BIAS else array
    return {**values, "torch_dtype": str(dtype)}, weights


def _values(family: Family, c: TransformerConfig, ties: Ties) -> dict[str, Any]:
    """config.json, but for the type of the weights."""
    share, tie = ties
    values = {key: getattr(c, name) for name, key in FIELDS.items()}
    values |= {second: values[first] for first, second in TWINS.items()}
    # Version 4 of transformers makes both embeddings of one size.
    sides = {"decoder_vocab_size": c.source_vocab_size, "share_encoder_decoder_embeddings": share}
    return {
        "architectures": [family.architectures],
        "model_type": family.model_type,
        "is_encoder_decoder": True,
        **values,
        **(sides if family.vocabularies == "two" else {}),
        "num_hidden_layers": c.encoder_layers,
        "activation_function": ACTIVATIONS.get(c.activation, c.activation),
        "tie_word_embeddings": tie,
        "bos_token_id": c.bos_id,
        "forced_eos_token_id": None,
        "use_cache": True,
        **family.constants,
    }


def _config(family: Family, folder: Folder) -> tuple[TransformerConfig, Ties]:
    """Our config, with every bias that the family has, and what is tied."""
    fields, ties, problems = _fields(family, folder.config, folder.generation)
    if problems:
        raise UserError(f"{folder.path / 'config.json'}: {'; '.join(problems)}")
    try:
        return TransformerConfig.from_dict(fields), ties
    except UserError as error:
        raise UserError(f"{folder.path / 'config.json'}: {error}") from error


def _fields(
    family: Family, config: dict[str, Any], generation: dict[str, Any]
) -> tuple[dict[str, Any], Ties, list[str]]:
    """Fields of our config from config.json and generation_config.json, what is tied, and what isn't the family's."""

    def value(key: str, default: Any = None) -> Any:
        found = (source[key] for source in (config, generation) if source.get(key) is not None)
        return next(found, family.defaults.get(key, default))

    fields = {name: value(key) for name, key in FIELDS.items()}
    booleans = (*TYPES[bool], *family.constants)
    problems = [
        f"{key}={config[key]!r:.60} must be {'true or false' if expected is bool else 'a whole number'}"
        for expected, keys in {**TYPES, bool: booleans}.items()
        for key in keys
        if config.get(key) is not None and type(config[key]) is not expected
    ]
    problems += [
        f"{key} is {'off' if expected else 'on'}"
        for key, expected in family.constants.items()
        if config.get(key) is not None and bool(config[key]) is not expected
    ]
    for first, second in TWINS.items():
        if value(first) != value(second, family.defaults[first]):
            problems.append(f"{first}={value(first)} and {second}={value(second)} are not equal")
    heads, width = fields["heads"], fields["d_model"]
    if isinstance(heads, int) and isinstance(width, int) and heads > 0 and width % heads:
        problems.append(f"d_model={width} is not a multiple of encoder_attention_heads={heads}")
    activation = value("activation_function", "gelu")
    if activation in list(THEIR_ACTIVATIONS):
        activation = THEIR_ACTIVATIONS[activation]
    else:
        problems.append(f"activation_function={activation!r} is not one of {', '.join(THEIR_ACTIVATIONS)}")
    if config.get("is_encoder_decoder") is False:
        problems.append("is_encoder_decoder is off")
    if "quantization_config" in config:
        problems.append("its weights are quantised")
    size = fields["vocab_size"] = fields["source_vocab_size"]
    share = True
    if family.vocabularies == "two":
        share = bool(value("share_encoder_decoder_embeddings", True))
        fields["vocab_size"] = value("decoder_vocab_size", size)
    ties = share, bool(value("tie_word_embeddings", True))
    if share and fields["vocab_size"] != size:
        problems.append(
            f"decoder_vocab_size={fields['vocab_size']!r:.60} is not vocab_size={size!r:.60}, but both share"
        )
        fields["vocab_size"] = size
    ours = {"activation": activation, "norm_placement": family.norm_placement, "tie_embeddings": TIES[ties]}
    return {**fields, **BIASES, **ours}, ties, problems


def _without_zero_biases(
    config: TransformerConfig, weights: dict[str, NDArray]
) -> tuple[TransformerConfig, dict[str, NDArray]]:
    def has(part: str) -> bool:
        return any(array.any() for name, array in weights.items() if part in name and name.endswith("_proj.bias"))

    used = {"attention_bias": has("_attention."), "output_bias": bool(weights["output_proj.bias"].any())}
    config = dataclasses.replace(config, **used)
    return config, {name: weights[name] for name in parameter_shapes(config)}


def _is_sinusoidal(table: NDArray, c: TransformerConfig) -> bool:
    if table.ndim != 2 or table.shape[1] != c.d_model:
        return False
    expected = sinusoids(len(table), c.d_model)[:, channels(c.d_model)]
    return bool(np.abs(table - expected).max(initial=0) <= (1e-3 if table.dtype == np.float16 else 1e-6))


def _left_behind(folder: Folder, c: TransformerConfig) -> list[str]:
    """Rules of its generation that our search doesn't have by itself: pad and the start token are never generated."""
    settings = {**folder.config, **folder.generation}
    banned = []
    for key in ("bad_words_ids", "suppress_tokens"):
        value = settings.get(key)
        never_generated = (c.pad_id, c.bos_id, [c.pad_id], [c.bos_id])
        banned += [ids for ids in value if ids not in never_generated] if isinstance(value, list) else []
    return [f"banned tokens left behind: {banned}"] if banned else []
