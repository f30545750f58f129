"""Marian's model files, read a second time: nothing here is shared with what imports them (`families/marian_files/`).

    .bin    u64 1 · u64 n · n x {u64 bytes of the name, u64 type, u64 rank, u64 bytes of the data} · names ·
            i32 shapes · u64 p · p bytes · data, all little-endian
    .npz    float32 arrays by name

`special:model.yml` holds the options. Integers (type 0x4101) have their multiplier m behind them and stand for
q * (1/m); all but embeddings lie transposed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_bytes

Array = NDArray[Any]

OPTIONS = "special:model.yml"
KINDS = {0x101: "<i1", 0x402: "<f2", 0x404: "<f4", 0x4101: "<i1"}
INTEGERS = 0x4101
MAX_MODEL_BYTES = 1 << 34


@dataclass(frozen=True)
class Tensor:
    """One tensor: integers with their multiplier, or floats."""

    values: Array
    multiplier: np.float32 | None = None

    def stored(self) -> Array:
        return self.values

    def numbers(self) -> NDArray[np.float32]:
        """Return what the values stand for."""
        numbers = self.values.astype(np.float32)
        return numbers if self.multiplier is None else numbers * (np.float32(1) / self.multiplier)


def read_marian(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors by name and the options of a model. `UserError` for a file that is none."""
    data = read_bytes(path, MAX_MODEL_BYTES)
    try:
        tensors = dict(_of_npz(data) if path.suffix == ".npz" else _of_bin(data))
        options = tensors.pop(OPTIONS).values.astype(np.uint8).tobytes().rstrip(b"\0").decode()
    except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: no model of Marian that can be read: {error}") from error
    return tensors, _flat(options)


def model_of(path: Path) -> Path:
    """Return the model's file of a path or folder; `UserError` unless there is one."""
    if path.is_file():
        return path
    files = [each for suffix in ("*.npz", "*.bin") for each in sorted(path.glob(suffix)) if "model" in each.name]
    files = [each for each in files if "optimizer" not in each.name]
    if len(files) != 1:
        raise UserError(f"{path}: expected one model.npz or model*.bin, found {len(files)}: give the file itself")
    return files[0]


def _of_npz(data: bytes) -> Iterator[tuple[str, Tensor]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for name in arrays:
            yield name, Tensor(arrays[name])


def _of_bin(data: bytes) -> Iterator[tuple[str, Tensor]]:
    version, count = (int(x) for x in np.frombuffer(data, "<u8", 2))
    if version != 1:
        raise ValueError(f"version {version}")
    heads = np.frombuffer(data, "<u8", 4 * count, 16).reshape(count, 4).astype(int)
    at, names, shapes = 16 + 32 * count, [], []
    for length, *_ in heads:
        names.append(data[at : at + length].rstrip(b"\0").decode())
        at += length
    for _, _, rank, _ in heads:
        shapes.append(tuple(int(x) for x in np.frombuffer(data, "<i4", rank, at)))
        at += 4 * rank
    at += 8 + int(np.frombuffer(data, "<u8", 1, at)[0])
    for name, shape, (_, kind, _, size) in zip(names, shapes, heads, strict=True):
        if kind not in KINDS:
            raise ValueError(f"{name} is of type {kind:#x}")
        values = np.frombuffer(data, KINDS[kind], math.prod(shape), at)
        multiplier = None
        if kind == INTEGERS:
            multiplier = np.frombuffer(data, "<f4", 1, at + values.size)[0]
            values = values.reshape(shape if "Wemb" in name else shape[::-1])
            values = values if "Wemb" in name else values.T
        yield name, Tensor(values.reshape(shape), multiplier)
        at += size


def _flat(text: str) -> dict[str, Any]:
    """Return the options of a YAML text, `key: value` a line; lists and what has no value on its line are left out."""
    options: dict[str, Any] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        value = value.strip().strip("\"'")
        if key.strip() == key and value:
            options[key] = int(value) if value.lstrip("-").isdigit() else value
    return options
