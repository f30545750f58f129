"""What somebody else decides of a line: how wide a terminal is, how long a name."""

from __future__ import annotations

import os

import pytest

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.process import run


@pytest.mark.parametrize("name", ["COLUMNS", "TERMINAL_WIDTH"])
@pytest.mark.parametrize("width", ["9999999", "\u00b2", "wide", "9" * 5000, ""])
def test_a_width_that_no_terminal_has_is_none(monkeypatch, name, width):
    monkeypatch.setenv(name, width)
    seen = []
    assert run("program", lambda: seen.append(os.environ.get(name)), whole=False) == 0
    assert seen == [None]


def test_the_width_of_a_terminal_stays(monkeypatch):
    monkeypatch.setenv("COLUMNS", "132")
    seen = []
    assert run("program", lambda: seen.append(os.environ.get("COLUMNS")), whole=False) == 0
    assert seen == ["132"]


@pytest.mark.parametrize(
    "said",
    [
        "[metal::malloc] Attempting to allocate 34359738368 bytes, more than the maximum allowed buffer size",
        "[malloc_or_wait] Unable to allocate 9663676416 bytes: [METAL] Command buffer execution failed: Insufficient "
        "Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
    ],
)
def test_a_device_without_room_is_named_with_the_remedy(capsys, said):
    """What MLX raises there; on a Mac it is how most runs that fail do."""

    def command() -> int:
        raise RuntimeError(said)

    assert run("program", command, whole=False) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"program: out of memory on the device (MLX: {said[:40]}")
    for option in ("--memory", "--batch-tokens", "--beam"):
        assert option in error


def test_another_runtime_error_is_a_bug(capsys):
    def command() -> int:
        raise RuntimeError("[matmul] shapes (3,) and (4,)")

    assert run("program", command, whole=False) == 70
    assert "this is a bug" in capsys.readouterr().err


def test_a_name_without_an_end_is_shortened(capsys):
    """Its line stays one that can be read; both ends say which name it is."""

    def command() -> int:
        raise UserError(f"/begin{'a' * 5000}/end: no such folder")

    assert run("program", command, whole=False) == 2
    said = capsys.readouterr().err
    assert said.startswith("program: /beginaaa")
    assert said.endswith("aaa/end: no such folder\n")
    assert len(said) < 500
