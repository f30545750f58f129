"""manifest.json: what is compared, when, how often; and what is no file to read."""

from __future__ import annotations

import os
import time

import pytest

from mlx_transformer.system import manifest
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import verify_file, verify_files, write_manifest


@pytest.fixture
def folder(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name * 9)
    write_manifest(tmp_path)
    return tmp_path


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files whose contents are read."""
    found: list[str] = []
    original = manifest.sha256
    monkeypatch.setattr(manifest, "sha256", lambda path: found.append(path.name) or original(path))
    return found


def test_only_what_is_used_is_read_and_everything_must_be_there(folder, hashed):
    verify_files(folder, ["a"])
    assert hashed == ["a"]
    (folder / "b").write_text("x" * 9)
    verify_files(folder, ["a", "c"])
    with pytest.raises(UserError, match=r"b: damaged \(its SHA-256 differs\)"):
        verify_files(folder, ["a", "b"])
    with pytest.raises(UserError, match=r"b: damaged \(its SHA-256 differs\)"):
        verify_files(folder)
    (folder / "b").write_text("x")
    with pytest.raises(UserError, match=r"b: damaged \(1 bytes, expected 9\)"):
        verify_files(folder, ["a"])
    (folder / "b").unlink()
    with pytest.raises(UserError, match=r"b: listed in manifest.json but missing"):
        verify_files(folder, ["a"])


def test_what_is_used_must_be_listed(folder):
    (folder / "d").write_text("new")
    verify_files(folder)
    for given in ({"used": ["d"]}, {"listed": ["d"]}):
        with pytest.raises(UserError, match=r"manifest \(d is not listed\)"):
            verify_files(folder, **given)


def test_a_file_is_read_once_while_nobody_touches_it(folder, hashed):
    soon = time.time() + 100  # so that it is a moment ago, however long this takes
    for name in "abc":
        os.utime(folder / name, (soon, soon))
    verify_files(folder)
    assert sorted(hashed) == ["a", "b", "c"]
    verify_files(folder)
    assert len(hashed) == 6, "written a moment ago: a second change would have the same time"
    long_ago = time.time() - 100
    for name in "abc":
        os.utime(folder / name, (long_ago, long_ago))
    for _ in range(3):
        verify_files(folder)
    assert len(hashed) == 9
    (folder / "b").write_text("x" * 9)
    with pytest.raises(UserError, match="b: damaged"):
        verify_files(folder)
    assert hashed[9:] == ["b"]


def test_a_folder_without_a_manifest_passes(tmp_path):
    verify_files(tmp_path, ["anything"], listed=["else"])
    assert manifest.read_manifest(tmp_path) is None


def test_one_file_and_its_data(folder):
    (folder / "a_data").write_text("data")
    write_manifest(folder)
    verify_file(folder / "a")
    verify_file(folder / "unknown")
    (folder / "a_data").write_text("tada")
    verify_file(folder / "b")
    with pytest.raises(UserError, match="a_data: damaged"):
        verify_file(folder / "a")
