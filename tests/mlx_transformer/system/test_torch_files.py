"""Files of `torch.save`: tensors as PyTorch has them, and nothing run of what else is in one."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from torch_archives import (
    BEGIN,
    END,
    ORDERED_DICT,
    STORAGES,
    View,
    assert_stored,
    named,
    number,
    save,
    several,
    state_dict,
    storage,
    tensor,
    text,
    write_archive,
)

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.torch_files import stored_torch_tensors
from mlx_transformer.system.torch_pickle import LARGEST_PICKLE

NUMBERS = np.arange(24, dtype=np.float32)


@pytest.mark.parametrize("dtype", STORAGES, ids=lambda dtype: dtype.name)
def test_every_kind_of_storage(dtype, tmp_path):
    array = (np.arange(6).reshape(2, 3) % 2).astype(dtype)
    (found,) = stored_torch_tensors(save(tmp_path / "x.bin", {"a": array})).values()
    assert_stored(found, array)


def one(tmp_path: Path, view: View, kind: str = "FloatStorage", count: int = 24, numbers=NUMBERS):
    program = state_dict({"a": tensor(view, kind, count)})
    return stored_torch_tensors(write_archive(tmp_path / "x.bin", program, {view.key: numbers}))["a"]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (View("0", 0, (4, 6), (6, 1)), NUMBERS.reshape(4, 6)),
        (View("0", 0, (6, 4), (1, 6)), NUMBERS.reshape(4, 6).T),
        (View("0", 8, (2, 4), (4, 1)), NUMBERS[8:16].reshape(2, 4)),
        (View("0", 1, (4, 3), (6, 2)), NUMBERS.reshape(4, 6)[:, 1::2]),
        (View("0", 5, (1, 3), (10**30, 1)), NUMBERS[5:8].reshape(1, 3)),
        (View("0", 3, (2, 2, 2), (0, 1, 1)), np.array([[[3, 4], [4, 5]]] * 2)),
        (View("0", 7, (), ()), NUMBERS[7]),
        (View("0", 0, (0,), (1,)), NUMBERS[:0]),
        (View("0", 0, (0, 30), (30, 1)), np.zeros((0, 30))),
        (View("0", 2, (3,), (1,), True), NUMBERS[2:5]),
    ],
)
def test_views(view, expected, tmp_path):
    np.testing.assert_array_equal(one(tmp_path, view), expected)


def test_tensors_that_share_a_storage(tmp_path):
    tied = np.arange(4, dtype=np.float16)
    path = save(tmp_path / "x.bin", {"a": tied, "b": tied, "c": tied + 1})
    with zipfile.ZipFile(path) as archive:
        assert sum(name.startswith("archive/data/") for name in archive.namelist()) == 2
    found = stored_torch_tensors(path)
    np.testing.assert_array_equal(found["a"], tied)
    np.testing.assert_array_equal(found["b"], tied)
    np.testing.assert_array_equal(found["c"], tied + 1)


class Runs:
    """Unpickled by Python, it would leave a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def exponential() -> bytes:
    """A tuple of two of a tuple of two of ..., whose hash would take 2^200 steps."""
    deep = b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(200))
    return BEGIN + ORDERED_DICT + b"(" + deep + number(1) + b"u" + END


