"""Where onnxruntime-web comes from: a folder that is named, one that is here, or npm, once."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import shutil
import sys
import tarfile
import threading
from pathlib import Path

import pytest
from imports import ROOT
from web_package import write_web_package

from export.web import assets
from export.web.assets import RUNTIME, TRANSFORMERS, WASM, WEBGPU, Package, find_package, version_of
from mlx_transformer.system.errors import UserError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache; the folder in which a command runs has no node_modules."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(assets, "default_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def write_npm(folder, monkeypatch, script: str) -> None:
    """The only program on the path: Python code that begins in the folder of the package.json."""
    folder.mkdir()
    (folder / "npm").write_text(f"#!{sys.executable}\n{script}")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def digest_of(file: bytes) -> str:
    return f"sha512-{base64.b64encode(hashlib.sha512(file).digest()).decode()}"


def test_a_named_folder_may_be_the_package_or_around_it(tmp_path):
    package = write_web_package(tmp_path / "node_modules")
    for named in (tmp_path, tmp_path / "node_modules", package):
        assert find_package(named) == package
    assert version_of(package) == "9.8.7"
    (package / "dist" / WASM[0]).unlink()
    with pytest.raises(UserError, match=r"holds no onnxruntime-web .*npm install onnxruntime-web"):
        find_package(tmp_path)
    (package / "package.json").write_text("[]")
    with pytest.raises(UserError, match="names no version"):
        version_of(package)


def test_a_package_in_this_folder_is_taken_first(cache, tmp_path):
    write_web_package(tmp_path / "here/node_modules")
    assert find_package(None).resolve() == (tmp_path / "here/node_modules" / RUNTIME.name).resolve()


@pytest.mark.skipif(os.name == "nt", reason="programs are scripts here")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.exit('no\\nnetwork')", r"could not install onnxruntime-web \(no network\)"),
        ("import sys; sys.exit(3)", r"could not install onnxruntime-web \(exit 3\)"),
        ("", r"could not install onnxruntime-web \(it wrote no \.tgz file\)"),
        (None, r"there is no npm to install it: install Node\.js"),
    ],
)
def test_what_went_wrong_is_said_in_one_line(script, said, cache, tmp_path, monkeypatch):
    write_npm(tmp_path / "bin", monkeypatch, script or "")
    if script is None:
        (tmp_path / "bin/npm").unlink()
        for name in assets.REGISTRY:
            monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=said) as found:
        find_package(None)
    assert "\n" not in str(found.value)
    assert not cache.exists() or not list(cache.iterdir())


@pytest.fixture
def file(cache, tmp_path, monkeypatch):
    """The package's file as npm's registry has it, whose digest is the pinned one; no npm."""
    package = write_web_package(tmp_path / "node_modules", RUNTIME.version)
    with tarfile.open(tmp_path / "package.tgz", "w:gz") as archive:
        archive.add(package, "package")
    monkeypatch.setattr(Package, "digest", digest_of((tmp_path / "package.tgz").read_bytes()))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return tmp_path / "package.tgz"


@pytest.mark.skipif(os.name == "nt", reason="programs are scripts here")
def test_npm_fetches_the_pinned_version_once(file, cache, tmp_path, monkeypatch):
    script = f"""
import shutil, sys
assert sys.argv[1:] == ["pack", "--ignore-scripts", "--loglevel=error", "onnxruntime-web@{RUNTIME.version}"]
shutil.copy({str(file)!r}, "some.tgz")
"""
    write_npm(tmp_path / "bin", monkeypatch, script)
    said: list[str] = []
    package = find_package(None, said.append)
    assert package == cache / f"onnxruntime-web-{RUNTIME.version}"
    assert version_of(package) == RUNTIME.version
    assert {path.name for path in (package / "dist").iterdir()} == {*WASM, *WEBGPU}
    assert len(said) == 1
    assert RUNTIME.version in said[0]
    (tmp_path / "bin/npm").unlink()
    assert find_package(None, said.append) == package
    assert len(said) == 1
    shutil.rmtree(package)
    write_npm(tmp_path / "other", monkeypatch, "open('some.tgz', 'wb').write(b'x')")
    with pytest.raises(UserError, match=r"some\.tgz: isn't the file of onnxruntime-web .* \(its sha512 differs\)"):
        find_package(None)
    assert not package.exists()


def test_without_npm_the_packages_file_does(file, cache):
    package = find_package(file)
    assert package == cache / f"onnxruntime-web-{RUNTIME.version}"
    unpacked = {str(path.relative_to(package)) for path in package.rglob("*.*")}
    assert unpacked == {str(Path(name)) for name in RUNTIME.kept}
    assert find_package(None) == package
    other = file.with_name("other.tgz")
    other.write_bytes(file.read_bytes() + b"x")
    shutil.rmtree(package)
    with pytest.raises(UserError, match=r"other\.tgz: isn't the file of onnxruntime-web .* \(its sha512 differs\)"):
        find_package(other)
    assert not package.exists()


def test_without_npm_the_registry_of_its_setting_is_asked(file, cache, monkeypatch, tmp_path):
    asked = []

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            there = len(asked) > 1
            self.send_response(200 if there else 404)
            self.end_headers()
            self.wfile.write(file.read_bytes() if there else b"")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_port}/npm/")
        with pytest.raises(UserError, match=r"could not be fetched \(HTTP Error 404.*; or name its file by --assets"):
            find_package(None)
        assert version_of(find_package(None)) == RUNTIME.version
        server.shutdown()
    assert set(asked) == {f"/npm/onnxruntime-web/-/onnxruntime-web-{RUNTIME.version}.tgz"}
    shutil.rmtree(cache)
    monkeypatch.setenv("npm_config_registry", "file:///etc")
    with pytest.raises(UserError, match="must be an address that begins with https://"):
        find_package(None)


def test_a_user_without_a_home_names_a_folder(tmp_path, monkeypatch):
    def no_home():
        raise UserError("no home")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(assets, "default_folder", no_home)
    with pytest.raises(UserError, match="no home to install it in; name a node_modules by --assets"):
        find_package(None)


@pytest.mark.parametrize("package", [RUNTIME, TRANSFORMERS])
def test_the_versions_are_those_that_browsers_try_in_the_tests(package):
    tried = json.loads((ROOT / "tests/consumers/node/package.json").read_text(encoding="utf-8"))["dependencies"]
    assert package.version == tried[package.name]
