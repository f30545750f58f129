"""Writing a checkpoint: a full disk costs nothing, nothing else is replaced, leftovers go."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_checkpoint import contents, refusal, saved, value_of

from mlx_transformer.core.outputs import Kind, claim
from mlx_transformer.data.corpus import TEXT
from mlx_transformer.system import durable
from mlx_transformer.system import durable as locks
from mlx_transformer.system.durable import Output, replace_files, replace_folder
from mlx_transformer.system.errors import UserError

resource = pytest.importorskip("resource")
MODEL = Kind("model", lambda _: True, folder=True)
MODEL_FILE = Kind("model", lambda _: True)


@pytest.mark.parametrize("there", ["file", "notes", "onnx"])
def test_nothing_else_is_replaced(tmp_path, there):
    target = tmp_path / "mine"
    if there == "file":
        target.write_text("keep")
    else:
        target.mkdir()
        (target / ("config.json" if there == "onnx" else "notes.txt")).write_text("keep")
    with pytest.raises(UserError, match=r"is a file|no checkpoint"):
        saved(target)
    kept = target if there == "file" else next(target.iterdir())
    assert kept.read_text(encoding="utf-8") == "keep"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_and_a_link_are_fine(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    saved(tmp_path / "link", 1.0)
    saved(tmp_path / "link", 2.0)
    assert (tmp_path / "link").is_symlink()
    assert value_of(tmp_path / "real") == pytest.approx(2.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_disk_that_fills_up_anywhere_keeps_the_old_checkpoint(tmp_path):
    """Real refusals by the system, in Python's writes and in those of safetensors: no file may grow past a limit."""
    folder = saved(tmp_path / "one", 1.0)
    sizes = sorted({len(data) for data in contents(folder).values()})
    limits = sorted({0, 1, *(size - 1 for size in sizes), sizes[-1]})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = 0
    for limit in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            message = refusal(saved, folder, 2.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if message:
            refused += 1
            assert message.startswith(f"{folder}: the checkpoint could not be written")
            assert value_of(folder) == pytest.approx(1.0)
        assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert refused == len(limits) - 1
    assert value_of(folder) == pytest.approx(2.0)


@pytest.mark.parametrize("call", ["flush", "rename"])
def test_a_refusal_of_any_call_keeps_the_old_checkpoint(tmp_path, monkeypatch, call):
    folder = saved(tmp_path / "one", 1.0)
    monkeypatch.setattr(durable, "_exchange", lambda *_: False)  # two renames, as where names can't be swapped
    owner = durable if call == "flush" else durable.os
    original, count = getattr(owner, call), 0

    def refusing(*arguments):
        nonlocal count
        count -= 1
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    monkeypatch.setattr(owner, call, refusing)
    attempts = 1
    count = attempts
    while message := refusal(saved, folder, 2.0):
        assert "No space left on device" in message
        left = sorted(path.name for path in tmp_path.iterdir())
        if left == ["one"]:
            assert value_of(folder) == pytest.approx(1.0)
        else:  # the very last flush, after both renames
            assert (call, left) == ("flush", [".one.previous", "one"])
        attempts += 1
        count = attempts
    assert attempts > (5 if call == "flush" else 2)
    assert value_of(folder) == pytest.approx(2.0)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_the_old_folder_stands_until_the_new_one_does(tmp_path, monkeypatch):
    """In one step where the system can, as Linux and macOS can on their own file systems: nobody finds no folder."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    if not durable._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("names can't be swapped here")
    folder = saved(tmp_path / "one", 1.0)

    def never(*_):
        raise AssertionError("for an instant there is no folder")

    monkeypatch.setattr(durable.os, "rename", never)
    saved(folder, 2.0)
    assert value_of(folder) == pytest.approx(2.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "one"]
    assert not durable._exchange(tmp_path / "a", tmp_path / "none")
    monkeypatch.setattr(durable.ctypes, "CDLL", lambda _: object())
    assert not durable._exchange(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("network_drive", [False, True])
def test_macos_flushes_the_drives_cache_too(tmp_path, monkeypatch, network_drive):
    """By F_FULLFSYNC, which not every file system knows: there by fsync, as everywhere else."""
    calls = []

    def fcntl(handle, command):
        calls.append(command)
        if network_drive:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(durable.sys, "platform", "darwin")
    monkeypatch.setattr(durable.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(durable.fcntl, "fcntl", fcntl)
    monkeypatch.setattr(durable.os, "fsync", lambda handle: calls.append("fsync"))
    durable.flush(tmp_path)
    assert calls == ([51, "fsync"] if network_drive else [51])


def test_a_folder_without_permission(tmp_path):
    locked = tmp_path / "locked"
    locked.write_text("a file where a folder is needed")
    with pytest.raises(UserError, match="could not be written"):
        saved(locked / "deeper" / "one")


def test_leftovers_of_killed_processes_go_at_the_next_save(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    alive = os.getppid()
    for process in (int(dead.stdout), os.getpid(), alive):
        for name in ("one", "other"):
            (tmp_path / f".{name}.{process}.tmp").mkdir()
            (tmp_path / f".{name}.{process}.tmp" / "part").write_text("x")
    (tmp_path / f".text.{int(dead.stdout)}.tmp").write_text("half a te")
    saved(tmp_path / "one")
    durable.write_text(tmp_path / "text", "whole")
    found = {path.name for path in tmp_path.iterdir()} - {"text"}
    others = {f".other.{process}.tmp" for process in (int(dead.stdout), os.getpid(), alive)}
    assert found == {"one", f".one.{alive}.tmp"} | others


def test_text_files_are_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    durable.write_text(path, "old")
    monkeypatch.setattr(durable.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(UserError, match=r"run\.json: could not be written"):
        durable.write_text(path, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    assert path.read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize("begun_as", ["nothing", "an empty folder"])
def test_a_free_place_is_taken_once(tmp_path, begun_as):
    """Two writers have seen it free: who comes second leaves the first one's there, and nothing else."""
    place = tmp_path / "place"
    if begun_as != "nothing":
        place.mkdir()
    said = (
        "place: another process has written it meanwhile; choose another name, move it away, or --force to replace it"
    )

    def second() -> None:
        late, early = (claim(place, MODEL) for _ in range(2))
        with replace_folder(late) as folder:
            (folder / "file").write_text("second")
            with replaced_elsewhere(), replace_folder(early) as folder:
                (folder / "file").write_text("first")

    with pytest.raises(UserError, match=said):
        second()
    assert (place / "file").read_text(encoding="utf-8") == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
    for name in ("second", "third"):  # which is known to be there
        with replace_folder(claim(place, MODEL, force=True)) as again:
            (again / "file").write_text(name)
    assert (place / "file").read_text(encoding="utf-8") == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_of_two_who_replace_the_second_is_refused(tmp_path):
    """Both were told --force about the same earlier folder, or file."""
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "file").write_text("old")
    (tmp_path / "text").write_text("old")
    late, early = (claim(tmp_path / "place", MODEL, force=True) for _ in range(2))

    def second() -> None:
        with replace_folder(late) as folder:
            (folder / "file").write_text("second")
            with replaced_elsewhere(), replace_folder(early) as folder:
                (folder / "file").write_text("first")

    with pytest.raises(UserError, match="meanwhile"):
        second()
    text, earlier = (claim(tmp_path / "text", TEXT, force=True) for _ in range(2))
    durable.write_text(earlier, "first")
    with pytest.raises(UserError, match="meanwhile"):
        durable.write_text(text, "second")
    assert {path.read_text() for path in (tmp_path / "place" / "file", tmp_path / "text")} == {"first"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["place", "text"]


@pytest.mark.parametrize("way", ["rename", "link", "neither"])
def test_a_free_file_is_taken_once(tmp_path, monkeypatch, way):
    """By the rename that replaces nothing, and on systems without it."""
    if way != "rename":
        monkeypatch.setattr(durable, "_rename", lambda *_: False)
    if way == "neither":
        monkeypatch.setattr(durable.os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    late, early = (claim(tmp_path / "text", TEXT) for _ in range(2))
    durable.write_text(early, "first")
    with pytest.raises(UserError, match="text: another process has written it meanwhile"):
        durable.write_text(late, "second")
    assert (tmp_path / "text").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_what_all_would_make_alike_may_be_made_twice(tmp_path):
    cache = Output.any(tmp_path / "place", "cache")
    with replace_folder(cache) as late:
        (late / "file").write_text("second")
        with replaced_elsewhere(), replace_folder(cache) as early:
            (early / "file").write_text("first")
    assert (tmp_path / "place" / "file").read_text(encoding="utf-8") == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_a_free_name_is_taken_once(tmp_path):
    """The data beside it as well."""

    def fill(folder: Path, text: str) -> None:
        for name in ("m.onnx", "m.onnx_data"):
            (folder / name).write_text(text)

    file = tmp_path / "m.onnx"
    said = r"m\.onnx: another process has written it meanwhile"

    def outputs() -> list[Output]:
        return [claim(place, MODEL_FILE) for place in (file, tmp_path / "m.onnx_data")]

    def second() -> None:
        late, early = outputs(), outputs()
        with replace_files(*late) as folder:
            fill(folder, "second")
            with replaced_elsewhere(), replace_files(*early) as folder:
                fill(folder, "first")

    with pytest.raises(UserError, match=said):
        second()
    handle = locks.open_locked(tmp_path / ".m.onnx.lock")
    assert handle is not None
    free = Output(file, "model", durable.seen(file)), Output(tmp_path / "m.onnx_data", "data", None)
    with pytest.raises(UserError, match="meanwhile"), replace_files(*free) as folder:
        fill(folder, "third")
    os.close(handle)
    (tmp_path / ".m.onnx.lock").unlink()
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {
        "m.onnx": "first",
        "m.onnx_data": "first",
    }


@contextmanager
def replaced_elsewhere():
    """As another process does it, whose temporary names have another number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "_temporary", lambda path: path.parent / f".{path.name}.1.tmp")
        patch.setattr(durable, "clear_leftovers", lambda *_: None)  # of this number, which is ours
        yield
