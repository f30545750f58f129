"""Versions of everything that a result depends on, for run records and reports."""

from __future__ import annotations

import functools
import platform
import sys
from importlib import metadata

PACKAGES = (
    "mlx-transformer mlx mlx-cpu mlx-metal mlx-cuda-13 scipy-openblas32 numpy onnx onnx-ir onnxscript onnxruntime "
    "onnxruntime-gpu tokenizers safetensors sacrebleu babel"
).split()


def versions() -> dict[str, str]:
    """{package: version} of the installed ones, with Python and the platform."""
    return dict(_versions())


@functools.cache  # a tenth of a second to read, and no process outlives an installation
def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