OTHER = {
    "asks for 'os.system', which is no tensor; nothing in it was run": BEGIN
    + named("os", "system")
    + several(text("true"))
    + b"R"
    + END,
    "asks for 'builtins.eval'": BEGIN + text("builtins") + text("eval") + b"\x93" + END,
    "asks for 'torch._utils._rebuild_sparse_tensor'": state_dict(
        {"a": named("torch._utils", "_rebuild_sparse_tensor") + b")R"}
    ),
    "asks for 'torch.QInt8Storage'": state_dict({"a": storage("0", "QInt8Storage", 24)}),
    r"instruction b'\x81', which no state dict needs": BEGIN + named("collections", "OrderedDict") + b")\x81" + END,
    "ends within its pickle": BEGIN + ORDERED_DICT,
    "ends within": BEGIN + b"X\xff\xff\xff\xffabc",
    "is no pickle of tensors (at byte 3)": BEGIN + b"u" + END,
    "no pickle of tensors (at byte 4)": BEGIN + b"h\7" + END,
    "no pickle of tensors": exponential(),
    "holds a list, no dict of tensors": BEGIN + b"]" + END,
    "holds a View, no dict": BEGIN + tensor(View("0", 0, (24,), (1,)), "FloatStorage", 24) + END,
    "'model' is a dict, no tensor: save the model's state_dict": state_dict({"model": ORDERED_DICT}),
    "'a' is a Storage, no tensor": state_dict({"a": storage("0", "FloatStorage", 24)}),
    "'a' is a Global, no tensor": state_dict({"a": named("torch", "FloatStorage")}),
    "has no 'archive/data/7'": state_dict({"a": tensor(View("7", 0, (24,), (1,)), "FloatStorage", 24)}),
    "has no 'archive/data/../../x'": state_dict({"a": tensor(View("../../x", 0, (2,), (1,)), "FloatStorage", 24)}),
    "has 96 bytes, its pickle says 192": state_dict({"a": tensor(View("0", 0, (24,), (1,)), "DoubleStorage", 24)}),
    "has 96 bytes, its pickle says 100": state_dict({"a": tensor(View("0", 0, (24,), (1,)), "FloatStorage", 25)}),
    "'a' is larger than its storage": state_dict({"a": tensor(View("0", 1, (24,), (1,)), "FloatStorage", 24)}),
    "is larger than": state_dict({"a": tensor(View("0", 0, (5, 6), (6, 1)), "FloatStorage", 24)}),
    "larger than its": state_dict({"a": tensor(View("0", 0, (10**40,), (0,)), "FloatStorage", 24)}),
    "'a' is larger": state_dict({"a": tensor(View("0", 0, (0, 10**40), (0, 0)), "FloatStorage", 24)}),
}


@pytest.mark.parametrize("reason", OTHER)
def test_what_else_a_pickle_may_hold(reason, tmp_path):
    path = write_archive(tmp_path / "x.bin", OTHER[reason], {"0": NUMBERS})
    with pytest.raises(UserError) as error:
        stored_torch_tensors(path)
    assert f"{path}: " in str(error.value)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [-1, True, None], ids=str)
