"""Where the engines find onnxruntime-web, the npm package."""

from __future__ import annotations

import os
from pathlib import Path

from export.web.assets import PACKAGE, installed_package

from .protocol import Unavailable

VARIABLE = "ONNXRUNTIME_WEB"
PLACES = ("node_modules", "tests/consumers/node/node_modules", ".consumers/node_modules")


def find_package(runtime: str, *files: str) -> Path:
    """The package's folder: in the one that the variable names (its own or one that holds node_modules), else in the
    `PLACES` of the current folder, else where the command `web` keeps it. One that lacks any of `files`, of its folder
    dist, doesn't count. `Unavailable` without it."""
    configured = os.environ.get(VARIABLE)
    places = [Path(configured), Path(configured, "node_modules")] if configured else [Path(place) for place in PLACES]
    folders = [folder for place in places for folder in (place, place / PACKAGE)]
    if not configured and (kept := installed_package()) is not None:
        folders.append(kept)
    for folder in folders:
        if all((folder / "dist" / name).is_file() for name in ("../package.json", *files)):
            return folder.resolve()
    where = f"{VARIABLE}={configured}" if configured else f"{', '.join(PLACES)}; {VARIABLE} is not set"
    raise Unavailable(f"runtime {runtime}: {PACKAGE} is not installed ({where}): npm install {PACKAGE}")
