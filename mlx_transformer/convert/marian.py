"""Marian (Junczys-Dowmunt et al. 2018) as `transformers` keeps it: the paper's model, with biases everywhere.

Where config.json says nothing, Marian is the paper's model, and so are our defaults. What `write` can write is what
`read` would read back equal: nothing here lists what Marian lacks.

Two things differ beyond names. Marian's position vector holds all sines before all cosines, with the paper's own
frequencies, so its channels are a permutation of ours: `marian[j] = ours[CHANNELS[j]]`, applied to every axis of width
d_model. And its decoder may start with the padding token. Padding belongs on the right: Marian counts positions from
the first column, padding included.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.spec.checkpoint import Checkpoint
from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.huggingface import ACTIVATIONS
from mlx_transformer.spec.parameters import parameter_shapes
from mlx_transformer.spec.positions import sinusoids

from .huggingface import Folder, check_read_back

MODEL_TYPE = "marian"

# Our field: (Marian's key, MarianConfig's default). These have the same meaning on both sides.
FIELDS: dict[str, tuple[str, Any]] = {
    "source_vocab_size": ("vocab_size", 58101),
    "d_model": ("d_model", 1024),
    "encoder_layers": ("encoder_layers", 12),
    "decoder_layers": ("decoder_layers", 12),
    "heads": ("encoder_attention_heads", 16),
    "d_ff": ("encoder_ffn_dim", 4096),
    "max_positions": ("max_position_embeddings", 1024),
    "scale_embeddings": ("scale_embedding", False),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.0),
    "activation_dropout": ("activation_dropout", 0.0),
    "pad_id": ("pad_token_id", 58100),
    "bos_id": ("decoder_start_token_id", 58100),
    "eos_id": ("eos_token_id", 0),
}
# Sizes that Marian has twice and we once.
TWINS = {"encoder_attention_heads": "decoder_attention_heads", "encoder_ffn_dim": "decoder_ffn_dim"}
# Marian has them all; zeros compute what a model without them does.
BIASES = dict(attention_bias=True, feed_forward_bias=True, output_bias=True)
# Keys of older config.json files that `transformers`' Marian ignores; true, they would mean another network.
OTHER_NETWORKS = ("normalize_before", "normalize_embedding", "add_final_layer_norm", "add_bias_logits")
# What else is read of config.json, or means something to who reads it after us.
TYPES: dict[type, tuple[str, ...]] = {
    bool: (
        *("share_encoder_decoder_embeddings", "tie_word_embeddings", "is_encoder_decoder", "use_cache"),
        *OTHER_NETWORKS,
    ),
    int: ("decoder_vocab_size", "bos_token_id", "num_hidden_layers", "num_beams", "max_length"),
}
MARIAN_ACTIVATIONS = {
    **{marian_name: name for name, marian_name in ACTIVATIONS.items()},
    "swish": "silu",
    "gelu_new": "gelu_tanh",
}

# Our module within a layer: (Marian's, the side of it that is d_model wide). Attention biases lie on the other side.
READS, WRITES, NORM = "reads", "writes", "norm"
LAYER = {
    "self_attention.query_proj": ("self_attn.q_proj", READS),
    "self_attention.key_proj": ("self_attn.k_proj", READS),
    "self_attention.value_proj": ("self_attn.v_proj", READS),
    "self_attention.output_proj": ("self_attn.out_proj", WRITES),
    "self_attention_norm": ("self_attn_layer_norm", NORM),
    "cross_attention.query_proj": ("encoder_attn.q_proj", READS),
    "cross_attention.key_proj": ("encoder_attn.k_proj", READS),
    "cross_attention.value_proj": ("encoder_attn.v_proj", READS),
    "cross_attention.output_proj": ("encoder_attn.out_proj", WRITES),
    "cross_attention_norm": ("encoder_attn_layer_norm", NORM),
    "feed_forward.up_proj": ("fc1", READS),
    "feed_forward.down_proj": ("fc2", WRITES),
    "feed_forward_norm": ("final_layer_norm", NORM),
}
SHARED, LM_HEAD = "model.shared.weight", "lm_head.weight"
ENCODER, DECODER = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
BIAS = "final_logits_bias"  # (1, V)
# Marian's (share_encoder_decoder_embeddings, tie_word_embeddings): {our matrix: the names it may go by, ours first}.
MATRICES: dict[tuple[bool, bool], dict[str, tuple[str, ...]]] = {
    (True, True): {"embedding.weight": (SHARED, ENCODER, DECODER, LM_HEAD)},
    (False, True): {"source_embedding.weight": (ENCODER,), "target_embedding.weight": (DECODER, LM_HEAD)},
    (False, False): {
        "source_embedding.weight": (ENCODER,),
        "target_embedding.weight": (DECODER,),
        "output_proj.weight": (LM_HEAD,),
    },
    # Which we don't have: both embeddings are stored.
    (True, False): {
        "source_embedding.weight": (SHARED, ENCODER, DECODER),
        "target_embedding.weight": (SHARED, ENCODER, DECODER),
        "output_proj.weight": (LM_HEAD,),
    },
}
TIES = {(True, True): "all", (False, True): "target-output", (False, False): "none", (True, False): "none"}


def channels(d_model: int) -> NDArray[np.intp]:
    """CHANNELS: which of our channels each of Marian's is (d_model,)."""
    return np.r_[0:d_model:2, 1:d_model:2]


