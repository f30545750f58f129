"""Whether a model is the one that it was: one digest of all its files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .folders import is_onnx_folder
from .manifest import sha256


def fingerprint(path: Path) -> str:
    """Of a checkpoint, the run that holds it, an ONNX folder, or one file and the data beside it. `UserError` if it is
    none of these."""
    if path.is_file():
        files = [path, *path.parent.glob(f"{path.name}_data")]
        folder = path.parent
    else:
        if is_onnx_folder(path):
            folder = path
        else:
            from .checkpoint import resolve

            folder = resolve(path)
        files = [file for file in folder.rglob("*") if file.is_file()]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(folder).as_posix()} {sha256(file)}\n".encode())
    return digest.hexdigest()
