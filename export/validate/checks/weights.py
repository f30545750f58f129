"""Parameters: bit for bit wherever a runtime or a file holds them; and which of them a runtime is held against.

Where a file quantises a parameter, what it must hold is the checkpoint's, quantised in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from export.validate.engines.protocol import Engine
from export.validate.findings import Weights

Array = NDArray


def check_weights(engine: Engine, stored: Mapping[str, Array]) -> Iterator[Weights]:
    """Yield one check for each place in which an engine holds parameters."""
    places: dict[str, dict[str, Array]] = {}
    for where, name, array in engine.parameters():
        places.setdefault(where, {})[name] = array
    for where, arrays in places.items():
        expected = {name: engine.as_stored(where, name, stored[name]) for name in arrays if name in stored}
        problems = [difference(name, expected.get(name), array) for name, array in arrays.items()]
        yield Weights(engine.name, where, len(arrays), tuple(p for p in problems if p), digest(arrays))
    unused = engine.unused_parameters()
    missing = [name for name in stored if name not in unused and not any(name in arrays for arrays in places.values())]
    if missing:
        yield Weights(engine.name, "all of it", 0, tuple(f"{name} is nowhere" for name in missing))


def digest(arrays: Mapping[str, Array]) -> str:
    """Return the SHA-256 of names, types, shapes and values, in the order of the names."""
    sha256 = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        sha256.update(f"{name} {array.dtype.str} {array.shape}".encode())
        sha256.update(np.ascontiguousarray(array).tobytes())
    return sha256.hexdigest()


def difference(name: str, expected: Array | None, got: Array) -> str:
    """Return what distinguishes two arrays bit for bit; empty if nothing does."""
    if expected is None:
        return f"{name} is no parameter of the checkpoint"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{name} is {got.dtype}{got.shape}, expected {expected.dtype}{expected.shape}"
    size = expected.dtype.itemsize
    bits = (np.ascontiguousarray(part).view(f"u{size}") for part in (got, expected))
    differing = np.argwhere(np.not_equal(*bits))
    if not len(differing):
        return ""
    place = tuple(int(i) for i in differing[0])
    values = f"{got[place]:.9g}, expected {expected[place]:.9g}"
    return f"{name}: {len(differing)} of {got.size} values differ in their bits, first {list(place)}: {values}"


def reference_weights(engine: Engine, stored: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the parameters of the network that a runtime is held against: the checkpoint's. Where it computes in
    float32 with weights that are stored as integers, it is another network, with these weights."""
    if engine.activations != "float32":
        return stored
    known = {name: where for where, name, _ in engine.parameters() if name in stored}
    return {**stored, **{name: engine.as_stored(where, name, stored[name]) for name, where in known.items()}}
