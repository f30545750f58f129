"""The version of this distribution, as it is installed. Imported when it is asked for: it costs a mail parser, 3 MB."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mlx-transformer")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"