def read(folder: Folder) -> tuple[TransformerConfig, dict[str, NDArray], list[str]]:
    """Config and weights of a Marian folder. The attention's biases, or the logits', are left out if all are zero."""
    config, ties = _config(folder)
    used: set[str] = set()
    stored: dict[str, NDArray] = {}
    problems: list[str] = []
    for name, shape in parameter_shapes(config).items():
        marian_names, _ = _names(name, ties)
        present = [other for other in marian_names if other in folder.tensors]
        used.update(present)
        if marian_names == (BIAS,) and not present:  # which transformers makes zeros of
            stored[name] = np.zeros(shape, np.float32)
            continue
        if not present:
            problems.append(f"missing {marian_names[0]} {shape}")
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
            problems.append(f"{table} holds no sinusoids: its positions are not Marian's")
    problems += [f"unknown {name} {array.shape}" for name, array in folder.tensors.items() if name not in used]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(f"{folder.path}: weights don't fit config.json: {'; '.join(problems[:8])}{more}")
    order = np.argsort(channels(config.d_model))
    weights = {name: _permuted(array, _names(name, ties)[1], order) for name, array in stored.items()}
    return *_without_zero_biases(config, weights), _left_behind(folder, config)


def write(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, NDArray]]:
    """config.json and weights of the Marian that computes what `checkpoint` does. Biases we don't have become zeros."""
    c = dataclasses.replace(checkpoint.config, **BIASES)
    ties = next((marians for marians, tied in TIES.items() if tied == c.tie_embeddings), (True, True))
    values = _values(c, ties)
    fields, _, problems = _fields(values, {})
    check_read_back(c, fields, problems, "Marian", checkpoint.folder)
    order = channels(c.d_model)
    weights = {}
    tensors = dict(checkpoint.tensors())
    dtype = tensors[f"encoder.layers.0.{next(iter(LAYER))}.weight"].dtype
    for name, shape in parameter_shapes(c).items():
        (marian_name, *_), side = _names(name, ties)
        array = _permuted(tensors[name] if name in tensors else np.zeros(shape, dtype), side, order)
        weights[marian_name] = array[None] if marian_name == BIAS else array
    return {**values, "torch_dtype": str(dtype)}, weights


def _values(c: TransformerConfig, ties: tuple[bool, bool]) -> dict[str, Any]:
    """config.json, but for the type of the weights."""
    share, tie = ties
    values = {key: getattr(c, name) for name, (key, _) in FIELDS.items()}
    values |= {second: values[first] for first, second in TWINS.items()}
    return {
        "architectures": ["MarianMTModel"],
        "model_type": MODEL_TYPE,
        "is_encoder_decoder": True,
        **values,
        "decoder_vocab_size": c.source_vocab_size,  # version 4 of transformers makes both embeddings of one size
        "num_hidden_layers": c.encoder_layers,
        "activation_function": ACTIVATIONS.get(c.activation, c.activation),
        "share_encoder_decoder_embeddings": share,
        "tie_word_embeddings": tie,
        "bos_token_id": c.bos_id,
        "forced_eos_token_id": None,
        "use_cache": True,
    }


