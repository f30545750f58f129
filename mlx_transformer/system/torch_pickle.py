"""Read the pickle of a PyTorch state dict with a small interpreter that knows only tensors.

A pickle is a program for a stack machine. Python's `Unpickler` calls any function that the file names. This interpreter
calls nothing: it knows the few names that occur in state dicts and refuses all others.

`Unpickler` with our own `find_class` and `persistent_load` would call nothing either, but it has no bounds. Nine bytes
make its memo take 2 GB (LONG_BINPUT). Nested tuples as a dict's key overflow the C stack, or take 2^200 steps to hash.
Dict keys here are text, so nothing nested is ever hashed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .errors import shortened
from .tensors import number_type

STORAGES = {"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "LongStorage": "int64"}
STORAGES |= {"BFloat16Storage": "bfloat16", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"}
STORAGES |= {"ByteStorage": "uint8", "BoolStorage": "bool"}
DICT, TENSOR, PARAMETER = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
)
LARGEST_PICKLE = 8 << 20
"""Bytes; 1,000 tensors take about 200,000."""
HIGHEST_RANK = 64
"""PyTorch's own limit. Without it, a long shape shared by many tensors would be copied for each of them."""
KNOWN = {DICT, TENSOR, PARAMETER, *(f"torch.{name}" for name in STORAGES)}


@dataclass(frozen=True)
class Global:
    """Name of a function or class, e.g. "torch.FloatStorage"; it is never imported."""

    name: str


@dataclass(frozen=True)
class Storage:
    """`count` numbers of a file; tensors use `size` of them, starting at `first`."""

    key: str
    dtype: np.dtype
    count: int
    first: int
    size: int


