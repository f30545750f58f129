"""Packages of npm in name alone: sites are written with them, and not run."""

from __future__ import annotations

import json
from pathlib import Path

from export.web.assets import RUNTIME, TRANSFORMERS, Package


def write_web_package(node_modules: Path, version: str = "9.8.7", package: Package = RUNTIME) -> Path:
    """-> its folder"""
    folder = node_modules / package.name
    (folder / "dist").mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps({"name": package.name, "version": version}))
    for name in (*package.needed, "ort.all.js"):
        (folder / "dist" / name).write_text(f"// {name}")
    return folder


def write_packages(node_modules: Path) -> Path:
    """-> node_modules, with all that sites are made of"""
    for package in (RUNTIME, TRANSFORMERS):
        write_web_package(node_modules, package=package)
    return node_modules
