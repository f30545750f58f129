"""Damage done to a file, drawn from a generator: to its bytes, to its JSON, to a header of safetensors."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from zipfile import ZipFile

import numpy as np

from mlx_transformer.system.gguf_files import read_gguf, write_gguf

NUMBERS = [
    *(0, -1, 1, 2, 3, 7, 64, 255, 300, 1000, 4096, 65535, 65536, 99999, 10**6, 2**20, 2**31 - 1, 2**31, 2**32, 2**40),
    *(2**53, 2**63 - 1, 2**63, 2**64, 10**20, 10**400, -(2**31), -(2**63), -(10**30)),
    *(0.5, -0.5, 1e-7, 1e-40, 1e-46, 5e-324, 1e38, 1e39, 1e300, 1.7e308, float("nan"), float("inf"), float("-inf")),
]
TEXTS = [
    "",
    " ",
    "a",
    "0",
    "\0",
    "\ud800",
    "é\u2028",
    "../../etc/passwd",
    "/dev/zero",
    "x" * 9999,
    "9" * 5000,
    "%s{}\n\t",
]
TEXTS += ["float32", "int8", "none", "true", "1x1x1", "encoder", "decoder", "rotary", "relative", "learned", "all"]


def nasty(random: Random) -> Any:
    """A value that a person might not have thought of."""
    kind = random.randrange(10)
    if kind < 5:
        return random.choice(NUMBERS)
    if kind < 7:
        return random.choice(TEXTS)
    deep: Any = 1
    for _ in range(random.choice([1, 3, 70, 500])):
        deep = random.choice([[deep], {"a": deep}])
    return random.choice([None, True, False, [], {}, [1, "a", None], {"a": {}}, [[]] * 3, deep])


def in_json(random: Random, value: Any) -> Any:
    """The same with one thing changed, somewhere."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        how = random.random()
        if how < 0.7:
            return {**value, key: in_json(random, value[key])}
        if how < 0.85:
            return {name: inner for name, inner in value.items() if name != key}
        if how < 0.95:
            return {**value, str(random.choice(TEXTS)): nasty(random)}
        return {(str(random.choice(TEXTS)) if name == key else name): inner for name, inner in value.items()}
    if isinstance(value, list) and value and random.random() < 0.8:
        i = random.randrange(len(value))
        how = random.random()
        if how < 0.6:
            return [*value[:i], in_json(random, value[i]), *value[i + 1 :]]
        if how < 0.8:
            return [*value[:i], *value[i + 1 :]]
        return [*value, random.choice([value[i], nasty(random)])]
    if isinstance(value, int | float) and not isinstance(value, bool) and random.random() < 0.4:
        third = value / 3 if abs(value) < 2**60 else 0
        return random.choice([value + 1, value - 1, -value, value * 2, third, f"{third}", [value]])
    if isinstance(value, str) and value and random.random() < 0.4:
        i = random.randrange(len(value))
        return random.choice([value[:i], value + value, value[:i] + random.choice(TEXTS) + value[i + 1 :], [value]])
    return nasty(random)


