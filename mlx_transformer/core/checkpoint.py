"""Checkpoints: folders of config.json, model.safetensors, a tokenizer (optional) and manifest.json with hashes.

Writing is durable (`durable.py`): a kill at any moment leaves the old folder or the new. Reading needs only NumPy
and goes tensor by tensor, so the model is never in memory twice. There is no pickle. Matrices may be quantised
(`quantization.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.durable import Target, replace_folder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_text
from mlx_transformer.system.machine import check_memory
from mlx_transformer.system.manifest import CARD, read_manifest, sha256, verify_files, write_manifest
from mlx_transformer.system.tensors import Stored, is_float, open_tensors, stored_tensors, to_float32, write_tensors

from .adapter import Adapter, attached_adapter
from .card import write_card
from .config import TransformerConfig, parse_object
from .folders import ARRAYS, CONFIG, WEIGHTS, Place
from .outputs import Kind, claim
from .parameters import Shape, check_parameters, is_unbounded, parameter_shapes, quantizable_shapes
from .quantization import KEY, Packed, Quantization, from_config, to_config
from .tokenizer_files import read_tokenizer, tokenizer_files, tokenizer_path

FLOATS = {"F64", "F32", "F16", "BF16"}

Tensors = Mapping[str, NDArray]
FloatName = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Checkpoint:
    """An opened, verified checkpoint. Weights stay in the file; `tensor(name)` reads one parameter.

    `tensor` returns a parameter in the file's own type, dequantised float32 values for quantised matrices, and applies
    an adapter beside the weights. `packed` and `stored` return the file's own contents. Reading raises `UserError` for
    numbers that aren't finite.

    >>> checkpoint = open_checkpoint("runs/en-de")
    >>> checkpoint.tensor("embedding.weight").shape  # (V, D)
    (8000, 512)
    """

    folder: Path
    config: TransformerConfig
    quantization: Quantization = field(default_factory=dict)
    adapter: Adapter | None = None
    """The adapter beside the weights; `tensor` applies it."""
    wide: bool = False
    """Read numbers of 16 bits as float32, which is exact."""

    def widened(self) -> Checkpoint:
        """The same checkpoint, with numbers of 16 bits read as float32."""
        return replace(self, wide=True)

    @property
    def precision(self) -> FloatName:
        """The type that MLX computes in, see `precision_of`."""
        return precision_of(self._files, self.config, self.quantization)

    @property
    def base(self) -> Checkpoint:
        """The checkpoint without its adapter."""
        return replace(self, adapter=None)

    @property
    def adapted_integers(self) -> list[str]:
        """The quantised matrices that the adapter changes. Integers and adapter are kept apart, not merged."""
        return [name for name in self.quantization if self.adapter is not None and self.adapter.delta(name)]

    @property
    def tokenizer_path(self) -> Path | None:
        """The argument for `Tokenizer.load`; None if there is no tokenizer."""
        return tokenizer_path(self.folder)

    def tokenizer_json(self) -> str | None:
        """The text of the tokenizer's file, unchecked; None if there is no tokenizer."""
        return None if (path := self.tokenizer_path) is None else read_tokenizer(path)

    @cached_property
    def _files(self) -> Mapping[str, Stored]:
        """{name: unread array} of model.safetensors. Cached, so that the file's header is read only once."""
        return stored_tensors(self.folder / WEIGHTS)

    def names(self) -> list[str]:
        return list(parameter_shapes(self.config))

    def tensor(self, name: str) -> NDArray:
        """Read a parameter, dequantised and with the adapter applied, in the shape of `parameter_shapes`."""
        if name in self.quantization:
            array = self.packed(name).dequantised()
        else:
            array = np.asarray(self._files[name])
        array = array if self.adapter is None else self.adapter.merged(name, array)
        return to_float32(array) if self.wide else array

    def tensors(self) -> Iterator[tuple[str, NDArray]]:
        """Read all parameters one by one, as (name, array), in the order of `parameter_shapes`."""
        for name in self.names():
            yield name, self.tensor(name)

    def unread(self) -> dict[str, Stored]:
        """{name: parameter} like `tensor`, each read only when its numbers are needed."""
        shapes, single = parameter_shapes(self.config), np.dtype(np.float32)

        def later(name: str) -> Stored:
            own = single if name in self.quantization else self._files[name].dtype
            dtype = single if self.wide and own.itemsize == 2 else own
            return Stored(shapes[name], dtype, lambda: self.tensor(name))

        return {name: later(name) for name in shapes}

    def packed(self, name: str) -> Packed:
        """A quantised matrix as stored, without the adapter; affine scales and biases become float32. name: a key of
        `quantization`."""
        return self._read(name).widened()

    def _read(self, name: str) -> Packed:
        packed = self.matrices()[name].read()
        if not packed.scheme.affine and not packed.is_finite:
            raise UserError(f"{self.folder / WEIGHTS}: {name} is not finite: damaged; restore it from a copy")
        return packed

    def matrices(self) -> dict[str, Packed]:
        """{name: quantised matrix as stored, not yet read}, without the adapter."""
        return {name: scheme.packed(name, self._files) for name, scheme in self.quantization.items()}

    def stored(self) -> Iterator[tuple[str, NDArray]]:
        """Read all tensors as (name, array): two or three for each quantised matrix, in the file's own types and
        without the adapter. The other parameters are as from `tensor`."""
        for name in self.names():
            if name in self.quantization:
                packed = self.packed(name) if self.wide else self._read(name)
                yield from packed.tensors(name).items()
            else:
                yield name, self.tensor(name)


