"""The form of PyTorch before version 1.6: pickles in a row, then the numbers of all storages.

The pickles are a magic number, a version, what machine it was, the state dict, and the keys of storages in the order in
which they follow: each as the count of its numbers (int64) and the numbers as they lie in memory. There is no checksum.
"""

from __future__ import annotations

import io
import os

from .errors import shortened
from .torch_pickle import LARGEST_PICKLE, Cut, Machine, Refused, Storage, View, views

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
BEGIN = b"\x8a\x0a" + MAGIC.to_bytes(10, "little") + b"."
"""How every file begins, but for the pickle's protocol before it."""
COUNT = 8
"""Bytes before the numbers of a storage."""


def is_legacy(file: io.BufferedReader) -> bool:
    """Return whether the file is of this form, by its first pickle."""
    file.seek(0)
    return BEGIN in file.read(len(BEGIN) + 11)


def legacy_views(file: io.BufferedReader) -> tuple[dict[str, View], dict[str, int]]:
    """Return {name: tensor} of a file, and {key: first byte} of their storages. Raises `Refused`."""
    file.seek(0)
    machine = Machine(file.read(LARGEST_PICKLE), id_size=6)
    size = os.fstat(file.fileno()).st_size
    try:
        if (machine.run(), machine.run()) != (MAGIC, VERSION):
            raise Refused(f"has another version than {VERSION}, the only one of PyTorch's older form")
        system = machine.run()
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise Refused("is of a big-endian machine, or doesn't say: save it as safetensors there")
        tensors, keys = views(machine), machine.run()
    except Cut:
        if size <= LARGEST_PICKLE:
            raise
        raise Refused(
            f"its pickles have over {LARGEST_PICKLE / 1e6:,.1f} MB, more than names of tensors take"
        ) from None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise _damaged("has no list of its storages")
    if len(keys) != len(machine.storages) or {*keys} != {*machine.storages}:
        raise _damaged("lists other storages than its tensors are in")
    return tensors, _begins(file, [machine.storages[key] for key in keys], machine.at, size)


def _begins(file: io.BufferedReader, storages: list[Storage], at: int, size: int) -> dict[str, int]:
    """Return {key: first byte} of storages, which have to fill the file from `at` on, with the counts that the pickle
    says."""
    begins = {}
    for storage in storages:
        label = repr(shortened(storage.key))
        file.seek(at)
        head = file.read(COUNT)
        count = int.from_bytes(head, "little", signed=True)
        if len(head) == COUNT and count != storage.count:
            raise _damaged(f"its storage {label} has {count} numbers, its pickle says {storage.count}")
        begins[storage.key] = at + COUNT
        at += COUNT + storage.count * storage.kind.stored.itemsize
        if at > size:
            raise _damaged(f"ends within its storage {label}")
    if at < size:
        raise _damaged(f"has {size - at} bytes after its last storage")
    return begins


def _damaged(what: str) -> Refused:
    return Refused(f"{what}: damaged; restore it from a copy")
