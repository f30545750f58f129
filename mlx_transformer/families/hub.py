"""Models on the Hugging Face Hub, fetched by name into the Hub's cache; and records of a checkpoint's original files.

An existing folder wins over a name on the Hub. `huggingface_hub` manages cache, endpoint and token (HF_HOME,
HF_ENDPOINT, HF_HUB_OFFLINE). Only data is fetched (configs, weights, tokenizers), never code.
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
    """Record of an imported file or folder: its path relative to the checkpoint, and the digests of `files`.

    E.g. {"place": "../opus-mt-en-de", "sha256": {"config.json": "5d4f..."}}.
    """
    way = Path(os.path.relpath(original.resolve(), checkpoint.resolve())).as_posix()
    return {"place": way, "sha256": {file.name: sha256(file) for file in files}}


def named_alone(file: Path) -> bytes | None:
    """Contents of a file with such a record, with the path shortened to "../NAME": for a published checkpoint, which
    shouldn't show local folders. None if the path is already this short."""
    record = read_object(file)
    place = record.get("place")
    if not isinstance(place, str) or place == (name := f"../{PurePosixPath(place).name}"):
        return None
    return (json.dumps({**record, "place": name}, indent=2) + "\n").encode()


def original_path(record: Mapping[str, Any], checkpoint: Path) -> Path:
    """The file or folder in a record of `place_of`. Raises `UserError` if it is missing or has changed."""
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
"""Most bytes of a cached reference, the file with the commit of a branch; `huggingface_hub` would read any size."""


class Found(NamedTuple):
    """A model's folder; for a model from the Hub also its name there and the revision, a commit."""

    folder: Path
    repository: str | None = None
    revision: str | None = None

    @property
    def origin(self) -> dict[str, str]:
        """The origin to record in a converted checkpoint; {} for a local folder."""
        return {"repository": self.repository, "revision": self.revision} if self.repository and self.revision else {}


def find_model(name: str | Path, revision: str | None = None) -> Found:
    """The folder `name`, or else the Hub's repository of that name, fetched unless it is cached.

    name: e.g. "runs/mine" or "Helsinki-NLP/opus-mt-en-de". revision: branch, tag or commit on the Hub; default: main.
    Raises `UserError` if there is neither, for a folder with a revision, and if the Hub can't be reached.
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
    """Import `huggingface_hub`. Raises `UserError`, starting with `why`, if it isn't installed."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise UserError(f"{why}: {needs('hub')}") from error
    return huggingface_hub


def _fetched(hub: Any, name: str, revision: str | None) -> Path:
    from .folder import needed  # imports all readers of published models

    try:
        info = hub.HfApi().model_info(name, revision=revision)
    except hub.errors.RepositoryNotFoundError as error:
        raise UserError(f"{name}: no such folder, and no model that you may read on the Hugging Face Hub") from error
    except hub.errors.RevisionNotFoundError as error:
        raise UserError(f"{name}: has no revision {revision!r} on the Hugging Face Hub") from error
    except Exception as error:  # offline or no answer; the type depends on the HTTP library
        return _cached(hub, name, revision, error)
    names = needed(entry.rfilename for entry in info.siblings)
    if not names:
        raise UserError(f"{name}: holds no model on the Hugging Face Hub ({CONFIG} missing)")
    try:
        # The first file by the branch's name, for the cache to record the branch; the others from the same commit.
        folder = Path(hub.hf_hub_download(name, names[0], revision=revision)).parent
        for file in names[1:]:
            hub.hf_hub_download(name, file, revision=folder.name)
    except Exception as error:
        raise UserError(f"{name}: could not be fetched from the Hugging Face Hub ({one_line(error)})") from error
    return _within_cache(folder, name)


def _within_cache(folder: Path, name: str) -> Path:
    """Check that no file in a commit's folder links out of the repository's cache; return the folder.

    Such a link could copy any file of this computer into a checkpoint. Raises `UserError`.
    """
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
    """Folder of a commit fetched before. Raises `UserError` if it isn't in the cache."""
    hub = library(f"{name}: is on the Hugging Face Hub")
    return _cached(hub, name, revision, LookupError("nobody was asked"))


def _cached(hub: Any, name: str, revision: str | None, error: Exception) -> Path:
    """Folder of a revision from the cache. error: why the Hub can't be asked."""
    cache = os.path.join(hub.constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    reference = os.path.join(cache, "refs", revision or "main")
    if os.path.isfile(reference) and os.path.getsize(reference) > LONGEST_REFERENCE:
        raise _damaged(name, f"its reference {revision or 'main'} is no commit")
    try:
        folder = Path(hub.hf_hub_download(name, CONFIG, revision=revision, local_files_only=True)).parent
    except OSError:
        raise UserError(
            f"{name}: no such folder, and not in the cache of the Hugging Face Hub, {cache}"
            f"{f' (revision {revision})' if revision else ''}; the Hub can't be reached ({one_line(error)})"
        ) from error
    except ValueError as damage:  # the reference leads out of the cache
        raise _damaged(name, one_line(damage)) from damage
    return _within_cache(folder, name)


def one_line(error: BaseException) -> str:
    """The message of an error of `huggingface_hub`, in one line."""
    return shortened(" ".join(str(error).split()) or type(error).__name__)