def save_checkpoint(
    folder: Target,
    config: TransformerConfig,
    weights: Tensors,
    tokenizer_json: str | None = None,
    *,
    force: bool = False,
    quantization: Quantization | None = None,
    texts: Mapping[str, str | Path] | None = None,
    tensors: Mapping[str, Tensors] | None = None,
) -> Path:
    """Write a checkpoint folder durably and return its path.

    weights: exactly the parameters of `parameter_shapes`. With `quantization`, its matrices are given as words, scales
    and biases. texts, tensors: further files by name, e.g. the trainer's state; a Path in `texts` is copied. A text for
    README.md is front matter for the model card (`card.begin_card`). force: replace an earlier checkpoint, after the
    new one is complete on disk.

    Raises `UserError` as `claim` does, and if the disk refuses; the old folder is then untouched.
    """
    output = claim(folder, CHECKPOINT, force)
    folder = output.path
    check_parameters(config, {name: tuple(array.shape) for name, array in weights.items()}, str(folder), quantization)
    described = {**config.to_dict(), **({KEY: to_config(quantization)} if quantization else {})}
    with replace_folder(output) as temporary:
        written = {CONFIG: json.dumps(described, indent=2) + "\n", **(texts or {})}
        begin = str(written.pop(CARD, ""))
        written |= tokenizer_files(tokenizer_json) if tokenizer_json else {}
        for name, text in written.items():
            if isinstance(text, Path):
                shutil.copyfile(text, temporary / name)
            else:
                (temporary / name).write_text(text, encoding="utf-8")
        for name, group in {WEIGHTS: weights, **(tensors or {})}.items():
            write_tensors(temporary / name, group)
        write_card(temporary, config, begin=begin, replaced=folder)
        write_manifest(temporary)
    return folder


def precision_of(tensors: Mapping[str, Any], config: TransformerConfig, quantization: Quantization) -> FloatName:
    """The type in which a network with these tensors computes: their common 16-bit type (some parameters may be
    float32, see `stays_wide`); else float32, also if MLX has to dequantise a matrix."""
    kinds = {name: array.dtype.name for name, array in tensors.items() if is_float(array.dtype)}
    halves: tuple[FloatName, ...] = ("float16", "bfloat16")
    for half in halves if all(scheme.runs_in_mlx for scheme in quantization.values()) else ():
        single = () if quantization else {name for name, kind in kinds.items() if kind == "float32"}
        wide = {name for name in single if stays_wide(name, half, config)}
        if {kind for name, kind in kinds.items() if name not in wide} == {half}:
            return half
    return "float32"