def _config(folder: Folder) -> tuple[TransformerConfig, tuple[bool, bool]]:
    """Our config, with every bias that Marian has, and what Marian ties."""
    fields, ties, problems = _fields(folder.config, folder.generation)
    if problems:
        raise UserError(f"{folder.path / 'config.json'}: {'; '.join(problems)}")
    try:
        return TransformerConfig.from_dict(fields), ties
    except UserError as error:
        raise UserError(f"{folder.path / 'config.json'}: {error}") from error


def _fields(config: dict[str, Any], generation: dict[str, Any]) -> tuple[dict[str, Any], tuple[bool, bool], list[str]]:
    """Fields of our config from config.json and generation_config.json, what is tied, and what isn't Marian's."""

    def value(key: str, default: Any) -> Any:
        return next((source[key] for source in (config, generation) if source.get(key) is not None), default)

    fields = {name: value(key, default) for name, (key, default) in FIELDS.items()}
    problems = [
        f"{key}={config[key]!r:.60} must be {'true or false' if expected is bool else 'a whole number'}"
        for expected, keys in TYPES.items()
        for key in keys
        if config.get(key) is not None and type(config[key]) is not expected
    ]
    problems += [f"{key} is on" for key in OTHER_NETWORKS if config.get(key)]
    for first, second in TWINS.items():
        default = next(default for key, default in FIELDS.values() if key == first)
        if value(first, default) != value(second, default):
            problems.append(f"{first}={value(first, default)} and {second}={value(second, default)} are not equal")
    heads, width = fields["heads"], fields["d_model"]
    if isinstance(heads, int) and isinstance(width, int) and heads > 0 and width % heads:
        problems.append(f"d_model={width} is not a multiple of encoder_attention_heads={heads}")
    activation = value("activation_function", "gelu")
    if activation in list(MARIAN_ACTIVATIONS):
        activation = MARIAN_ACTIVATIONS[activation]
    else:
        problems.append(f"activation_function={activation!r} is not one of {', '.join(MARIAN_ACTIVATIONS)}")
    if config.get("is_encoder_decoder") is False:
        problems.append("is_encoder_decoder is off")
    if "quantization_config" in config:
        problems.append("its weights are quantised")
    ties = bool(value("share_encoder_decoder_embeddings", True)), bool(value("tie_word_embeddings", True))
    size = fields["source_vocab_size"]
    fields["vocab_size"] = value("decoder_vocab_size", size)
    if ties[0] and fields["vocab_size"] != size:
        problems.append(
            f"decoder_vocab_size={fields['vocab_size']!r:.60} is not vocab_size={size!r:.60}, but both share"
        )
        fields["vocab_size"] = size
    return {**fields, **BIASES, "activation": activation, "tie_embeddings": TIES[ties]}, ties, problems


def _without_zero_biases(
    config: TransformerConfig, weights: dict[str, NDArray]
) -> tuple[TransformerConfig, dict[str, NDArray]]:
    def has(part: str) -> bool:
        return any(array.any() for name, array in weights.items() if part in name and name.endswith("_proj.bias"))

    used = {"attention_bias": has("_attention."), "output_bias": bool(weights["output_proj.bias"].any())}
    config = dataclasses.replace(config, **used)
    return config, {name: weights[name] for name in parameter_shapes(config)}


def _names(name: str, ties: tuple[bool, bool]) -> tuple[tuple[str, ...], str]:
    """Marian's names for our parameter, the first to be written, and the side of it that is d_model wide."""
    if name == "output_proj.bias":
        return (BIAS,), READS
    if name in MATRICES[ties]:
        return MATRICES[ties][name], READS
    side, _, i, module = name.split(".", 3)  # encoder.layers.0.feed_forward.up_proj.weight
    module, _, parameter = module.rpartition(".")
    marian_module, wide = LAYER[module]
    return (f"model.{side}.layers.{i}.{marian_module}.{parameter}",), wide


def _permuted(array: NDArray, side: str, order: NDArray[np.intp]) -> NDArray:
    """A weight (out, in) or a bias (out,) with the channels of its d_model wide side in another order."""
    if side != READS:
        return array[order]
    return array[:, order] if array.ndim == 2 else array


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
