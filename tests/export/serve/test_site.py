"""A site is served with the headers that give a page threads, and nothing else of the disk."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import pytest
from forked import Process
from imports import ROOT
from starlette.testclient import TestClient
from waiting import PATIENCE, port_of
from web_package import write_web_package

from export.__main__ import main
from export.serve import serve_site
from export.serve.server import FOR_EVER, SiteApp
from export.web import write_site
from export.web.write import SITE
from mlx_transformer.system.errors import UserError


@pytest.fixture(scope="module")
def site(text_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write_web_package(folder / "node_modules")
    return write_site(text_folder / "onnx", folder / "site", assets=folder / "node_modules")


@pytest.fixture(scope="module")
def get(site):
    with TestClient(SiteApp(site).asgi) as client:
        yield client.get


def test_every_file_with_its_type_and_isolation(site, get):
    listed = json.loads((site / SITE).read_text(encoding="utf-8"))["files"]
    for path in (*listed, SITE, "service_worker.js"):
        answer = get(f"/{path}")
        assert (answer.status_code, answer.content) == (200, (site / path).read_bytes()), path
        assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert answer.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
    assert get("/").content == (site / "index.html").read_bytes()
    types = {path: get(f"/{path}").headers["Content-Type"].partition(";")[0] for path in ("", *listed)}
    assert types[""] == "text/html"
    assert types["app.js"] == types["ort/ort.wasm.min.mjs"] == "text/javascript"
    assert types["ort/ort-wasm-simd-threaded.wasm"] == "application/wasm"
    assert types["manifest.webmanifest"] == "application/manifest+json"


def test_a_copy_is_kept_as_long_as_its_digest_is_asked_for(site, get):
    digest = json.loads((site / SITE).read_text(encoding="utf-8"))["files"]["app.js"]["sha256"]
    first = get("/app.js")
    assert first.headers["Cache-Control"] == "no-cache"
    again = get("/app.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert get("/app.js", headers={"If-None-Match": '"0"'}).status_code == 200
    assert get(f"/app.js?{digest[:16]}").headers["Cache-Control"] == FOR_EVER
    assert get("/app.js?0").headers["Cache-Control"] == "no-cache"


@pytest.mark.parametrize(
    "path", ["absent.js", "../node_modules/onnxruntime-web/package.json", "%2e%2e/site/app.js", "ort"]
)
def test_nothing_that_is_not_listed(path, site, get):
    (site / "secret.txt").write_text("mine")
    assert get("/secret.txt").status_code == 404
    assert get(f"/{path}").status_code == 404


def test_names_that_leave_the_folder_are_refused(site, tmp_path):
    (tmp_path / "service_worker.js").write_text("")
    entry = {"bytes": 1, "sha256": "0"}
    for values, message in (
        ({"format": 1, "files": {"../x": entry}}, "leaves the folder"),
        ({"format": 2, "files": {}}, "format 2 is not known"),
        ({"files": []}, "damaged"),
    ):
        (tmp_path / SITE).write_text(json.dumps(values))
        with pytest.raises(UserError, match=message):
            SiteApp(tmp_path)


def test_a_process_serves_it_until_it_is_told_to_end(site):
    command = [sys.executable, "-m", "export", "serve", "--web", str(site), "--port", "0"]
    with Process(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        address = f"http://127.0.0.1:{port_of(process)}"
        with urllib.request.urlopen(f"{address}/app.js", timeout=PATIENCE) as answer:
            assert answer.read() == (site / "app.js").read_bytes()
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_settings_of_models_are_refused(site, tmp_path, capsys):
    with pytest.raises(UserError, match="max_batch=4 is a setting of models"):
        serve_site(site, max_batch=4)
    for arguments, message in (
        (["--web", site, "--max-wait-ms", "3"], "--max-wait-ms 3.0 is a setting of models"),
        (["--web", site, "--api-key-file", "keys"], "is a setting of models"),
        (["--web", tmp_path], "is no site"),
        ([site, "--web", site], "give one of the two"),
        ([], "give one of the two"),
    ):
        assert main(["serve", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