def stays_wide(name: str, precision: str, config: TransformerConfig) -> bool:
    """Whether a parameter stays float32 in a 16-bit network: norms, which compute in float32 anyway, and matrices whose
    products overflow float16."""
    path, _, part = name.rpartition(".")
    unbounded = precision == "float16" and part != "bias" and is_unbounded(f"{path}.weight", config)
    return precision != "float32" and (unbounded or is_of_norm(name))


def is_of_norm(name: str) -> bool:
    return name.rpartition(".")[0].endswith("norm")


CHECKPOINT = Kind("checkpoint", lambda folder: Place.of(folder).what == "a checkpoint", folder=True)


def _is_huggingface(folder: Path) -> bool:
    place = Place.of(folder)
    return place.what == "a published model" and place.holds(WEIGHTS)


HUGGING_FACE = Kind("Hugging Face folder", _is_huggingface, folder=True)


def weights_digest(folder: Path) -> str:
    """The SHA-256 of a checkpoint's model.safetensors, from the manifest if there is one (verified on opening)."""
    entries = read_manifest(folder) or {}
    return entries[WEIGHTS][0] if WEIGHTS in entries else sha256(folder / WEIGHTS)


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """{file: SHA-256} of the files that determine the parameters: the weights and an adapter beside them."""
    adapter = {} if checkpoint.adapter is None else {ARRAYS: sha256(checkpoint.folder / ARRAYS)}
    return {WEIGHTS: weights_digest(checkpoint.folder), **adapter}


def open_checkpoint(folder: str | Path, verify: bool = True) -> Checkpoint:
    """Open a checkpoint folder, or a run's folder (which holds `model/`), and check its files, config and shapes.

    verify: compare each file's SHA-256 with the manifest. Raises `UserError` with the file and the problem.
    """
    folder = resolve(folder)
    if verify:
        verify_files(folder, listed=(CONFIG, WEIGHTS))
    with open_tensors(folder / WEIGHTS) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(entry.get_shape()) for name, entry in slices.items()}
        types = {name: entry.get_dtype() for name, entry in slices.items()}
    config, quantization = _read_config(folder / CONFIG, shapes)
    check_parameters(config, shapes, str(folder / WEIGHTS), quantization)
    check_memory((folder / WEIGHTS).stat().st_size, f"{folder / WEIGHTS}", "use a machine with more")
    for name, kind in types.items():
        scheme = quantization.get(f"{name.removesuffix('.scales')}.weight") if name.endswith(".scales") else None
        codes = {"U8"} if scheme is not None and not scheme.affine else FLOATS
        allowed = {"U32"} if name in quantization else codes
        if kind not in allowed:
            allowed_types = ", ".join(sorted(allowed))
            raise UserError(f"{folder / WEIGHTS}: {name} is {kind}; weights must be {allowed_types}")
    adapter = attached_adapter(folder, lambda: weights_digest(folder))
    if adapter is not None:
        adapter.check_fits(config, str(folder / ARRAYS))
    return Checkpoint(folder, config, quantization, adapter)


def _read_config(path: Path, stored: Mapping[str, Shape]) -> tuple[TransformerConfig, Quantization]:
    """Read config.json: the config, and the quantisation of the tensors in `stored`."""
    text = read_text(path)
    try:
        values = parse_object(text)
        quantized = values.pop(KEY, None)
        config = TransformerConfig.from_dict(values)
        return config, {} if quantized is None else from_config(quantized, stored, quantizable_shapes(config))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def resolve(folder: str | Path) -> Path:
    """The checkpoint folder of a path, e.g. runs/en-de/model for the run runs/en-de. Raises `UserError` if there is
    none."""
    return Place.of(folder).checkpoint_folder()
