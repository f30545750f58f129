"""Find or install onnxruntime-web: an npm package already on this machine, or the pinned version, installed once.

It is installed by npm, or without npm from the package's .tgz file, after comparing its digest with the pinned one.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_transformer.system.durable import Output, replace_folder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import default_folder, read_json

PACKAGE = "onnxruntime-web"
WASM = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
"""The build in the package's folder `dist` for running models on the processor, 14 MB."""
WEBGPU = ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm")
"""The build for WebGPU, 27 MB; a browser fetches only one of the two."""
KEPT = ("package.json", *(f"dist/{name}" for name in WASM + WEBGPU))
INSTALL = ["install", "--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"]
SECONDS = 900
REGISTRY = ("npm_config_registry", "NPM_CONFIG_REGISTRY")
"""Environment variables with the registry's address, read by npm too."""
MAX_PACKAGE_BYTES = 200_000_000  # the .tgz file has 30 million


def find_package(assets: Path | None, log: Callable[[str], None] = lambda _: None) -> Path:
    """Return the folder of onnxruntime-web.

    assets: a node_modules folder, the package itself, or its .tgz file. None: look in the working folder's
    node_modules, then in the user's cache, and install the pinned version there if it is missing. Raises UserError if
    the package can't be found or installed.
    """
    if assets is not None and assets.is_file():
        folder = _package_folder()
        if not _is_package(folder):
            _unpack(assets.read_bytes(), str(assets), folder)
        return folder
    if assets is not None:
        for folder in (assets, assets / PACKAGE, assets / "node_modules" / PACKAGE):
            if _is_package(folder):
                return folder
        raise UserError(f"{assets}: holds no {PACKAGE} with {WASM[0]}; install it there: npm install {PACKAGE}")
    if _is_package(here := Path("node_modules") / PACKAGE):
        return here
    try:
        folder = _package_folder()
    except UserError:
        raise UserError(f"{PACKAGE}: this user has no home to install it in; name a node_modules by --assets") from None
    if not _is_package(folder):
        log(f"Installing {PACKAGE} {pinned_version()} into {folder}, once; 42 MB of 130 are kept")
        _install(folder)
    return folder


def installed_package() -> Path | None:
    """The package in the user's cache, if `find_package` has put it there; otherwise None."""
    try:
        folder = _package_folder()
    except UserError:
        return None
    return folder if _is_package(folder) else None


def pinned_version() -> str:
    """The version in package.json beside this file."""
    return json.loads(_package_json())["dependencies"][PACKAGE]


def pinned_digest() -> str:
    """The digest of that version's .tgz file, as in npm's lock files: algorithm, "-", base64."""
    return json.loads(_package_json())["integrity"][PACKAGE]


def version_of(package: Path) -> str:
    """The package's version. Raises UserError for a damaged package."""
    values = read_json(package / "package.json")
    if not isinstance(values, dict) or not isinstance(values.get("version"), str):
        raise UserError(f"{package / 'package.json'}: names no version; install {PACKAGE} again")
    return values["version"]


def _package_folder() -> Path:
    return default_folder() / f"{PACKAGE}-{pinned_version()}"


def _package_json() -> str:
    return files("export.web").joinpath("package.json").read_text(encoding="utf-8")


def _is_package(folder: Path) -> bool:
    return (folder / "package.json").is_file() and all((folder / "dist" / name).is_file() for name in WASM + WEBGPU)


def _install(folder: Path) -> None:
    """Install the package by npm, or without npm from the registry named in the environment. Keep only the files needed
    by sites."""
    npm = shutil.which("npm")
    if npm is None:
        registry = next((os.environ[name] for name in REGISTRY if os.environ.get(name)), None)
        if registry is None:
            raise UserError(
                f"{PACKAGE} is not here, and there is no npm to install it: install Node.js (https://nodejs.org), set"
                f" {REGISTRY[0]} to the address of npm's registry, or name by --assets a node_modules that has it, or"
                f" the file of its version {pinned_version()}"
            )
        address = f"{registry.rstrip('/')}/{PACKAGE}/-/{PACKAGE}-{pinned_version()}.tgz"
        _unpack(_fetched(address), address, folder)
        return
    with TemporaryDirectory() as temporary:
        (Path(temporary) / "package.json").write_text(_package_json(), encoding="utf-8")
        try:
            done = subprocess.run([npm, *INSTALL], cwd=temporary, capture_output=True, text=True, timeout=SECONDS)
            problem = "" if done.returncode == 0 else " ".join(done.stderr.split())[:300] or f"exit {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        installed = Path(temporary) / "node_modules" / PACKAGE
        if not problem and not _is_package(installed):
            problem = f"what it installed lacks {WASM[0]}"
        if problem:
            raise UserError(f"npm could not install {PACKAGE} ({problem}); or name a node_modules by --assets")
        with replace_folder(Output.any(folder, PACKAGE)) as place:
            (place / "dist").mkdir()
            for name in KEPT:
                shutil.copyfile(installed / name, place / name)


def _fetched(address: str) -> bytes:
    if not address.startswith(("https://", "http://")):
        raise UserError(f"{address}: {REGISTRY[0]} must be an address that begins with https://")
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.read(MAX_PACKAGE_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{address}: could not be fetched ({error}); or name its file by --assets") from error


def _unpack(file: bytes, where: str, folder: Path) -> None:
    """Check the digest of the .tgz file, and unpack the files needed by sites."""
    algorithm, _, digest = pinned_digest().partition("-")
    if base64.b64encode(hashlib.new(algorithm, file).digest()).decode() != digest:
        needed = f"the file of {PACKAGE} {pinned_version()}"
        raise UserError(f"{where}: isn't {needed} (its {algorithm} differs); fetch it again")
    with tarfile.open(fileobj=io.BytesIO(file)) as archive, replace_folder(Output.any(folder, PACKAGE)) as place:
        (place / "dist").mkdir()
        for name in KEPT:
            member = archive.extractfile(f"package/{name}")
            assert member is not None  # the digest guarantees it
            (place / name).write_bytes(member.read())
