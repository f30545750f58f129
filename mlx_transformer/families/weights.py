"""The weights of a published model's folder, whatever kind of files they are in: none is read yet, all are found."""

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
    """A kind of file: its name where there is one, and what reads it."""

    name: str
    reader: Reader

    @property
    def index(self) -> str:
        """The file that says which of several has which tensor."""
        return f"{self.name}.index.json"


FORMS = (Form(WEIGHTS, stored_tensors), Form(TORCH_WEIGHTS, stored_torch_tensors))
"""In the order in which `transformers` looks for them."""


def open_weights(folder: Path) -> dict[str, Stored]:
    """Return all tensors of a folder. Raises `UserError` where there are none, for damage, and for an index with
    everything that is wrong between it and its files."""
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
    """Return whether a name is that of a file beside the index, and nothing that leads elsewhere."""
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0") and len(name) < 256