def test_sizes_that_are_none(value, tmp_path):
    made = {-1: b"J\xff\xff\xff\xff", True: b"\x88", None: b"N"}[value]
    views = (several(storage("0", "FloatStorage", 24), *x, b"\x89", ORDERED_DICT) for x in (
        (made, several(number(2)), several(number(1))),
        (number(0), several(made), several(number(1))),
        (number(0), several(number(2)), several(made)),
        (number(0), number(2), several(number(1))),
        (number(0), several(number(2), number(2)), several(number(1))),
    ))  # fmt: skip
    for arguments in views:
        program = state_dict({"a": named("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"})
        with pytest.raises(UserError, match="no pickle of tensors"):
            stored_torch_tensors(write_archive(tmp_path / "x.bin", program, {"0": NUMBERS}))


def test_nothing_is_run(tmp_path):
    """Of every pickle that Python makes of an object that runs something."""
    made = tmp_path / "made"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path = write_archive(tmp_path / "x.bin", pickle.dumps({"a": Runs(made)}, protocol), {})
        with pytest.raises(UserError, match=r"asks for '(os|posix|nt).mkdir'|instruction|no pickle of tensors"):
            stored_torch_tensors(path)
        assert not made.exists()
    pickle.loads(pickle.dumps(Runs(made)))
    assert made.is_dir()


def test_a_pickle_that_is_too_long(tmp_path):
    path = write_archive(tmp_path / "x.bin", b"}" * (LARGEST_PICKLE + 1), {})
    with pytest.raises(UserError, match=r"its data\.pkl has 8\.4 MB, more than names of tensors take"):
        stored_torch_tensors(path)


def test_files_of_other_kinds(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(bytes(257) + b"ustar" + bytes(1000))
    with pytest.raises(UserError, match=r"is a tar archive, .* if you trust it, .* convert it: python -c"):
        stored_torch_tensors(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(UserError, match="stands for a file of Git LFS; fetch it: git lfs pull"):
        stored_torch_tensors(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"no file of torch\.save, or damaged"):
        stored_torch_tensors(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"")
    with pytest.raises(UserError, match=r"holds 0 files data\.pkl"):
        stored_torch_tensors(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", state_dict({}))
        archive.writestr("a/byteorder", b"big")
    with pytest.raises(UserError, match="big-endian"):
        stored_torch_tensors(path)
    program = state_dict({"a": tensor(View("0", 0, (24,), (1,)), "FloatStorage", 24)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", program)
        archive.writestr("a/data/0", NUMBERS.tobytes())
    with pytest.raises(UserError, match="compressed or encrypted"):
        stored_torch_tensors(path)


def test_damage(tmp_path):
    path = save(tmp_path / "x.bin", {"a": NUMBERS})
    data = bytearray(path.read_bytes())
    at = data.index(NUMBERS.tobytes())
    changed = data.copy()
    changed[at] ^= 1
    path.write_bytes(changed)
    with pytest.raises(UserError, match="'a' differs from its checksum: damaged"):
        np.asarray(stored_torch_tensors(path)["a"])
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises(UserError):
            np.asarray(stored_torch_tensors(path)["a"])
    moved = data.copy()
    place = moved.index(b"PK\1\2", moved.index(b"PK\1\2", moved.index(b"PK\1\2") + 1) + 1) + 42
    [offset] = struct.unpack("<I", moved[place : place + 4])
    moved[place : place + 4] = struct.pack("<I", offset + 1)
    path.write_bytes(moved)
    with pytest.raises(UserError, match="is not where its list says"):
        stored_torch_tensors(path)


def test_a_storage_that_several_tensors_share_is_checked(tmp_path):
    """Each of them reads a part of it; a flipped bit in any part is told by the first that is read, whichever it is."""
    views = {"a": View("0", 0, (4,), (1,)), "b": View("0", 8, (2, 4), (4, 1)), "c": View("0", 20, (4,), (1,))}
    program = state_dict({name: tensor(view, "FloatStorage", 24) for name, view in views.items()})
    path = write_archive(tmp_path / "x.bin", program, {"0": NUMBERS})
    data = path.read_bytes()
    at = data.index(NUMBERS.tobytes())
    for place in (at + 4 * i for i in (0, 6, 12, 18, 23)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        for name in views:
            with pytest.raises(UserError, match=f"'{name}' differs from its checksum: damaged"):
                np.asarray(stored_torch_tensors(path)[name])
    path.write_bytes(data)
    found = stored_torch_tensors(path)
    for name, view in views.items():
        expected = NUMBERS[view.offset : view.offset + np.prod(view.shape)].reshape(view.shape)
        np.testing.assert_array_equal(found[name], expected)


def test_a_shape_that_many_tensors_share(tmp_path):
    """A hundred thousand sizes, which a megabyte of instructions could ask for ten thousand times."""
    sizes = b"(" + b"K\1" * 100_000 + b"tq\5"
    made = named("torch._utils", "_rebuild_tensor_v2") + several(
        storage("0", "FloatStorage", 24), number(0), sizes, b"h\5", b"\x89", ORDERED_DICT
    )
    with pytest.raises(UserError, match="no pickle of tensors"):
        stored_torch_tensors(write_archive(tmp_path / "x.bin", state_dict({"a": made + b"R"}), {"0": NUMBERS}))


def test_numbers_that_are_not_finite(tmp_path):
    found = stored_torch_tensors(save(tmp_path / "x.bin", {"a": np.array([1, np.inf], ml_dtypes.bfloat16)}))
    with pytest.raises(UserError, match=r"x\.bin: a is not finite"):
        np.asarray(found["a"])
