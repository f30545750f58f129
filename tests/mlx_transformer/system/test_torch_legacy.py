"""Files of PyTorch before version 1.6: the same tensors as in an archive, and nothing run, cut or lied about."""

from __future__ import annotations

import io
import os
import pickle
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from torch_archives import (
    BEGIN,
    END,
    STORAGES,
    WHOLE,
    View,
    assert_stored,
    counted,
    head,
    listed,
    named,
    number,
    part,
    save,
    several,
    state_dict,
    storage,
    tensor,
    text,
    write_archive,
    write_legacy,
)

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.torch_files import stored_torch_tensors
from mlx_transformer.system.torch_pickle import LARGEST_PICKLE

NUMBERS = np.arange(24, dtype=np.float32)


@pytest.mark.parametrize("dtype", STORAGES, ids=lambda dtype: dtype.name)
def test_every_kind_of_storage(dtype, tmp_path):
    array = (np.arange(6).reshape(2, 3) % 2).astype(dtype)
    found = stored_torch_tensors(save(tmp_path / "x.bin", {"a": array, "b": array + array}, legacy=True))
    for name, stored in (("a", array), ("b", array + array)):
        assert_stored(found[name], stored)


def test_a_file_of_pytorch():
    """By `make_golden_legacy.py`."""
    found = stored_torch_tensors(Path(__file__).with_name("golden_legacy.bin"))
    x = NUMBERS.reshape(4, 6)
    expected = {"whole": x, "transposed": x.T, "parameter": x[1:3, ::2], "half": x.astype(np.float16)}
    expected |= {"bfloat16": x.astype(ml_dtypes.bfloat16)}
    expected |= {"integers": x.astype(np.int64), "scalar": np.float32(5), "empty": np.zeros((0, 3), np.float32)}
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(found[name], array)


def views(*entries: tuple[View, bytes]) -> bytes:
    """The state dict of tensors a, b, ... of a storage of 24 float32, each of all or of a part of it."""
    made = (tensor(view, "FloatStorage", 24, part) for view, part in entries)
    return state_dict(dict(zip("abc", made, strict=False)))


@pytest.mark.parametrize(
    ("view", "part", "expected"),
    [
        (View("0", 0, (6, 4), (1, 6)), WHOLE, NUMBERS.reshape(4, 6).T),
        (View("0", 1, (4, 3), (6, 2)), WHOLE, NUMBERS.reshape(4, 6)[:, 1::2]),
        (View("0", 2, (3,), (1,), True), WHOLE, NUMBERS[2:5]),
        (View("0", 0, (0,), (1,)), WHOLE, NUMBERS[:0]),
        (View("0", 24, (0, 30), (30, 1)), part(24, 0), np.zeros((0, 30))),
        (View("0", 0, (2, 4), (4, 1)), part(8, 8), NUMBERS[8:16].reshape(2, 4)),
        (View("0", 3, (2,), (1,)), part(19, 5), NUMBERS[22:]),
        (View("0", 0, (), ()), part(7, 1), NUMBERS[7]),
    ],
)
def test_views_of_one_storage(view, part, expected, tmp_path):
    path = write_legacy(tmp_path / "x.bin", views((View("0", 0, (24,), (1,)), WHOLE), (view, part)), {"0": NUMBERS})
    found = stored_torch_tensors(path)
    np.testing.assert_array_equal(found["a"], NUMBERS)
    np.testing.assert_array_equal(found["b"], expected)


def test_tensors_that_share_a_storage(tmp_path):
    tied = np.arange(4, dtype=np.float16)
    path = save(tmp_path / "x.bin", {"a": tied, "b": tied, "c": tied + 1}, legacy=True)
    assert path.read_bytes().count(counted(tied)) == 1
    found = stored_torch_tensors(path)
    for name, expected in (("a", tied), ("b", tied), ("c", tied + 1)):
        np.testing.assert_array_equal(found[name], expected)


def test_storages_in_the_order_of_the_list(tmp_path):
    program = state_dict({name: tensor(View(name, 0, (2,), (1,)), "FloatStorage", 2, WHOLE) for name in "ab"})
    found = stored_torch_tensors(write_legacy(tmp_path / "x.bin", program, {"b": NUMBERS[:2], "a": NUMBERS[2:4]}))
    np.testing.assert_array_equal(found["a"], NUMBERS[2:4])
    np.testing.assert_array_equal(found["b"], NUMBERS[:2])


