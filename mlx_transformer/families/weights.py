"""Finds the weights in a published model's folder: safetensors or PyTorch files, whole or sharded.

Tensors are read from their files when their numbers are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mlx_transformer.core.folders import TORCH_WEIGHTS, WEIGHTS
from mlx_transformer.system.errors import UserError, refusal, shortened
from mlx_transformer.system.files import read_json
from mlx_transformer.system.tensors import Stored, stored_tensors
from mlx_transformer.system.torch_files import stored_torch_tensors

Reader = Callable[[Path], dict[str, Stored]]


class Form(NamedTuple):
    """A file format for weights: the file's name if there is only one, e.g. "model.safetensors", and its reader."""

    name: str
    reader: Reader

    @property
    def index(self) -> str:
        """Name of the index file: which shard holds which tensor."""
        return f"{self.name}.index.json"


FORMS = (Form(WEIGHTS, stored_tensors), Form(TORCH_WEIGHTS, stored_torch_tensors))
"""In the order in which `transformers` looks for them."""


def open_weights(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder. Raises `UserError` if there are none, if a file is damaged, and if an index doesn't fit
    its files, with all problems."""
    for form in FORMS:
        if (folder / form.name).is_file():
            return form.reader(folder / form.name)
        if (folder / form.index).is_file():
            return _sharded(folder, form)
    save = 'save it by save_pretrained("FOLDER") of transformers'
    others = [*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.h5"), *folder.glob("*.msgpack")]
    reason = f"its weights may be in {min(others).name}" if others else "it has no weights"
    known = ", ".join(name for form in FORMS for name in (form.name, form.index))
    raise UserError(f"{folder}: none of {known}; {reason}; {save}")


def _sharded(folder: Path, form: Form) -> dict[str, Stored]:
    index = folder / form.index
    values = read_json(index)
    places = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{index}: weight_map is not a file's name for each tensor; restore it from a copy")
    files = list(dict.fromkeys(places.values()))
    problems = [f"{shortened(name)!r} is no file's name" for name in files if not _is_plain(name)]
    plain = [name for name in files if _is_plain(name)]
    problems += [f"{shortened(name)} is missing" for name in plain if not (folder / name).is_file()]
    if problems:
        raise refusal(index, problems, folder, "restore what is missing from a copy")
    by_name: dict[str, Stored] = {}
    for file in plain:
        tensors = form.reader(folder / file)
        expected = [name for name, place in places.items() if place == file]
        problems += [f"{shortened(name)} is not in {file}" for name in expected if name not in tensors]
        problems += [
            f"{shortened(name)} is in {file}, for which the index says {places.get(name, 'nothing')}"
            for name in tensors
            if places.get(name) != file
        ]
        by_name |= tensors
    if problems:
        raise refusal(index, problems, folder, "restore the files from a copy")
    return by_name


def _is_plain(name: str) -> bool:
    """Whether a name is a plain file name, which can't lead out of the folder."""
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0") and len(name) < 256