def in_bytes(random: Random, data: bytes) -> bytes:
    """The same cut, flipped, filled, mixed up."""
    i, j = sorted(random.randrange(len(data) + 1) for _ in range(2))
    junk = random.randbytes(random.choice([1, 4, 100]))
    flipped = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 3, 50])):
        if data:
            flipped[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return random.choice(
        [
            *(data[:i], bytes(flipped), bytes(flipped), data[:i] + bytes(j - i) + data[j:], data[:i] + junk + data[i:]),
            *(data[:i] + data[j:], data + junk, data + data, data[i:j], b"", b"\xef\xbb\xbf" + data, b"\0" * len(data)),
            *(b"[" * 100_000, b'{"a":' * 3000, b"9" * 5000, data.replace(b'"', b"'"), b"\xff\xfe" + data, junk * 50),
        ]
    )


def in_json_file(random: Random, path: Path) -> None:
    """Once or twice, and now and then to its bytes."""
    data = path.read_bytes()
    if random.random() < 0.25:
        path.write_bytes(in_bytes(random, data))
        return
    values = json.loads(data)
    for _ in range(random.choice([1, 1, 1, 2])):
        values = in_json(random, values)
    try:
        text = json.dumps(values, ensure_ascii=random.random() < 0.5)
        path.write_bytes(text.encode(errors="surrogatepass"))
    except ValueError:  # Python writes no number of more than 4300 digits
        path.write_text("9" * 5000, encoding="utf-8")


def in_safetensors(random: Random, path: Path) -> None:
    """To its header, to the header's length, or to its bytes."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, payload = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    how, name = random.random(), random.choice([key for key in header if key != "__metadata__"])
    if how < 0.3:
        path.write_bytes(in_bytes(random, data))
        return
    if how < 0.4:
        length = random.choice([0, 1, size - 1, size + 1, size + 8, len(data), 2**31, 2**63, 2**64 - 1])
        path.write_bytes(struct.pack("<Q", length) + data[8:])
        return
    if how < 0.55:
        begin, end = header[name]["data_offsets"]
        for offset in range(begin, end, random.choice([4, 64, 4096])):
            payload[offset : offset + 4] = struct.pack("<f", random.choice([float("nan"), float("inf"), 3e38, -1e30]))
            if random.random() < 0.5:
                break
    elif how < 0.7:
        types = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "U8", "BOOL", "U32", "C64", "F4", "X"]
        header[name]["dtype"] = random.choice(types)
    elif how < 0.8:
        header[name]["shape"] = random.choice([[], [0], [1], header[name]["shape"][::-1], [*header[name]["shape"], 1]])
    else:
        header = in_json(random, header)
    try:
        text = json.dumps(header).encode()
    except ValueError:
        text = b"{}"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(payload))


def in_gguf(random: Random, path: Path) -> None:
    """To a key's value, to a number before the tensors, or to its bytes."""
    how = random.random()
    if how < 0.3:
        path.write_bytes(in_bytes(random, path.read_bytes()))
        return
    file = read_gguf(path)
    if how < 0.6:
        data, end = bytearray(path.read_bytes()), min(tensor.begin for tensor in file.tensors.values())
        for _ in range(random.choice([1, 1, 3])):
            at = random.randrange(4, random.choice([32, 600, end]) - 8)
            number = random.choice([n for n in NUMBERS if isinstance(n, int) and 0 <= n < 2**64])
            data[at : at + 8] = random.choice([struct.pack("<Q", number), struct.pack("<I", number % 2**32)])
        path.write_bytes(data)
        return
    pairs = dict(file.pairs)
    for key in random.choices(list(pairs), k=random.choice([1, 1, 2])):
        value = random.choice([nasty(random), *[[], ["a", "b"], np.zeros(0, np.float32), np.array([1, 2], np.int32)]])
        pairs[key] = value if isinstance(value, str | bool | np.ndarray) or value in ([], ["a", "b"]) else 7
        if isinstance(value, int | float) and abs(value) < 1e38:
            pairs[key] = np.array([value], np.float64)[:1] if random.random() < 0.3 else float(value)
            pairs[key] = value if isinstance(value, int) and 0 <= value < 2**32 else pairs[key]
    tensors = {
        name: (np.asarray(tensor.stored()), "F32") for name, tensor in file.tensors.items() if random.random() < 0.98
    }
    with suppress(UnicodeEncodeError):
        write_gguf(path, pairs, tensors)


def in_archive(random: Random, path: Path) -> None:
    """To the instructions of a PyTorch file's pickle, to its other parts, or to its bytes."""
    if random.random() < 0.3:
        path.write_bytes(in_bytes(random, path.read_bytes()))
        return
    with ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in parts if name.endswith("data.pkl"))
    if random.random() < 0.2:
        name = random.choice(list(parts))
    parts[name] = in_pickle(random, parts[name], len(parts[name]))
    if random.random() < 0.1:
        del parts[random.choice(list(parts))]
    with ZipFile(path, "w", random.choice([0, 0, 0, 8])) as archive:
        for part, contents in parts.items():
            archive.writestr(part, contents)


