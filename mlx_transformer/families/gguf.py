"""Read a GGUF file as if it were a folder of `transformers`: config.json, tensors with its names, and text files.

llama.cpp names a family's keys and tensors in its own way (e.g. `blk.0.attn_q.weight`), and fixes some settings in its
code instead of in the file: `ARCHITECTURES` has both. Quantised matrices become mlx-lm's integers, scales and biases
without rounding (`system/gguf_files.py`). Sources: `llama-model.cpp` and `conversion/` of llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.quantization import KEY, Scheme, packed_words, to_config
from mlx_transformer.system.errors import UserError, refusal
from mlx_transformer.system.gguf_files import BlockType, GgufFile, GgufTensor, read_gguf
from mlx_transformer.system.tensors import Stored

from .engine import At, Family, Published, Values
from .gguf_text import KEYS as TEXT_KEYS
from .gguf_text import text_files

LAYERS = "model.layers"
SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
"""{key after the architecture's name: key of config.json}"""
PATTERN = "attention.sliding_window_pattern"
FREQUENCIES = "rope_freqs.weight"
FACTORS = {f"{name}_factor": f"rope_factors_{name}.weight" for name in ("short", "long")}
IGNORED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
WINDOW = {"attention.sliding_window": "sliding_window"}
CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv")},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
"""{a layer's tensor, e.g. attn_q: its name in transformers}"""
SANDWICH = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GPT2 = {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2"}
GPT2 |= {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp: the family, and the settings that llama.cpp fixes for it."""

    model_type: str
    turned: bool = False
    """Rows of query and key matrices are ordered for rotary pairs of neighbours, e.g. (0, 1), instead of halves."""
    biased: bool = False
    """Attention and feed-forward nets may have biases."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys in addition to `SIZES`, or instead of them."""
    layer: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's tensors in addition to `LAYER`, or instead of them."""
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    layers: str = LAYERS
    implied: Callable[[Values], Values] = lambda config: {}
    """Computes keys of config.json that llama.cpp fixes, from the other keys."""


def _windows(every: int, base: float | None) -> Callable[[Values], Values]:
    """Settings of Gemma 2 and 3: every `every`-th layer has no window. base: rotary base of layers with a window; None
    for Gemma 2."""

    def implied(config: Values) -> Values:
        layers, wide = config["num_hidden_layers"], config["hidden_size"] // config["num_attention_heads"]
        period = config.pop("sliding_window_pattern") or every
        pattern = period if isinstance(period, list) else [(i + 1) % period > 0 for i in range(layers)]
        kinds = ["sliding_attention" if window else "full_attention" for window in pattern]
        values: Values = {"layer_types": kinds, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
        largest = layers == (46 if base is None else 62)  # only 27B scales by another width than the head's
        values["query_pre_attn_scalar"] = wide if largest else config["head_dim"]
        if base is not None:
            values["rope_local_base_freq"] = config.pop("rope.freq_base_swa", base)
        return values

    return implied


GEMMA3_KEYS = {**WINDOW, **CAPS, PATTERN: "sliding_window_pattern"}
GEMMA3_KEYS |= {"rope.freq_base_swa": "rope.freq_base_swa"}
ARCHITECTURES = {
    "llama": Architecture("llama", turned=True, biased=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "smollm3": Architecture("smollm3", turned=True, implied=lambda config: {"no_rope_layer_interval": 4}),
    "granite": Architecture(
        "granite",
        turned=True,
        biased=True,
        keys={"embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier"}
        | {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"},
    ),
    "olmo2": Architecture("olmo2", layer=SANDWICH),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        layer={f"attn_{x}_norm": f"self_attn.{y}_layernorm" for x, y in (("q", "query"), ("k", "key"))},
    ),
    "phi3": Architecture("phi3", keys=WINDOW, layer={"ffn_up": "mlp.gate_up_proj"}),
    "gemma": Architecture(
        "gemma", implied=lambda config: {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    ),
    "gemma2": Architecture(
        "gemma2",
        keys={**WINDOW, **CAPS, PATTERN: "sliding_window_pattern"},
        layer={**SANDWICH, "ffn_norm": "pre_feedforward_layernorm"},
        implied=_windows(2, None),
    ),
    "gemma3": Architecture(
        "gemma3_text",
        keys=GEMMA3_KEYS,
        layer={**SANDWICH, "ffn_norm": "pre_feedforward_layernorm"},
        implied=_windows(6, 10000.0),
    ),
    "gpt2": Architecture(
        "gpt2",
        keys={"embedding_length": "n_embd", "block_count": "n_layer", "feed_forward_length": "n_inner"}
        | {"attention.head_count": "n_head", "context_length": "n_positions"}
        | {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        layer=GPT2,
        names={"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"}
        | {"output": "lm_head"},
        layers="transformer.h",
    ),
}
"""{general.architecture: how to read it}"""


class FromGguf(NamedTuple):
    """A GGUF file as the parts of a `transformers` folder."""

    published: Published
    fields: Values
    """Fields of our config for which config.json has no keys."""
    texts: dict[str, str]
    """{name: text} of the tokenizer's files."""
    notes: list[str]


def read_gguf_model(path: Path) -> FromGguf:
    """Open a GGUF file; tensors are read on demand. Raises `UserError` with all problems of a damaged or unsupported
    file."""
    file = read_gguf(path)
    name, kind = (file.pairs.get(f"general.{key}", "model") for key in ("architecture", "type"))
    if not isinstance(kind, str) or kind != "model":
        raise UserError(f"{path}: general.type is {kind!r:.40}, not 'model'")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UserError(f"{path}: general.architecture is {name!r:.40}; supported: {known}")
    architecture = ARCHITECTURES[name]
    config = _config(file, name, architecture)
    tensors, schemes = _tensors(file, architecture, config)
    if schemes:
        config[KEY] = to_config(schemes)
    texts, notes = text_files(file.pairs, str(path))
    fields: Values = {}
    if FREQUENCIES in file.tensors:
        divisors = _shortest(file.tensors[FREQUENCIES])
        fields["rotary_scaling"] = {"kind": "divisors", "divisors": divisors}
    return FromGguf(Published(path, config, {}, tensors), fields, texts, notes)


def as_in_gguf(family: Family, fields: Values | None = None) -> Family:
    """Adapt a family to GGUF's storage, where all matrices are (out, in) and Gemma's norms are stored as 1 + w.

    fields: fields to add to the config, e.g. rotary_scaling.
    """

    def names(config: Any) -> dict[str, str | At]:
        return {
            ours: replace(at, transposed=False, offset=0) if isinstance(at, At) else at
            for ours, at in family.names(config).items()
        }

    return replace(family, names=names, derived=lambda values: family.derived(values) | (fields or {}))


class _Keys:
    """Reads an architecture's keys, each once, and collects problems."""

    def __init__(self, file: GgufFile, name: str):
        self.name, self.problems = name, list[str]()
        self.left = {key.removeprefix(f"{name}."): x for key, x in file.pairs.items() if key.startswith(f"{name}.")}

    def number(self, key: str, default: Any = None) -> Any:
        """Take an int or a float; a list of equal numbers counts as that number."""
        value = self.left.pop(key, default)
        listed = value.tolist() if isinstance(value, np.ndarray) else [value]
        if len(listed) > 1 and any(each != listed[0] for each in listed):
            self.problems.append(f"{self.name}.{key} differs between layers, which is not supported")
        elif (
            not listed or (value is not None and type(listed[0]) not in (int, float)) or not abs(listed[0] or 0) < 1e300
        ):
            self.problems.append(f"{self.name}.{key} is {value!r:.60}, not a number")
        else:
            return listed[0]
        return default

    def size(self, key: str, default: int | None = None) -> int:
        """Take an int of at least 1."""
        value = self.number(key, default)
        if type(value) is int and 0 < value < 1 << 31:
            return value
        self.problems.append(f"{self.name}.{key} is {value!r:.40}, not a positive integer")
        return 1

    def word(self, key: str, default: str) -> str:
        value = self.left.pop(key, default)
        if not isinstance(value, str):
            self.problems.append(f"{self.name}.{key} is {value!r:.40}, not a string")
        return str(value)

    def pattern(self, key: str) -> Any:
        """Take a period, or for each layer whether it has a window; None without the key."""
        value = self.left.pop(key, None)
        if isinstance(value, np.ndarray) or value is None or (type(value) is int and 0 <= value < 1 << 31):
            return value.tolist() if isinstance(value, np.ndarray) else value
        self.problems.append(f"{self.name}.{key} is {value!r:.40}, neither a period nor a list")
        return None


def _config(file: GgufFile, name: str, architecture: Architecture) -> Values:
    """The contents of config.json. Raises `UserError` with the problems of all keys."""
    keys, wanted = _Keys(file, name), architecture.keys
    config: Values = {"model_type": architecture.model_type, "torch_dtype": "float32"}
    config |= {theirs: keys.size(key) for key, theirs in {**SIZES, **wanted}.items() if key in SIZES}
    if architecture.layers == LAYERS:
        width = config["hidden_size"] // (heads := config["num_attention_heads"])
        config["num_key_value_heads"] = keys.size("attention.head_count_kv", heads)
        config["head_dim"] = width = keys.size("attention.key_length", width)
        config["rope_theta"] = keys.number("rope.freq_base", 10000.0)
        config["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon", 1e-6)
        if (value := keys.size("attention.value_length", width)) != width:
            keys.problems.append(f"{name}.attention.value_length is {value}, but keys have {width}")
        if (turned := keys.size("rope.dimension_count", width)) != width:
            config["partial_rotary_factor"] = turned / width
        biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
        config |= {theirs: architecture.biased and ours in file.tensors for theirs, ours in biases.items()}
        config |= _scaling(file, config, keys)
    for key, theirs in wanted.items():
        if key == PATTERN:
            config[theirs] = keys.pattern(key)
        elif key not in SIZES and (value := keys.number(key)) is not None:
            config[theirs] = value
    if "token_embd.weight" in file.tensors:
        config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config |= architecture.implied(config)
    config |= _special_ids(file)
    for key in IGNORED:
        keys.left.pop(key, None)
    keys.problems += [
        f"{name}.{key}={value!r:.40} is not supported" for key, value in keys.left.items() if _means(value)
    ]
    if keys.problems:
        raise refusal(file.path, keys.problems, file.path)
    return config


def _means(value: Any) -> bool:
    """Whether a key's value may change the model; 0, false, "none" and empty values don't."""
    return bool(np.any(value)) if isinstance(value, np.ndarray) else value not in (0, False, "none", "", [])


def _scaling(file: GgufFile, config: Values, keys: _Keys) -> Values:
    kind, factor = keys.word("rope.scaling.type", "none"), keys.number("rope.scaling.factor", 1.0)
    length = keys.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    if all(name in file.tensors for name in FACTORS.values()):
        scaling: Values = {"rope_type": "longrope"}
        scaling |= {theirs: _shortest(file.tensors[name]) for theirs, name in FACTORS.items()}
        given, scale = keys.number("rope.scaling.attn_factor"), config["max_position_embeddings"] / length
        usual = math.sqrt(1 + math.log(scale) / math.log(length)) if scale > 1 and length > 1 else 1.0
        if given is not None and np.float32(given) != np.float32(usual):
            scaling["attention_factor"] = given
        return {"rope_scaling": scaling, "original_max_position_embeddings": length}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor != 1 else {}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        names = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attn_factor": "attention_factor"}
        given = {theirs: keys.number(f"rope.scaling.yarn_{ours}") for ours, theirs in names.items()}
        return {"rope_scaling": scaling | {theirs: value for theirs, value in given.items() if value is not None}}
    return {} if kind == "none" else {"rope_scaling": {"rope_type": kind}}


def _shortest(tensor: GgufTensor) -> list[float]:
    return [float(str(number)) for number in np.asarray(tensor.stored(), np.float32).reshape(-1)]


def _special_ids(file: GgufFile) -> Values:
    """{key of config.json: token id}; None if the file has no id, so that no default applies."""
    keys = _Keys(file, TEXT_KEYS)
    ids = {role: keys.number(f"{role}_token_id") for role in ("bos", "eos", "eot", "eom", "padding")}
    if keys.problems:
        raise refusal(file.path, keys.problems, file.path)
    ends = list(dict.fromkeys(ids[role] for role in ("eos", "eot", "eom") if ids[role] is not None))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None,
        "pad_token_id": ids["padding"],
    }


TENSOR = re.compile(r"(?:blk\.(\d{1,6})\.)?(\w+)\.(weight|bias)")


def _tensors(file: GgufFile, architecture: Architecture, config: Values) -> tuple[dict[str, Stored], dict[str, Scheme]]:
    """({name in transformers: tensor}, with quantised matrices as in mlx-lm; {quantised matrix: scheme})"""
    tensors: dict[str, Stored] = {}
    schemes: dict[str, Scheme] = {}
    heads = {"attn_q": config.get("num_attention_heads"), "attn_k": config.get("num_key_value_heads")}
    for name, tensor in file.tensors.items():
        if name in (FREQUENCIES, *FACTORS.values()):  # part of the config
            continue
        theirs, part = _named(name, architecture)
        order = halves(tensor.shape[0], heads[part]) if architecture.turned and part in heads else None
        if isinstance(tensor.kind, BlockType) and len(tensor.shape) == 2 and part != "position_embd":
            schemes[theirs] = Scheme(tensor.kind.group, tensor.kind.bits)
            arrays = dict(zip(schemes[theirs].tensors(theirs), _integers(tensor, tensor.kind), strict=True))
        else:
            arrays = {theirs: tensor.stored()}
        tensors |= arrays if order is None else {n: array[order] for n, array in arrays.items()}
    return tensors, schemes


def _named(name: str, architecture: Architecture) -> tuple[str, str]:
    """(name in transformers, middle part of the file's name); an unknown name is returned unchanged.

    >>> _named("blk.0.attn_q.weight", ARCHITECTURES["llama"])
    ('model.layers.0.self_attn.q_proj.weight', 'attn_q')
    """
    match = TENSOR.fullmatch(name)
    if match is None:
        return name, name
    layer, part, end = match.groups()
    if layer is None:
        return f"{architecture.names.get(part, part)}.{end}", part
    known = {**LAYER, **architecture.layer}
    return f"{architecture.layers}.{layer}.{known[part]}.{end}" if part in known else name, part


def halves(rows: int, heads: Any) -> NDArray[np.intp]:
    """Order of rows that puts each head's even rows first; 0, 1, 2, ... if the heads don't divide the rows.

    >>> halves(8, 2)
    array([0, 2, 1, 3, 4, 6, 5, 7])
    """
    if type(heads) is not int or heads <= 0 or rows % (2 * heads):
        return np.arange(rows)
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _integers(tensor: GgufTensor, kind: BlockType) -> tuple[Stored, Stored, Stored]:
    """A matrix as mlx-lm's (words, scales, biases), read on demand. Scales and biases are float16 if exact, else
    float32."""
    rows, width = tensor.shape
    groups = (rows, width // kind.group)
    dtype = np.dtype(np.float16 if kind.halves and _fit_halves(tensor, kind) else np.float32)

    def words() -> NDArray[np.uint32]:
        return packed_words(kind.integers(tensor.blocks()).reshape(rows, width), kind.bits)

    def numbers(of: Callable[[Any], NDArray]) -> NDArray:
        with np.errstate(all="ignore"):  # infinite and NaN weights raise an error later
            return of(tensor.blocks()).astype(dtype, copy=False)

    return (
        Stored((rows, width * kind.bits // 32), np.dtype(np.uint32), words),
        tensor.part(groups, dtype, partial(numbers, kind.scales)),
        tensor.part(groups, dtype, partial(numbers, kind.biases)),
    )


def _fit_halves(tensor: GgufTensor, kind: BlockType) -> bool:
    """Whether the biases fit float16: they are scales times a power of two, so they can only overflow."""
    if kind.offsets is not None:
        return True
    with np.errstate(all="ignore"):
        return bool((np.abs(kind.biases(tensor.blocks())) <= np.finfo(np.float16).max).all())