def test_no_tensors(tmp_path):
    assert stored_torch_tensors(write_legacy(tmp_path / "x.bin", state_dict({}), {})) == {}


def test_a_tensor_is_read_without_the_others(tmp_path):
    """Of a gigabyte, which is a hole in the file."""
    count, path = 1 << 28, tmp_path / "x.bin"
    program = state_dict({"a": tensor(View("0", count - 3, (3,), (1,)), "FloatStorage", count, WHOLE)})
    with path.open("wb") as file:
        file.write(head() + program + listed("0") + count.to_bytes(8, "little"))
        file.seek(4 * count - 12, 1)
        file.write(NUMBERS[1:4].tobytes())
    tracemalloc.start()
    np.testing.assert_array_equal(stored_torch_tensors(path)["a"], NUMBERS[1:4])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * LARGEST_PICKLE


ALL = views((View("0", 0, (24,), (1,)), WHOLE))
STORED = listed("0") + counted(NUMBERS)
SHORT = np.arange(3, dtype=np.float32)
OTHER = {
    "has another version than 1001": head(version=1000) + ALL + STORED,
    "is of a big-endian machine, or doesn't say: save it as safetensors there": head(little=b"\x89") + ALL + STORED,
    "big-endian machine, or doesn't say": head()[: head().rindex(BEGIN)] + BEGIN + b"N" + END + ALL + STORED,
    "asks for 'os.system', which is no tensor; nothing in it was run": (
        head() + BEGIN + named("os", "system") + several(text("true")) + b"R" + END + STORED
    ),
    "asks for '__main__.Net'": (
        head() + BEGIN + several(text("module"), named("__main__", "Net"), text("a"), text("b")) + b"Q" + END + STORED
    ),
    "is no pickle of tensors": (
        head() + state_dict({"a": tensor(View("0", 0, (24,), (1,)), "FloatStorage", 24)}) + STORED
    ),
    "holds a list, no dict": head() + BEGIN + b"]" + END + STORED,
    "'a' is a Storage, no tensor": head() + state_dict({"a": storage("0", "FloatStorage", 24, WHOLE)}) + STORED,
    "has no list of its storages": head() + ALL + BEGIN + b"}" + END + counted(NUMBERS),
    "no list of its storages": head() + ALL + BEGIN + b"](" + number(0) + b"e" + END + counted(NUMBERS),
    "lists other storages than its tensors are in": head() + ALL + listed("1") + counted(NUMBERS),
    "other storages than its tensors are in": head() + ALL + listed("0", "0") + 2 * counted(NUMBERS),
    "storages than its tensors are in": head() + ALL + listed("0", "1") + 2 * counted(NUMBERS),
    "than its tensors are in": head() + ALL + listed(),
    "its storage '0' has 3 numbers, its pickle says 24": head() + ALL + listed("0") + counted(SHORT),
    "its storage '0' has 25 numbers, its": head() + ALL + listed("0") + counted(np.append(NUMBERS, NUMBERS[:1])),
    "its storage '0' has -1 numbers": head() + ALL + listed("0") + b"\xff" * 8 + NUMBERS.tobytes(),
    "ends within its storage '0'": head() + ALL + STORED[:-1],
    "ends within its storage 'b'": (
        head()
        + state_dict({x: tensor(View(x, 0, (3,), (1,)), "FloatStorage", 3, WHOLE) for x in "ab"})
        + listed("a", "b")
        + counted(SHORT)
    ),
    "ends within its storage 'huge'": (
        head()
        + state_dict({"a": tensor(View("huge", 0, (1,), (1,)), "FloatStorage", 2**62, WHOLE)})
        + listed("huge")
        + (2**62).to_bytes(8, "little")
    ),
    f"its storage 'huge' has 0 numbers, its pickle says {2**70}": (
        head()
        + state_dict({"a": tensor(View("huge", 0, (1,), (1,)), "FloatStorage", 2**70, WHOLE)})
        + listed("huge")
        + bytes(8)
    ),
    "has 1 bytes after its last storage": head() + ALL + STORED + b"\0",
    "has two kinds of storage '0'": (
        head()
        + state_dict({k[0]: tensor(View("0", 0, (24,), (1,)), k, 24, WHOLE) for k in ("FloatStorage", "IntStorage")})
        + STORED
    ),
    "two kinds of storage '0'": (
        head()
        + state_dict({str(n): tensor(View("0", 0, (2,), (1,)), "FloatStorage", n, WHOLE) for n in (24, 23)})
        + STORED
    ),
    "has a part outside its storage '0'": head() + views((View("0", 0, (1,), (1,)), part(20, 5))) + STORED,
    "'a' is larger than its storage": head() + views((View("0", 0, (3,), (1,)), part(20, 2))) + STORED,
    "is larger than its storage": head() + views((View("0", 1, (24,), (1,)), WHOLE)) + STORED,
    "no pickle of tensors (at": head() + views((View("0", 0, (1,), (1,)), part(-1, 5))) + STORED,
    "no pickle of tensors": head() + views((View("0", 0, (1,), (1,)), several(number(0), number(1)))) + STORED,
    "pickle of tensors": head() + views((View("0", 0, (1,), (1,)), b")")) + STORED,
}