def in_pickle(random: Random, before: bytes, size: int) -> bytes:
    """To the instructions in the first bytes of a file."""
    data, codes = bytearray(before), b"\x80\x95(N\x88JKMG\x8aX\x8c)\x85\x86\x87t]}aesuc\x93qr\x94hjQRb.0\x81io\x82l2"
    for _ in range(random.choice([1, 1, 2, 5])):
        at = random.randrange(size + 1)
        new = random.choice([random.randbytes(4), bytes([random.choice(codes)]) * random.choice([1, 1, 30, 10**6])])
        data[at : at + random.choice([0, 1, len(new)])] = new
    return bytes(data)


def in_legacy(random: Random, path: Path) -> None:
    """To a file of PyTorch before version 1.6: to its pickles, to the counts of its storages, or to its bytes."""
    data = path.read_bytes()
    how, keys = random.random(), data.rindex(b"\x80\x02](")
    if how < 0.2:
        data = in_bytes(random, data)
    elif how < 0.4:
        at = random.choice([data.index(b".", keys) + 1, random.randrange(keys, len(data) - 8)])
        count = random.choice([0, 1, -1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)])
        data = data[:at] + struct.pack("<q", count) + data[at + 8 :]
    else:
        data = in_pickle(random, data, keys + 500)
    path.write_bytes(data)


def in_marian(random: Random, path: Path) -> None:
    """To the bytes of one of Marian's own files, mostly of its head, where names, types, shapes and lengths stand."""
    data = bytearray(path.read_bytes())
    if random.random() < 0.3:
        path.write_bytes(in_bytes(random, bytes(data)))
        return
    for _ in range(random.choice([1, 1, 2, 5])):
        at = random.randrange(min(len(data), random.choice([64, 4000, len(data)])))
        size = random.choice([1, 4, 8])
        numbers = [0, 1, 2, 255, 256, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 62) + 1, (1 << 64) - 1]
        data[at : at + size] = (random.choice(numbers) % (1 << 8 * size)).to_bytes(size, "little")
    path.write_bytes(data)


def in_text(random: Random, path: Path) -> None:
    """To lines, or to the bytes."""
    data = path.read_bytes()
    lines = data.split(b"\n")
    i = random.randrange(len(lines))
    wild = [b"", b"\0", b"\xff\xfe", "\ud800".encode(errors="surrogatepass"), "\u2028".encode(), b"\r", b"a" * 100_000]
    wild += [b" ", b"\t", "日本語".encode() * 3000, b"</s>", b"1 " * 5000]
    changed = random.choice([[*lines[:i], random.choice(wild), *lines[i + 1 :]], lines[:i], lines[i:], lines * 3, []])
    path.write_bytes(b"\n".join(changed) if random.random() < 0.6 else in_bytes(random, data))


def to_no_file(random: Random, path: Path) -> None:
    """Something else in the place of a file."""
    size = path.stat().st_size
    path.unlink()

    def sparse(extent: int) -> Callable[[], object]:
        return lambda: [path.touch(), os.truncate(path, extent)]

    random.choice(
        [
            *(lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), lambda: path.symlink_to("/dev/urandom")),
            *(lambda: path.symlink_to(path.name), lambda: path.symlink_to("nothing"), lambda: path.symlink_to(".")),
            *(lambda: path.mkdir(), lambda: None, lambda: path.write_bytes(b""), lambda: path.symlink_to("/dev/null")),
            *(sparse(50 << 30), sparse(1 << 40), sparse(size), sparse(max(1, size) * 1000)),
        ]
    )()
