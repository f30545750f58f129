"""Find or install the npm packages of a site: those already on this machine, or the pinned versions, fetched once.

A package's .tgz file comes by `npm pack`, or without npm from the registry; its digest is compared with the pinned one.
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
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_transformer.system.durable import Output, replace_folder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import default_folder, read_json

WASM = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
"""The build in onnxruntime-web's folder `dist` for running models on the processor, 14 MB."""
WEBGPU = ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm")
"""The build for WebGPU, 27 MB; a browser fetches only one of the two."""
PACK = ["pack", "--ignore-scripts", "--loglevel=error"]
SECONDS = 900
REGISTRY = ("npm_config_registry", "NPM_CONFIG_REGISTRY")
"""Environment variables with the registry's address, read by npm too."""
MAX_PACKAGE_BYTES = 200_000_000  # onnxruntime-web's .tgz file has 33 million


@dataclass(frozen=True)
class Package:
    """An npm package. needed: the files in its folder `dist` that sites are made of; size: what they take, in words."""

    name: str
    needed: tuple[str, ...]
    size: str

    @property
    def version(self) -> str:
        """The version in package.json beside this file."""
        return _pinned("dependencies")[self.name]

    @property
    def digest(self) -> str:
        """The digest of that version's .tgz file, as in npm's lock files: algorithm, "-", base64."""
        return _pinned("integrity")[self.name]

    @property
    def kept(self) -> tuple[str, ...]:
        return ("package.json", *(f"dist/{name}" for name in self.needed))

    def is_in(self, folder: Path) -> bool:
        return all((folder / name).is_file() for name in self.kept)

    def cached(self) -> Path:
        """Its place in the user's cache. Raises UserError if this user has none."""
        return default_folder() / f"{self.name.split('/')[-1]}-{self.version}"


RUNTIME = Package("onnxruntime-web", WASM + WEBGPU, "42 MB of 130")
TRANSFORMERS = Package("@huggingface/transformers", ("transformers.min.js",), ".6 MB of 10")
"""Transformers.js, with the same version of onnxruntime-web inside; its WebAssembly is in that package."""


def find_package(assets: Path | None, log: Callable[[str], None] = lambda _: None, package: Package = RUNTIME) -> Path:
    """Return the package's folder.

    assets: a node_modules folder, the package itself, or its .tgz file. None: look in the working folder's
    node_modules, then in the user's cache, and fetch the pinned version into it if it is missing. Raises UserError if
    the package can't be found or fetched.
    """
    if assets is not None and assets.is_file():
        folder = package.cached()
        if not package.is_in(folder):
            _unpack(package, assets.read_bytes(), str(assets), folder)
        return folder
    if assets is not None:
        for folder in (assets, assets / package.name, assets / "node_modules" / package.name):
            if package.is_in(folder):
                return folder
        name = package.name
        raise UserError(f"{assets}: holds no {name} with {package.needed[0]}; install it there: npm install {name}")
    if package.is_in(here := Path("node_modules") / package.name):
        return here
    try:
        folder = package.cached()
    except UserError:
        name = package.name
        raise UserError(f"{name}: this user has no home to install it in; name a node_modules by --assets") from None
    if not package.is_in(folder):
        log(f"Installing {package.name} {package.version} into {folder}, once; {package.size} are kept")
        _install(package, folder)
    return folder


def installed_package() -> Path | None:
    """onnxruntime-web in the user's cache, if `find_package` has put it there; otherwise None."""
    try:
        folder = RUNTIME.cached()
    except UserError:
        return None
    return folder if RUNTIME.is_in(folder) else None


def version_of(package: Path) -> str:
    """The version of the package in a folder. Raises UserError if it is damaged."""
    values = read_json(package / "package.json")
    if not isinstance(values, dict) or not isinstance(values.get("version"), str):
        raise UserError(f"{package / 'package.json'}: names no version; install {package.name} again")
    return values["version"]


def _pinned(field: str) -> dict[str, str]:
    return json.loads(files("export.web").joinpath("package.json").read_text(encoding="utf-8"))[field]


def _install(package: Package, folder: Path) -> None:
    """Fetch the package by npm, or without npm from the registry named in the environment."""
    npm = shutil.which("npm")
    if npm is None:
        registry = next((os.environ[name] for name in REGISTRY if os.environ.get(name)), None)
        if registry is None:
            raise UserError(
                f"{package.name} is not here, and there is no npm to install it: install Node.js (https://nodejs.org),"
                f" set {REGISTRY[0]} to the address of npm's registry, or name by --assets a node_modules that has it,"
                f" or the file of its version {package.version}"
            )
        address = f"{registry.rstrip('/')}/{package.name}/-/{package.name.split('/')[-1]}-{package.version}.tgz"
        _unpack(package, _fetched(address), address, folder)
        return
    with TemporaryDirectory() as temporary:
        command = [npm, *PACK, f"{package.name}@{package.version}"]
        try:
            done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, timeout=SECONDS)
            problem = "" if done.returncode == 0 else " ".join(done.stderr.split())[:300] or f"exit {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        file = next(Path(temporary).glob("*.tgz"), None)
        if problem or file is None:
            why = problem or "it wrote no .tgz file"
            raise UserError(f"npm could not install {package.name} ({why}); or name a node_modules by --assets")
        _unpack(package, file.read_bytes(), file.name, folder)


def _fetched(address: str) -> bytes:
    if not address.startswith(("https://", "http://")):
        raise UserError(f"{address}: {REGISTRY[0]} must be an address that begins with https://")
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.read(MAX_PACKAGE_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{address}: could not be fetched ({error}); or name its file by --assets") from error


def _unpack(package: Package, file: bytes, where: str, folder: Path) -> None:
    """Check the digest of the .tgz file, and unpack the files needed by sites."""
    algorithm, _, digest = package.digest.partition("-")
    if base64.b64encode(hashlib.new(algorithm, file).digest()).decode() != digest:
        needed = f"the file of {package.name} {package.version}"
        raise UserError(f"{where}: isn't {needed} (its {algorithm} differs); fetch it again")
    output = Output.any(folder, package.name)
    with tarfile.open(fileobj=io.BytesIO(file)) as archive, replace_folder(output) as place:
        (place / "dist").mkdir()
        for name in package.kept:
            member = archive.extractfile(f"package/{name}")
            assert member is not None  # the digest guarantees it
            (place / name).write_bytes(member.read())
