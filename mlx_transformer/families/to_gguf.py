"""Write a checkpoint as a GGUF file for llama.cpp: floats, or quantised to Q8_0 or Q4_0 with llama.cpp's rounding.

`gguf.py` reads the written file back, and its config is compared with the checkpoint's. This refuses any model that
GGUF can't express, without a list of unsupported options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlx_transformer.core.checkpoint import Checkpoint, open_checkpoint, resolve
from mlx_transformer.core.config import Table, TransformerConfig
from mlx_transformer.core.folders import GGUF as SUFFIX
from mlx_transformer.core.folders import begins_as_gguf
from mlx_transformer.core.outputs import Kind, claim
from mlx_transformer.core.positions import rotary_frequencies
from mlx_transformer.generation.settings import CHAT_TEMPLATES, DEFAULT, SPECIAL_TOKENS, Settings, read_settings
from mlx_transformer.system.durable import Target, replace_files
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.gguf_files import write_gguf
from mlx_transformer.system.tensors import Stored

from .engine import TRAINING, Family, config_of, exported
from .generation import with_first_end
from .gguf import ARCHITECTURES, FREQUENCIES, LAYER, LAYERS, PATTERN, Architecture, as_in_gguf, halves, read_gguf_model
from .gguf import SIZES as SIZE_KEYS
from .gguf_text import KEYS as TEXT_KEYS
from .gguf_text import TEMPLATE, text_keys
from .table import FAMILIES, family_of

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}
"""{type of matrices: general.file_type}"""
TABLES = ("llama3", "divisors")
"""Kinds of rotary scaling that GGUF stores as a table of divisors."""
ALIASES = {"mistral": "llama"}
"""{model_type: architecture in GGUF}"""
BLOCK = 32
"""Weights of a row that share a scale."""
ENDS = ("eot", "eom")
"""Roles of end tokens after the first."""

GGUF = Kind("GGUF file", begins_as_gguf)


def to_gguf(checkpoint: str | Path, out: Target, type: str = "f32", force: bool = False) -> list[str]:
    """Write a checkpoint (or a run's folder) as a GGUF file; return notes on differences from the checkpoint.

    type: of matrices: f32, f16, bf16, q8_0 or q4_0; norms and biases are float32. With q8_0 and q4_0, matrices whose
    width isn't a multiple of 32 become float16. force: replace an earlier GGUF file. Raises `UserError` with the
    reasons if GGUF can't express the model.
    """
    if type not in TYPES:
        raise UserError("{type}: choose one of {}", ", ".join(TYPES), type=repr(type)[:40])
    output = claim(out, GGUF, force, resolve(checkpoint))
    if output.path.suffix != SUFFIX:
        raise UserError(f"{output.path}: name it {output.path.name}{SUFFIX}; programs know GGUF files by their suffix")
    opened = open_checkpoint(checkpoint)
    family = family_of(opened.config)
    kind = ALIASES.get(family.model_type, family.model_type)
    name = next((name for name, each in ARCHITECTURES.items() if each.model_type == kind), None)
    if name is None:
        known = ", ".join(sorted(each.model_type for each in ARCHITECTURES.values()))
        raise UserError(f"{opened.folder}: can't be written as GGUF: its family is {family.name}; supported: {known}")
    architecture, ours = ARCHITECTURES[name], opened.config
    ours, divisors = (ours, None) if ours.rotary_scaling.get("kind") not in TABLES else _divided(ours)
    config, tensors = exported(as_in_gguf(family), ours, opened.unread().items(), opened.folder)
    pairs: dict[str, Any] = {"general.architecture": name, "general.type": "model", "general.name": opened.folder.name}
    pairs |= {"general.file_type": TYPES[type], "general.quantization_version": 2}
    pairs |= {f"{name}.{key}": value for key, value in _keys(config, ours, architecture).items()}
    ids = {"bos": ours.bos_id, "eos": ours.eos_id, "padding": ours.pad_id}
    pairs |= {f"{TEXT_KEYS}.{role}_token_id": id for role, id in ids.items()}
    text, notes = _text(opened)
    said, left = _generation(read_settings(opened.folder, ours))
    notes += left
    if opened.quantization:
        again = "" if type == "f32" else ", rounded again"
        notes.append(f"{len(opened.quantization)} quantised matrices became {type}{again}")
    arrays, narrow = _tensors(tensors, config, architecture, type)
    notes += (
        [f"{len(narrow)} matrices are float16, as {BLOCK} doesn't divide their width: {narrow[0]}"] if narrow else []
    )
    arrays |= {} if divisors is None else {FREQUENCIES: (np.array(divisors, np.float32), "F32")}
    with replace_files(output) as temporary:
        file = temporary / output.path.name
        write_gguf(file, pairs | text | said, arrays)
        _check(file, FAMILIES[kind], opened, divisors)
    return notes


def _divided(config: TransformerConfig) -> tuple[TransformerConfig, list[float]]:
    """(the config without rotary scaling, divisors of its frequencies), rounded to float32 as in llama.cpp's
    converter."""
    scaling, plain = config.rotary_scaling, dataclasses.replace(config, rotary_scaling=Table())
    if scaling["kind"] == "divisors":
        return plain, list(scaling["divisors"])
    divided = rotary_frequencies(plain).astype(np.float64) / rotary_frequencies(config)
    return plain, [float(str(number)) for number in divided.astype(np.float32)]


def _keys(config: Mapping[str, Any], ours: TransformerConfig, architecture: Architecture) -> dict[str, Any]:
    """The architecture's keys in GGUF. config: the contents of config.json."""
    names = {**SIZE_KEYS, **architecture.keys}
    if architecture.layers == LAYERS:
        names |= {"attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
        names |= {"rope.freq_base": "rope_theta"}
    keys = {key: config[theirs] for key, theirs in names.items() if isinstance(config.get(theirs), int | float)}
    kinds = config.get("layer_types") or []
    if PATTERN in names and "full_attention" in kinds:
        keys[PATTERN] = kinds.index("full_attention") + 1
    floats = ("epsilon", "freq_base", "scale", "softcapping")
    keys = {key: float(value) if any(x in key for x in floats) else value for key, value in keys.items()}
    if architecture.layers == LAYERS:
        keys |= {"attention.key_length": ours.d_k, "attention.value_length": ours.d_v}
        keys |= {"rope.dimension_count": ours.rotary_width or ours.d_k, **_scaling_keys(ours.rotary_scaling)}
    return {**keys, "vocab_size": ours.vocab_size}


def _scaling_keys(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of linear and YaRN scaling; `_check` refuses others."""
    kind = scaling.get("kind")
    if kind not in ("linear", "yarn"):
        return {}
    keys: dict[str, Any] = {"type": kind, "factor": float(scaling["factor"])}
    if kind == "yarn":
        keys["original_context_length"] = scaling["length"]
        keys |= {f"yarn_{name}": float(scaling[name]) for name in ("beta_fast", "beta_slow")}
    return {f"rope.scaling.{key}": value for key, value in keys.items()}


def _tensors(
    tensors: Mapping[str, Any], config: Mapping[str, Any], architecture: Architecture, type: str
) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """({name: (numbers, type)}, names of the matrices that are float16 because `BLOCK` doesn't divide their width)"""
    middle = {theirs: ours for ours, theirs in {**LAYER, **architecture.layer}.items()}
    outer = {theirs: ours for ours, theirs in architecture.names.items()}
    heads = {"attn_q": config.get("num_attention_heads"), "attn_k": config.get("num_key_value_heads")}
    written: dict[str, tuple[Any, str]] = {}
    narrow: list[str] = []
    for name, array in tensors.items():
        path, _, end = name.rpartition(".")
        layer, _, rest = path.removeprefix(f"{architecture.layers}.").partition(".")
        part = middle[rest] if path.startswith(architecture.layers) else outer[path]
        own = f"blk.{layer}.{part}.{end}" if path.startswith(architecture.layers) else f"{part}.{end}"
        kind = type.upper() if array.ndim == 2 and part != "position_embd" else "F32"
        if kind in ("Q8_0", "Q4_0") and array.shape[-1] % BLOCK:
            kind = "F16"
            narrow.append(own)
        if architecture.turned and part in heads:
            order = np.argsort(halves(array.shape[0], heads[part]))
            array = Stored(array.shape, array.dtype, lambda array=array, order=order: np.asarray(array)[order])
        written[own] = array, kind
    return written, narrow


def _text(opened: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    text = opened.tokenizer_json()
    if text is None:
        return {"tokenizer.ggml.model": "no_vocab"}, ["no tokenizer (the checkpoint has none)"]
    return text_keys(text, opened.config)


def _generation(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    """(keys of chat templates and of further end tokens, notes on settings without a key in GGUF)"""
    templates, ends = settings.get(CHAT_TEMPLATES, {}), settings.get("end_ids", ())
    pairs = {TEMPLATE if name == DEFAULT else f"{TEMPLATE}.{name}": text for name, text in templates.items()}
    pairs |= {f"{TEXT_KEYS}.{role}_token_id": id for role, id in zip(ENDS, ends, strict=False)}
    left = sorted(settings.keys() - {CHAT_TEMPLATES, SPECIAL_TOKENS, "end_ids"})
    left += [f"end_ids {[*ends[len(ENDS) :]]}"] if len(ends) > len(ENDS) else []
    return pairs, [f"generation settings that GGUF can't store: {first_of(left, ', ')}"] if left else []


def _check(file: Path, family: Family, opened: Checkpoint, divisors: list[float] | None) -> None:
    """Raise `UserError` if the file's config differs from the checkpoint's; floats are compared as float32."""
    found = read_gguf_model(file)
    back = config_of(as_in_gguf(family, found.fields), with_first_end(found.published).config, {}, file)
    ours = opened.config
    if divisors is not None:
        ours = dataclasses.replace(ours, rotary_scaling=Table({"kind": "divisors", "divisors": divisors}))
    here, there = vars(ours), vars(back)
    changed = [
        f"{n}={here[n]!r} becomes {there[n]!r}" for n in here if n not in TRAINING and not _same(here[n], there[n])
    ]
    if changed:
        raise UserError(f"{opened.folder}: GGUF can't express {first_of(changed)}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return np.float32(one) == np.float32(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other
