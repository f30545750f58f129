"""Hugging Face model folders: config.json, model.safetensors, generation_config.json, tokenizer.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mlx_transformer.core.checkpoint import CONFIG, FLOATS, HALVES, WEIGHTS
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.core.tokenizer_files import JOINT as TOKENIZER
from mlx_transformer.families.huggingface import generation_config, tokenizer_config
from mlx_transformer.system.durable import replace_folder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import open_file, parse_json, read_json, read_text
from mlx_transformer.system.tensors import read_tensors

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Folder:
    """What a Hugging Face folder holds, parsed but not judged."""

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    """Contents of generation_config.json, {} if there is none."""
    tensors: dict[str, NDArray]
    """bfloat16 is widened to float32, which is exact."""


def read_folder(path: Path) -> Folder:
    """Raises `UserError` for missing and damaged files and for weights in another form than one safetensors file."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path}: not a Hugging Face model folder ({CONFIG} missing)")
    if not (path / WEIGHTS).is_file():
        save = 'save it by save_pretrained("FOLDER", safe_serialization=True, max_shard_size="99GB") of transformers'
        others = [*path.glob("pytorch_model*.bin"), *path.glob("model*.safetensors"), *path.glob("*.h5")]
        held = f"its weights are in {min(others).name}" if others else "it has no weights"
        raise UserError(f"{path}: {WEIGHTS} missing, {held}; {save}")
    config, generation = _object(path / CONFIG), {}
    if (path / GENERATION).is_file():
        generation = _object(path / GENERATION)
    _check_types(path / WEIGHTS)
    tensors = {
        name: array.astype(np.float32) if array.dtype.name == "bfloat16" else array
        for name, array in read_tensors(path / WEIGHTS).items()
    }
    return Folder(path, config, generation, tensors)


def read_tokenizer(path: Path, config: TransformerConfig) -> tuple[str | None, list[str]]:
    """The text of tokenizer.json if `Tokenizer` reads it and it fits the model; else None and a note of the reason.

    `UserError` for a damaged one: it may be the model's.
    """
    file = path / TOKENIZER
    if not file.is_file():
        return None, [f"no tokenizer ({path} has no {TOKENIZER})"]
    text = read_text(file)
    parse_json(text, f"{file}: damaged, or not JSON", "restore it from a copy, or remove it: the model takes ids then")
    try:
        tokenizer = Tokenizer(text, str(file))
    except UserError as error:
        return None, [f"no tokenizer ({error})"]
    ids = {name: (getattr(tokenizer, name), getattr(config, name)) for name in ("pad_id", "bos_id", "eos_id")}
    wrong = [
        f"{name} is {in_tokenizer} in the tokenizer and {in_model} in the model"
        for name, (in_tokenizer, in_model) in ids.items()
        if in_tokenizer != in_model
    ]
    if tokenizer.vocab_size > min(config.vocab_size, config.source_vocab_size):
        wrong.append(f"{tokenizer.vocab_size} tokens, more than the model has")
    return (None, [f"no tokenizer ({file}: {'; '.join(wrong)})"]) if wrong else (text, [])


def check_read_back(
    expected: TransformerConfig, fields: Mapping[str, Any], problems: Sequence[str], family: str, where: Path
) -> None:
    """`UserError` unless what a family's reader makes of the config.json to be written is `expected`, field by field.

    `fields` of a config and `problems`: what the reader makes of it. A new field of the config needs no change here.
    """
    refused: list[str] = []
    try:
        back = TransformerConfig.from_dict(fields).to_dict()
    except UserError as error:  # of what can't be, as much as is known
        known = {field.name: field.default for field in dataclasses.fields(TransformerConfig)} | dict(fields)
        back = {name: value for name, value in known.items() if value is not None}
        refused = [str(error)]
    differing = [
        f"{name}={value!r}, {family} has {back[name]!r}"
        for name, value in expected.to_dict().items()
        if name in back and back[name] != value
    ]
    if reasons := [*differing, *problems] or refused:
        raise UserError(f"{where}: {family} has no such model: {'; '.join(reasons)}")


def write_folder(
    out: Path,
    model_config: TransformerConfig,
    config: Mapping[str, Any],
    weights: Mapping[str, NDArray],
    tokenizer: str | None,
) -> Path:
    """Write all files, durably, in place of what is there. `UserError` if the disk refuses."""
    texts: dict[str, Any] = {CONFIG: config, GENERATION: generation_config(model_config)}
    with replace_folder(out, "Hugging Face folder") as temporary:
        if tokenizer:
            (temporary / TOKENIZER).write_text(tokenizer, encoding="utf-8")
            texts["tokenizer_config.json"] = tokenizer_config(model_config, tokenizer)
        for name, values in texts.items():
            (temporary / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        stored = {name: np.asarray(array, order="C") for name, array in weights.items()}  # safetensors takes the bytes
        save_file(stored, temporary / WEIGHTS, metadata={"format": "pt"})  # transformers wants to be told
        (temporary / WEIGHTS).chmod((temporary / CONFIG).stat().st_mode & 0o777)  # safetensors makes it private
    return out


def _object(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def _check_types(path: Path) -> None:
    """safetensors would raise a bare TypeError for what NumPy doesn't have."""
    with open_file(path):  # a regular file
        pass
    try:
        with safe_open(path, framework="numpy") as file:
            types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error
    if wrong := [f"{name} is {dtype}" for name, dtype in types.items() if dtype not in FLOATS | HALVES]:
        raise UserError(f"{path}: {wrong[0]}; weights are of a type in {', '.join(sorted(FLOATS | HALVES))}")