@pytest.mark.parametrize("reason", OTHER)
def test_what_else_a_file_may_hold(reason, tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(OTHER[reason])
    with pytest.raises(UserError) as error:
        stored_torch_tensors(path)
    assert f"{path}: " in str(error.value)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


class Runs:
    """Unpickled by Python, it would leave a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def parts(data: bytes, pickles: int) -> list[bytes]:
    """The pickles of a file, by Python's own reader, and the rest."""
    stream, ends = io.BytesIO(data), [0]
    for _ in range(pickles):
        pickle.load(stream)
        ends.append(stream.tell())
    return [data[begin:end] for begin, end in zip(ends, [*ends[1:], len(data)], strict=True)]


def test_nothing_is_run_of_any_pickle(tmp_path):
    made, path = tmp_path / "made", tmp_path / "x.bin"
    whole = [*parts(head(), 3)[:3], ALL, *parts(STORED, 1)]
    path.write_bytes(b"".join(whole))
    np.testing.assert_array_equal(stored_torch_tensors(path)["a"], NUMBERS)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        hostile = pickle.dumps({"a": Runs(made)}, protocol)
        for place in range(5):
            path.write_bytes(b"".join([*whole[:place], hostile, *whole[place + 1 :]]))
            with pytest.raises(UserError, match=r"asks for '(os|posix|nt).mkdir'|instruction|no pickle|no file of"):
                stored_torch_tensors(path)
            assert not made.exists()


def test_files_cut_anywhere(tmp_path):
    """Are refused when they are opened, before any tensor is read."""
    path = save(tmp_path / "x.bin", {"a": SHORT, "b": SHORT.astype(np.float16)}, legacy=True)
    data = path.read_bytes()
    assert len(stored_torch_tensors(path)) == 2
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match=r"ends within|no file of torch\.save|damaged"):
            stored_torch_tensors(path)


def test_a_file_cut_after_it_was_opened(tmp_path):
    path = save(tmp_path / "x.bin", {"a": NUMBERS}, legacy=True)
    found = stored_torch_tensors(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="ends too early"):
        np.asarray(found["a"])


def test_pickles_that_are_too_long(tmp_path):
    path = tmp_path / "x.bin"
    text = b"X" + LARGEST_PICKLE.to_bytes(4, "little") + b"x" * LARGEST_PICKLE
    path.write_bytes(head() + BEGIN + text + END)
    with pytest.raises(UserError, match=r"its pickles have over 8\.4 MB, more than names of tensors take"):
        stored_torch_tensors(path)


def test_what_begins_so_is_no_archive(tmp_path):
    """Even if there is one at its end: PyTorch reads it so."""
    archive = save(tmp_path / "y.bin", {"a": NUMBERS})
    path = save(tmp_path / "x.bin", {"a": SHORT}, legacy=True)
    size = archive.stat().st_size
    path.write_bytes(path.read_bytes() + archive.read_bytes())
    with pytest.raises(UserError, match=f"has {size} bytes after its last storage"):
        stored_torch_tensors(path)


def test_an_archive_has_no_parts_of_storages(tmp_path):
    for what in (WHOLE, part(0, 24)):
        program = views((View("0", 0, (24,), (1,)), what))
        with pytest.raises(UserError, match="no pickle of tensors"):
            stored_torch_tensors(write_archive(tmp_path / "x.bin", program, {"0": NUMBERS}))


def test_numbers_that_are_not_finite(tmp_path):
    array = np.array([1, np.inf], ml_dtypes.bfloat16)
    found = stored_torch_tensors(save(tmp_path / "x.bin", {"a": array}, legacy=True))
    with pytest.raises(UserError, match=r"x\.bin: a is not finite"):
        np.asarray(found["a"])