@dataclass(frozen=True)
class View:
    """A tensor: a strided view of a storage. Offset and strides count numbers, not bytes."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Refused(Exception):  # noqa: N818 - becomes a `UserError` with the file's name
    """The pickle is damaged, or holds something other than tensors."""


class Cut(Refused):
    """The bytes end before the program does."""


class Machine:
    """Run pickle programs. Values are None, bool, numbers, text, tuples, lists, dicts with text keys, and the classes
    above.

    id_size: length of a storage's persistent id: 5, or 6 in old files, where the last entry selects a part of it.
    at: the next byte to read. storages: {key: storage} of all storages named so far.
    """

    def __init__(self, program: bytes, id_size: int = 5):
        self._program, self._id_size = program, id_size
        self.at = 0
        self.storages: dict[str, Storage] = {}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Run the next program and return its result. Raises `Refused`, or `Cut` if the bytes end before it does."""
        self._stack, self._marks, self._memo = [], [], {}
        try:
            while (code := self._take(1)) != b".":
                operation = OPERATIONS.get(code)
                if operation is None:
                    raise Refused(f"has the pickle instruction {code!r}, which no state dict needs")
                operation(self)
            return self._stack.pop()
        except (IndexError, KeyError, UnicodeDecodeError, ValueError, TypeError, OverflowError) as error:
            raise Refused(f"is no pickle of tensors (at byte {self.at})") from error

    def _take(self, size: int) -> bytes:
        taken = self._program[self.at : self.at + size]
        if size < 0 or len(taken) < size:
            raise Cut("ends within its pickle: damaged; restore it from a copy")
        self.at += size
        return taken

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self, kind: type) -> Any:
        value = self._stack.pop()
        if not isinstance(value, kind):
            raise TypeError
        return value

    def _since_mark(self) -> list[Any]:
        place = self._marks.pop()
        values = self._stack[place:]
        del self._stack[place:]
        return values

    def _text(self, form: str) -> None:
        self._push(self._take(self._number(form)).decode())

    def _tuple(self, size: int) -> None:
        values = [self._stack.pop() for _ in range(size)]
        self._push(tuple(values[::-1]))

    def _line(self) -> str:
        end = self._program.find(b"\n", self.at)
        return self._take(end - self.at + 1 if end >= 0 else len(self._program))[:-1].decode()

    def _global(self) -> None:
        module, name = self._line(), self._line()
        self._name(f"{module}.{name}")

    def _stack_global(self) -> None:
        name, module = self._pop(str), self._pop(str)
        self._name(f"{module}.{name}")

    def _name(self, name: str) -> None:
        if name not in KNOWN:
            raise Refused(f"asks for {shortened(name)!r}, which is no tensor; nothing in it was run")
        self._push(Global(name))

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _set_items(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        keys = pairs[::2]
        if not isinstance(target, dict) or len(pairs) % 2 or not all(isinstance(key, str) for key in keys):
            raise TypeError
        target.update(zip(keys, pairs[1::2], strict=True))

    def _append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise TypeError
        target.extend(values)

    def _storage(self) -> None:
        """Load a persistent id: ("storage", class, key, device, count). Old files add None or (key, first, size) of a
        part."""
        identity = self._pop(tuple)
        word, storage, key, device, count, part = (*identity, None) if self._id_size == 5 else identity
        kind = STORAGES[storage.name.removeprefix("torch.")] if isinstance(storage, Global) else None
        if word != "storage" or kind is None or not isinstance(key, str) or not isinstance(device, str):
            raise TypeError
        whole = Storage(key, number_type(kind), _size(count), 0, count)
        if self.storages.setdefault(key, whole) != whole:
            raise Refused(f"has two kinds of storage {shortened(key)!r}: damaged; restore it from a copy")
        _, first, size = ("", 0, count) if part is None else part
        if _size(first) + _size(size) > count:
            raise Refused(f"has a part outside its storage {shortened(key)!r}: damaged; restore it from a copy")
        self._push(replace(whole, first=first, size=size))

    def _call(self) -> None:
        arguments, function = self._pop(tuple), self._pop(Global)
        if function.name == DICT and not arguments:
            self._push({})
        elif function.name == TENSOR and len(arguments) >= 6:
            storage, offset, shape, strides = arguments[:4]
            if not isinstance(storage, Storage) or len(shape) != len(strides) or len(shape) > HIGHEST_RANK:
                raise TypeError
            self._push(View(storage, _size(offset), tuple(map(_size, shape)), tuple(map(_size, strides))))
        elif function.name == PARAMETER and isinstance(arguments[0], View):
            self._push(arguments[0])
        else:
            raise TypeError

    def _build(self) -> None:
        """Drop the attributes of a dict: PyTorch's `_metadata`, with versions of modules."""
        self._pop(dict)
        if not isinstance(self._stack[-1], dict):
            raise TypeError


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError
    return value


def _does(push: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine._push(push(machine))


OPERATIONS: dict[bytes, Callable[[Machine], Any]] = {
    b"\x80": lambda m: m._take(1),  # PROTO
    b"\x95": lambda m: m._take(8),  # FRAME
    b"(": lambda m: m._marks.append(len(m._stack)),
    b"N": _does(lambda m: None),
    b"\x88": _does(lambda m: True),
    b"\x89": _does(lambda m: False),
    b"J": _does(lambda m: m._number("<i")),  # BININT
    b"K": _does(lambda m: m._number("<B")),  # BININT1
    b"M": _does(lambda m: m._number("<H")),  # BININT2
    b"G": _does(lambda m: m._number(">d")),  # BINFLOAT
    b"\x8a": _does(lambda m: int.from_bytes(m._take(m._number("<B")), "little", signed=True)),  # LONG1
    b"X": lambda m: m._text("<I"),  # BINUNICODE
    b"\x8c": lambda m: m._text("<B"),  # SHORT_BINUNICODE
    b")": lambda m: m._tuple(0),
    b"\x85": lambda m: m._tuple(1),
    b"\x86": lambda m: m._tuple(2),
    b"\x87": lambda m: m._tuple(3),
    b"t": _does(lambda m: tuple(m._since_mark())),
    b"]": _does(lambda m: []),
    b"}": _does(lambda m: {}),
    b"a": lambda m: m._append([m._stack.pop()]),
    b"e": lambda m: m._append(m._since_mark()),
    b"s": lambda m: m._set_items([m._stack.pop() for _ in range(2)][::-1]),
    b"u": lambda m: m._set_items(m._since_mark()),
    b"c": lambda m: m._global(),
    b"\x93": lambda m: m._stack_global(),
    b"q": lambda m: m._put(m._number("<B")),  # BINPUT
    b"r": lambda m: m._put(m._number("<I")),  # LONG_BINPUT
    b"\x94": lambda m: m._put(len(m._memo)),  # MEMOIZE
    b"h": _does(lambda m: m._memo[m._number("<B")]),  # BINGET
    b"j": _does(lambda m: m._memo[m._number("<I")]),  # LONG_BINGET
    b"Q": lambda m: m._storage(),  # BINPERSID
    b"R": lambda m: m._call(),  # REDUCE
    b"b": lambda m: m._build(),
}


def views(machine: Machine) -> dict[str, View]:
    """Run the machine's next program, a state dict, and return {name: tensor}. Raises `Refused` for anything else."""
    root = machine.run()
    if not isinstance(root, dict):
        raise Refused(f"holds a {type(root).__name__}, no dict of tensors by name")
    for name, value in root.items():
        if not isinstance(value, View):
            raise Refused(
                f"{shortened(name)!r} is a {type(value).__name__}, no tensor: save the model's state_dict alone"
            )
    return root
