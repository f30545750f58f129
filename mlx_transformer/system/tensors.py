"""Arrays of safetensors files, strictly parsed: damage is a `UserError` that names the file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .errors import UserError
from .files import open_file

with suppress(ModuleNotFoundError):  # what only runs models does without
    import ml_dtypes  # noqa: F401 - with it NumPy, and so safetensors, knows bfloat16


def open_tensors(path: Path):
    """The opened file, whose arrays are read one by one."""
    with open_file(path):  # a regular file
        pass
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error


def read_tensors(path: Path) -> dict[str, NDArray]:
    """All arrays of one file; `UserError` too if one has a number that is not finite."""
    found = {}
    with open_tensors(path) as file:
        for name in file.keys():  # noqa: SIM118
            try:
                found[name] = file.get_tensor(name)
            except (SafetensorError, TypeError) as error:  # a type that NumPy doesn't have
                raise UserError(f"{path}: {name} cannot be read ({error})") from error
            check_finite(path, name, found[name])
    return found


def check_finite(path: Path, name: str, array: NDArray) -> None:
    if array.dtype.kind not in "iub" and not np.isfinite(array).all():
        raise UserError(f"{path}: {name} is not finite: damaged; restore it from a copy")


def write_tensors(
    path: Path, arrays: Mapping[str, NDArray], beside: str, metadata: dict[str, str] | None = None
) -> None:
    """Write one file, for all who may read the file `beside` it: safetensors makes it private."""
    # It takes the bytes as they lie. np.ascontiguousarray would turn a scalar, such as Adam's step, into a vector.
    save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, path, metadata)
    path.chmod(path.with_name(beside).stat().st_mode & 0o777)
