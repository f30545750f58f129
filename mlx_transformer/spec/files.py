"""Reading the small files of a model's folder, whoever made it: regular files of a sane size, or one line of error."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from .errors import UserError

LARGEST = 256 << 20
"""Bytes. The tokenizer.json of a million tokens has a fifth of them."""


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; `UserError` for what can't be read, is larger than `LARGEST`, or is no file at all: a
    pipe would be waited for, and a device read without an end."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{path}: is no regular file; put a copy of its contents there")
            if found.st_size > LARGEST:
                raise UserError(f"{path}: {found.st_size / 1e6:,.0f} MB, more than such a file may have")
            return file.read().decode()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read (not UTF-8 at byte {error.start + 1})") from error


def read_json(path: Path) -> Any:
    """The contents of a JSON file; `UserError` if it cannot be read or is no JSON."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged, or not JSON ({error}); restore it from a copy") from error


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe that nobody writes to
