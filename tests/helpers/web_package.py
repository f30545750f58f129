"""A package onnxruntime-web in name alone: sites are written with it, and not run."""

from __future__ import annotations

import json
from pathlib import Path

from export.web.assets import PACKAGE, WASM, WEBGPU


def write_web_package(node_modules: Path, version: str = "9.8.7") -> Path:
    """-> its folder"""
    folder = node_modules / PACKAGE
    (folder / "dist").mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps({"name": PACKAGE, "version": version}))
    for name in (*WASM, *WEBGPU, "ort.all.js"):
        (folder / "dist" / name).write_text(f"// {name}")
    return folder
