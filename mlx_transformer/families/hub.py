"""A checkpoint's record of the files that it was imported from, to find them again.

Models by their names on the Hugging Face Hub: the files that a model needs, fetched once into the Hub's own cache.

A folder that exists wins over a name. `huggingface_hub` looks after cache, endpoint and tokens (HF_HOME, HF_ENDPOINT,
HF_HUB_OFFLINE). Only data is fetched: configs, weights and tokenizer, never code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from mlx_transformer.core.folders import CONFIG, Place
from mlx_transformer.system.errors import UserError, shortened
from mlx_transformer.system.files import read_object
from mlx_transformer.system.lazy import needs
from mlx_transformer.system.manifest import sha256


def place_of(original: Path, files: Iterable[Path], checkpoint: Path) -> dict[str, Any]:
    """Return a file or folder, by its way from the checkpoint, and the digests of these files."""
    way = Path(os.path.relpath(original.resolve(), checkpoint.resolve())).as_posix()
    return {"place": way, "sha256": {file.name: sha256(file) for file in files}}


def named_alone(file: Path) -> bytes | None:
    """Return what a file with such a record says, the way to the original shortened to its name, beside the checkpoint:
    others needn't know folders of this machine. None where it says no more."""
    record = read_object(file)
    place = record.get("place")
    if not isinstance(place, str) or place == (name := f"../{PurePosixPath(place).name}"):
        return None
    return (json.dumps({**record, "place": name}, indent=2) + "\n").encode()


def original_path(record: Mapping[str, Any], checkpoint: Path) -> Path:
    """Return the file or folder that `place_of` wrote down; `UserError` if it isn't there any more, or another one
    is."""
    place, digests = record.get("place"), record.get("sha256")
    if not isinstance(place, str) or not isinstance(digests, dict):
        raise UserError("the checkpoint doesn't say what it was imported from")
    original = Path(os.path.normpath(checkpoint.resolve() / place))
    folder = original if original.is_dir() else original.parent
    for name, digest in digests.items():
        file = folder / Path(str(name)).name
        if not file.is_file():
            raise UserError(f"{file}, from which it was imported, is not there")
        if sha256(file) != digest:
            raise UserError(f"{file} is no longer what was imported")
    return original


LONGEST_REFERENCE = 1000
"""Bytes of the file that says which commit a branch is, which the Hub's library reads whole."""


class Found(NamedTuple):
    """A model's folder; of one from the Hub its name there and the revision, a commit."""

    folder: Path
    repository: str | None = None
    revision: str | None = None

    @property
    def origin(self) -> dict[str, str]:
        """The record that a checkpoint made of it has of its origin; {} of a folder of one's own."""
        return {"repository": self.repository, "revision": self.revision} if self.repository and self.revision else {}


def find_model(name: str | Path, revision: str | None = None) -> Found:
    """Return the folder of that name, or else the repository, fetched if it isn't in the cache. revision: a branch, tag
    or commit of the Hub's, by default its main branch.

    `UserError` for a name that is neither, for a folder with a revision, and where the Hub can't be reached or used.
    """
    path, text = Path(name), str(name)
    if Place.of(name).what != "a name on the Hub":
        if revision is not None:
            raise UserError(f"{shortened(text)}: is no name on the Hub, which alone has revisions: leave it out")
        return Found(path)
    hub = library(f"{text}: no such folder; to fetch a model of this name from the Hugging Face Hub")
    folder = _fetched(hub, text, revision)
    return Found(folder, text, folder.name)


def library(why: str) -> Any:
    """Import `huggingface_hub`; `UserError`, which begins with `why`, where it is missing."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise UserError(f"{why}: {needs('hub')}") from error
    return huggingface_hub


def _fetched(hub: Any, name: str, revision: str | None) -> Path:
    from .folder import needed  # all that reads published models, which few open by name

    try:
        info = hub.HfApi().model_info(name, revision=revision)
    except hub.errors.RepositoryNotFoundError as error:
        raise UserError(f"{name}: no such folder, and no model that you may read on the Hugging Face Hub") from error
    except hub.errors.RevisionNotFoundError as error:
        raise UserError(f"{name}: has no revision {revision!r} on the Hugging Face Hub") from error
    except Exception as error:  # offline, or nobody answers: errors of whichever library it speaks HTTP by
        return _cached(hub, name, revision, error)
    names = needed(entry.rfilename for entry in info.siblings)
    if not names:
        raise UserError(f"{name}: holds no model on the Hugging Face Hub ({CONFIG} missing)")
    try:
        # By the branch's name, under which the cache finds it again; the others from the same commit.
        folder = Path(hub.hf_hub_download(name, names[0], revision=revision)).parent
        for file in names[1:]:
            hub.hf_hub_download(name, file, revision=folder.name)
    except Exception as error:
        raise UserError(f"{name}: could not be fetched from the Hugging Face Hub ({one_line(error)})") from error
    return _within_cache(folder, name)


def _within_cache(folder: Path, name: str) -> Path:
    """Return the folder of a commit. `UserError` for a file that is a link out of the repository's part of the cache:
    what it leads to would be copied into a checkpoint."""
    repository = folder.parents[1]
    places = [place.resolve() for place in (repository, repository / "blobs")]
    for file in sorted(folder.rglob("*")):
        try:
            target = file.resolve(strict=True)
        except (OSError, RuntimeError) as error:  # it leads nowhere, or to itself
            raise _damaged(name, f"{file.name} leads nowhere") from error
        if not any(target.is_relative_to(place) for place in places):
            raise _damaged(name, f"{file.name} leads out of it")
    return folder


def _damaged(name: str, reason: str) -> UserError:
    return UserError(f"{name}: damaged in the cache of the Hugging Face Hub ({reason}); delete its folder there")


def cached_model(name: str, revision: str) -> Path:
    """Return the folder of a commit that was fetched before; `UserError` where it isn't in the cache."""
    hub = library(f"{name}: is on the Hugging Face Hub")
    return _cached(hub, name, revision, LookupError("nobody was asked"))


def _cached(hub: Any, name: str, revision: str | None, error: Exception) -> Path:
    """Return the model as it was fetched before."""
    cache = os.path.join(hub.constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    reference = os.path.join(cache, "refs", revision or "main")
    if os.path.isfile(reference) and os.path.getsize(reference) > LONGEST_REFERENCE:
        raise _damaged(name, f"its reference {revision or 'main'} is no commit")
    try:
        folder = Path(hub.hf_hub_download(name, CONFIG, revision=revision, local_files_only=True)).parent
    except OSError:
        raise UserError(
            f"{name}: no such folder, and not in the cache of the Hugging Face Hub, which can't be reached"
            f" ({one_line(error)})"
        ) from error
    except ValueError as damage:  # a reference that leads out of the cache
        raise _damaged(name, one_line(damage)) from damage
    return _within_cache(folder, name)


def one_line(error: BaseException) -> str:
    """Return what an error of the Hub's library says, in one line."""
    return shortened(" ".join(str(error).split()) or type(error).__name__)
