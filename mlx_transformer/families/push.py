"""Send a model's folder to the Hugging Face Hub: choose the files, and push them in one commit.

`huggingface_hub` manages endpoint and token (HF_ENDPOINT, HF_TOKEN, `hf auth login`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mlx_transformer.core.adapter import read_adapter
from mlx_transformer.core.card import LEGAL, keys_of
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.folders import ONNX_CONFIG, WEIGHTS, Place, may_be_called
from mlx_transformer.families.marian_files.options import holds_marian
from mlx_transformer.system.errors import UserError, first_of, shortened
from mlx_transformer.system.files import read_bytes
from mlx_transformer.system.machine import __version__
from mlx_transformer.system.manifest import CARD, MANIFEST, manifest_with, verify_files

from .conversion import ORIGIN
from .hub import library, named_alone, one_line
from .marian_files.conversion import ORIGIN as MARIAN
from .peft import read_peft

GRAPHS, NEEDED = "onnx", "push needs huggingface_hub"
REFUSED = (401, 403)
"""HTTP statuses for a token that is invalid or has no right to write."""


class Shipment(NamedTuple):
    """The files to send, and notes to show before sending."""

    folder: Path
    files: dict[str, int]
    """{name in the repository: size in bytes}, e.g. {"model.safetensors": 4096}"""
    notes: list[str]
    changed: dict[str, bytes]
    """{name: content to send instead of the file's}"""

    def __str__(self) -> str:
        lines = [f"{size:>15,} {name}" for name, size in self.files.items()]
        return "\n".join([*lines, f"{sum(self.files.values()):>15,} bytes in all, of {self.folder}", *self.notes])


def shipment(folder: str | Path) -> Shipment:
    """Choose the files to send: all files of the folder except hidden ones.

    folder: a checkpoint, a run's folder, an adapter, an ONNX folder, or a folder that `to-huggingface` or `to-marian`
    wrote. If a checkpoint records the path of its original files, only the last part of the path is sent.
    Raises `UserError` for other folders, for damaged files, and for links that lead out of the folder.
    """
    place, folder = Place.of(folder), Path(folder)
    if place.holds(ONNX_CONFIG):
        verify_files(folder)
        verify_files(folder / GRAPHS)
    elif place.what == "an adapter":
        read_adapter(folder)
    elif place.what == "a published adapter":
        read_peft(folder)
    elif not (place.what == "a published model" and place.holds(WEIGHTS)) and not holds_marian(folder):
        folder = open_checkpoint(folder).folder
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*"))}
    shown = {name: path for name, path in found.items() if not any(part.startswith(".") for part in name.parts)}
    _check_links(folder, shown)
    files = {name.as_posix(): path.stat().st_size for name, path in shown.items() if path.is_file()}
    changed = _changed(folder)
    files |= {name: len(data) for name, data in changed.items()}
    keys = keys_of(read_bytes(folder / CARD).decode(errors="replace")) if CARD in files else {}
    notes = [] if any(key in keys for key in LEGAL) else [f"{folder / CARD} names no license yet"]
    return Shipment(folder, files, notes, changed)


def _check_links(folder: Path, files: Mapping[Path, Path]) -> None:
    """Raise `UserError` for links that lead out of the folder: their targets aren't meant to be published."""
    inside = folder.resolve()
    out = [
        name.as_posix()
        for name, path in files.items()
        if path.is_symlink() and not path.resolve().is_relative_to(inside)
    ]
    if out:
        raise UserError(f"{folder}: links lead out of it: {first_of(out)}; put copies in their place, or remove them")


def _changed(folder: Path) -> dict[str, bytes]:
    records = (folder / name for name in (ORIGIN, MARIAN) if (folder / name).is_file())
    changed = {file.name: data for file in records if (data := named_alone(file)) is not None}
    listed = changed and (folder / MANIFEST).is_file()
    return {**changed, MANIFEST: manifest_with(folder, changed)} if listed else changed


def check_repository(name: str) -> None:
    """Raise `UserError` for an invalid repository name, and if `huggingface_hub` or a token is missing."""
    if not may_be_called(name):
        raise UserError(f"{shortened(name)}: is no name on the Hugging Face Hub: give ORG/NAME, or your own USER/NAME")
    if library(NEEDED).get_token() is None:
        raise UserError("the Hugging Face Hub wants to know who sends: hf auth login, or a token in HF_TOKEN")


def push(shipment: Shipment, name: str, private: bool = False) -> str:
    """Send the files in one commit to the repository `name`, e.g. "me/opus-en-de"; return the commit's URL.

    The repository is created if it doesn't exist; private: make it private then. Raises `UserError` if sending fails;
    then there is no commit.
    """
    check_repository(name)
    hub = library(NEEDED)
    sent = {file: shipment.changed.get(file, str(shipment.folder / file)) for file in shipment.files}
    files = [hub.CommitOperationAdd(file, data) for file, data in sent.items()]
    try:
        api = hub.HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        return str(api.create_commit(name, files, commit_message=f"mlx-transformer {__version__}").commit_url)
    except Exception as error:  # no answer, or a refusal; the type depends on the HTTP library
        status = getattr(getattr(error, "response", None), "status_code", None)
        hint = "; may the token write there? hf auth login" if status in REFUSED else ""
        raise UserError(f"{name}: could not be sent to the Hugging Face Hub ({one_line(error)}){hint}") from error
