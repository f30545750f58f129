"""The facts that a written site states about itself, for whoever writes or serves one."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from mlx_transformer.system.errors import CommandLine, UserError
from mlx_transformer.system.files import read_json
from mlx_transformer.system.manifest import sha256

SITE = "site.json"
"""Its models, its files with their digests, and versions."""
FORMAT = 1
SERVICE_WORKER = "service_worker.js"
UNLISTED = (SITE, SERVICE_WORKER)
"""Files of a site that its list doesn't have: the list itself, and what holds a digest of it."""


def is_site(folder: Path) -> bool:
    """Return whether a folder holds what `write_site` writes, of any version."""
    return all((folder / name).is_file() for name in UNLISTED)


def site_files(folder: Path, verify: bool = True) -> dict[str, str]:
    """Return {path below the folder: SHA-256} of a site's listed files. `UserError` for what is no site and, with
    `verify`, if one is missing or damaged."""
    if not is_site(folder):
        write = CommandLine("web", f"ONNX --out {quote(str(folder))}")
        raise UserError("{}: is no site; write one: {}", folder, write)
    try:
        values = read_json(folder / SITE)
        version = values["format"]
        files = {str(path): (str(entry["sha256"]), int(entry["bytes"])) for path, entry in values["files"].items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / SITE}: damaged ({error!r}); write the site again") from error
    if version != FORMAT:
        raise UserError(f"{folder / SITE}: format {version!r} is not known to this version (it reads format {FORMAT})")
    for path, (digest, size) in files.items():
        file = folder / path
        if not file.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{folder / SITE}: file name {path!r} leaves the folder")
        if verify and not (file.is_file() and file.stat().st_size == size and sha256(file) == digest):
            raise UserError(f"{file}: missing or damaged; write the site again")
    return {path: digest for path, (digest, _) in files.items()}
