"""A checkpoint is a folder: config.json, model.safetensors, tokenizer.json (if any) and manifest.json with digests.

Written durably (`durable.py`): a kill at any moment leaves the old folder or the new one. Read with NumPy alone, tensor
by tensor, so that a reader never needs the whole model in memory twice. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .config import TransformerConfig
from .durable import previous, replace_folder
from .errors import UserError
from .parameters import check_parameters, parameter_shapes

CONFIG, WEIGHTS, TOKENIZER, MANIFEST = "config.json", "model.safetensors", "tokenizer.json", "manifest.json"
FORMAT = 1
FLOATS = {"F64", "F32", "F16"}  # NumPy has no bfloat16: models in it are stored as float32

Tensors = Mapping[str, NDArray]


@dataclass(frozen=True)
class Checkpoint:
    """An opened, verified checkpoint. `tensor(name)` reads one parameter; nothing else is held in memory."""

    folder: Path
    config: TransformerConfig

    @property
    def tokenizer_path(self) -> Path | None:
        path = self.folder / TOKENIZER
        return path if path.exists() else None

    def names(self) -> list[str]:
        return list(parameter_shapes(self.config))

    def tensor(self, name: str) -> NDArray:
        with _open(self.folder / WEIGHTS) as file:
            return file.get_tensor(name)

    def tensors(self) -> Iterator[tuple[str, NDArray]]:
        """(name, array) one by one, in the table's order."""
        with _open(self.folder / WEIGHTS) as file:
            for name in self.names():
                yield name, file.get_tensor(name)


def save_checkpoint(
    folder: str | Path,
    config: TransformerConfig,
    weights: Tensors,
    tokenizer_json: str | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    tensors: Mapping[str, Tensors] | None = None,
) -> Path:
    """Write a checkpoint folder durably and return its path.

    `weights` must match the table of `spec/parameters.py` exactly. `texts` and `tensors` are further files by name (the
    trainer's state). An existing checkpoint of that name is replaced only after the new one is complete on disk.
    Raises `UserError` for a folder that holds something else and when the disk refuses; the old folder is then
    untouched.
    """
    folder = Path(folder)
    ours = any((folder / name).is_file() for name in (WEIGHTS, MANIFEST))
    if folder.is_dir() and not ours and any(folder.iterdir()):
        raise UserError(f"{folder}: holds files that are no checkpoint; choose another folder, or empty this one")
    check_parameters(config, {name: tuple(array.shape) for name, array in weights.items()}, str(folder))
    with replace_folder(folder, "checkpoint") as temporary:
        written = {CONFIG: config.to_json(), **({TOKENIZER: tokenizer_json} if tokenizer_json else {}), **(texts or {})}
        for name, text in written.items():
            (temporary / name).write_text(text, encoding="utf-8")
        for name, group in {WEIGHTS: weights, **(tensors or {})}.items():
            # np.ascontiguousarray would turn a scalar, such as Adam's step, into a vector.
            save_file({key: np.asarray(array, order="C") for key, array in group.items()}, temporary / name)
            (temporary / name).chmod((temporary / CONFIG).stat().st_mode & 0o777)  # it makes them private
        write_manifest(temporary)
    return folder


def write_manifest(folder: Path) -> None:
    """Record size and SHA-256 of every file that is directly in `folder`, for `verify_files`."""
    files = {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
    manifest = {"format": FORMAT, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def open_checkpoint(folder: str | Path, verify: bool = True) -> Checkpoint:
    """Open a checkpoint folder (or a run's folder, which holds one as `model`) and check everything in it.

    `verify` compares each file's SHA-256 with the manifest. Raises `UserError` naming the file and what is wrong.
    """
    folder = resolve(folder)
    if verify:
        verify_files(folder)
    try:
        config = TransformerConfig.from_json((folder / CONFIG).read_text(encoding="utf-8"))
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / CONFIG}: cannot be read ({error})") from error
    with _open(folder / WEIGHTS) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(entry.get_shape()) for name, entry in slices.items()}
        types = {name: entry.get_dtype() for name, entry in slices.items()}
    check_parameters(config, shapes, str(folder / WEIGHTS))
    wrong = [f"{name} is {kind}" for name, kind in types.items() if kind not in FLOATS]
    if wrong:
        raise UserError(f"{folder / WEIGHTS}: {wrong[0]}; weights are of a type in {', '.join(sorted(FLOATS))}")
    return Checkpoint(folder, config)


def resolve(folder: str | Path) -> Path:
    """The checkpoint folder that a path means; `UserError` if there is none."""
    folder = Path(folder)
    for candidate in (folder, folder / "model", previous(folder), previous(folder / "model")):
        if (candidate / CONFIG).is_file() and (candidate / WEIGHTS).is_file():
            return candidate
    if not folder.exists():
        raise UserError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file; a checkpoint is a folder with {CONFIG} and {WEIGHTS}")
    if any(folder.glob("*.onnx")) or any(folder.glob("onnx/*.onnx")):
        raise UserError(f"{folder}: is an ONNX model; here a checkpoint folder ({CONFIG}, {WEIGHTS}) is needed")
    if saved := sorted(folder.glob(f"checkpoints/step-*/{MANIFEST}")):
        raise UserError(f"{folder}: this run has written no model yet; its newest checkpoint is {saved[-1].parent}")
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    raise UserError(f"{folder}: not a checkpoint folder ({' and '.join(missing)} missing)")


def verify_files(folder: Path) -> None:
    """Compare sizes and SHA-256 of all files with manifest.json; `UserError` at the first difference.

    A folder without a manifest (made by another tool) passes: its safetensors header and shapes are checked on opening.
    """
    path = folder / MANIFEST
    if not path.exists():
        return
    manifest = read_json(path)
    try:
        version, files = manifest["format"], dict(manifest["files"])
        entries = {name: (str(entry["sha256"]), int(entry["bytes"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: damaged manifest ({error!r}); restore the folder from a copy") from error
    if version != FORMAT:
        raise UserError(f"{path}: format {version!r} is not known to this version (it reads format {FORMAT})")
    if unlisted := [name for name in (CONFIG, WEIGHTS) if (folder / name).is_file() and name not in entries]:
        raise UserError(f"{path}: damaged manifest ({unlisted[0]} is not listed); restore the folder from a copy")
    for name, (sha256, size) in entries.items():
        file = folder / name
        if Path(name).name != name:
            raise UserError(f"{path}: file name {name!r} leaves the folder")
        if not file.is_file():
            raise UserError(f"{file}: listed in {MANIFEST} but missing; restore the folder from a copy")
        try:
            found = _digest(file)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error})") from error
        if found != {"bytes": size, "sha256": sha256}:
            what = f"{found['bytes']} bytes, expected {size}" if found["bytes"] != size else "its SHA-256 differs"
            raise UserError(f"{file}: damaged ({what}); restore it from a copy or use an older checkpoint")


def read_tensors(path: Path) -> dict[str, NDArray]:
    """All arrays of one safetensors file, strictly parsed; `UserError` if it is damaged."""
    with _open(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_json(path: Path) -> Any:
    """The contents of a JSON file; `UserError` if it cannot be read or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged, or not JSON ({error}); restore it from a copy") from error


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error


def _digest(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
