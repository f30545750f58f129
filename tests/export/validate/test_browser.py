"""The browser of runtime webgpu: how it is found, asked and ended; by a program that says what a page would say."""

import os
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from combined import thinned
from random_models import write_model
from waiting import PATIENCE, until
from web_package import write_web_package

from export.validate import validate_command
from export.validate.engines import Node, Unavailable, web_host
from export.validate.engines.graph_runtimes import placed
from export.validate.engines.web_host import Browser, find_browser
from mlx_transformer.core.config import TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=9,
    d_model=8,
    heads=2,
    d_ff=8,
    encoder_layers=1,
    decoder_layers=0,
    architecture="encoder",
    max_positions=8,
)
# What every page does first; each test goes on in its own way.
PAGE = """\
import json, pathlib, struct, sys, time, urllib.error, urllib.request
address = sys.argv[-1].partition("?")[0]

def pack(header):
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text

def status(path, place=address):
    try:
        with urllib.request.urlopen(place + path) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code

def send(body):
    with urllib.request.urlopen(address + "next", data=body) as response:
        return response.read()

ADAPTER = {"vendor": "a", "architecture": "b", "device": "", "description": "a", "software": True}
HELLO = pack({"adapter": ADAPTER, "browser": "Chrome/1.2.3.4", "flags": sys.argv[1:]})
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_web_package(tmp_path / "node_modules")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where profiles are. Nothing is left there."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(web_host, "ENDING", PATIENCE)  # on a busy machine an end takes its time
    yield tmp_path / "temporary"
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.fixture
def playing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """playing(code): the browser is a program that runs it."""

    def play(code: str) -> Path:
        program = tmp_path / "chromium"
        program.write_text(f"#!{sys.executable}\n{PAGE}{textwrap.dedent(code)}")
        program.chmod(0o755)
        monkeypatch.setenv("CHROMIUM", str(program))
        return program

    return play


ECHO = """
reply = HELLO
while True:
    reply = send(reply)
"""


def test_tensors_go_there_and_back(playing, package: Path) -> None:
    playing(ECHO)
    opened = Browser(package, 1)
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([[-1, 1 << 60]]),
        "none": np.zeros((1, 0, 4), np.float32),
        "c": np.array([True, False, True]),
        "alone": np.array(7),
    }
    _, found = opened.request({"session": 0}, tensors.items())
    for array, expected in zip(found, tensors.values(), strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(array, expected)
    opened.close()
    assert opened.process.returncode is not None
    with pytest.raises(RuntimeError):
        opened.request({"session": 0})


def test_it_is_alone_with_its_profile(playing, package: Path, temporary: Path) -> None:
    playing(ECHO)
    opened = Browser(package, 1)
    flags = opened.versions["flags"]
    [profile] = temporary.iterdir()
    assert f"--user-data-dir={profile}" in flags
    assert ("--no-sandbox" in flags) == (os.geteuid() == 0)
    assert "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1" in flags
    assert flags[-1].startswith("http://127.0.0.1:")
    opened.close()
    assert not profile.exists()


def test_only_what_a_request_names_is_handed_out(playing, package: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"model")
    (tmp_path / "other.onnx").write_bytes(b"other")
    playing("""
        send(HELLO)
        places = ["", "page.js", "ort/ort.webgpu.min.mjs", "ort/ort.all.js", "ort/../package.json", "ort/none.js",
                  "none", f"file?path={pathlib.Path(__file__).parent}/model.onnx",
                  f"file?path={pathlib.Path(__file__).parent}/other.onnx"]
        found = [status(place) for place in places]
        found += [status("page.js", address[:-5] + "/"), status("page.js", address.rsplit("/", 2)[0] + "/")]
        send(pack({"found": found}))
    """)
    opened = Browser(package, 1)
    request = {"open": str(tmp_path / "model.onnx"), "data": []}
    assert opened.request(request)[0]["found"] == [200, 200, 200, 200, 404, 404, 404, 200, 404, 404, 404]
    opened.close()


def test_no_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM", str(tmp_path / "none"))
    with pytest.raises(Unavailable, match=r"CHROMIUM=.*none: there is no such program"):
        find_browser()
    monkeypatch.delenv("CHROMIUM")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(web_host, "MAC_APPS", ())
    with pytest.raises(Unavailable, match=r"needs Chromium or Chrome: there is no chromium or .*; install one"):
        find_browser()
    (tmp_path / "google-chrome").touch(0o755)
    assert find_browser() == str(tmp_path / "google-chrome")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit('No usable sandbox!')", "the browser ended: No usable sandbox!"),
        ("sys.exit(3)", "the browser ended: status 3"),
        ("time.sleep(300)", "the browser did not answer within 0.5 s"),
        ("send(pack({'error': 'it has no WebGPU adapter'}))", "it has no WebGPU adapter"),
    ],
)
def test_one_that_does_not_begin_is_one_line(
    code: str, said: str, playing, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    program = playing(code)
    monkeypatch.setattr(web_host, "STARTING", 0.5 if "within" in said else PATIENCE)
    monkeypatch.setenv("ONNXRUNTIME_WEB", str(package))
    assert validate_command(*write_model(CONFIG, tmp_path), runtimes=["webgpu"]) == 3
    error = capsys.readouterr().err
    assert error == f"validate: runtime webgpu: {program}: {said}; name another browser by CHROMIUM\n"


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("ONNXRUNTIME_WEB", str(tmp_path))
    models = write_model(CONFIG, tmp_path)
    assert validate_command(*models, runtimes=["webgpu"]) == 3
    assert "webgpu: onnxruntime-web is not installed (ONNXRUNTIME_WEB=" in capsys.readouterr().err
    assert validate_command(*models, runtimes=["webgpu:metal"]) == 2
    assert capsys.readouterr().err == "validate: webgpu: adapter 'metal' is not one of software\n"


def test_one_that_falls_silent_is_ended(playing, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    playing("send(HELLO)\ntime.sleep(300)")
    monkeypatch.setattr(web_host, "ANSWERING", 0.5)
    opened = Browser(package, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the browser did not answer within 0\.5 s"):
            opened.request({"session": 0})
        assert opened.process.returncode == -signal.SIGTERM


def test_one_that_dies_says_its_last_words(playing, package: Path) -> None:
    playing("send(HELLO)\nsys.exit('out of memory')")
    opened = Browser(package, 1)
    with pytest.raises(RuntimeError, match="the browser ended: out of memory"):
        opened.request({"session": 0})


def test_a_deaf_one_is_killed(playing, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    playing("""
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            send(HELLO)
        finally:
            time.sleep(300)
    """)
    monkeypatch.setattr(web_host, "ENDING", 0.2)
    opened = Browser(package, 1)
    opened.close()
    assert opened.process.returncode == -signal.SIGKILL


def test_one_that_nobody_holds_any_more_is_ended(playing, package: Path) -> None:
    playing(ECHO)
    opened = Browser(package, 1)
    process = opened.process
    del opened
    assert process.returncode is not None


@pytest.mark.parametrize("ending", thinned(["Ctrl-C", "an error"], 2))
def test_it_ends_with_the_program(ending: str, playing, package: Path, temporary: Path) -> None:
    playing(ECHO)
    code = f"""
        import pathlib, tempfile, time
        tempfile.tempdir = {str(temporary)!r}
        from export.validate.engines.web_host import Browser
        opened = Browser(pathlib.Path({str(package)!r}), 1)
        print(opened.process.pid, flush=True)
        {"opened.request({'open': 'x', 'data': []}); time.sleep(300)" if ending == "Ctrl-C" else "1 / 0"}
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        if ending == "Ctrl-C":
            program.send_signal(signal.SIGINT)
        _, error = program.communicate(timeout=PATIENCE)
    assert ("KeyboardInterrupt" if ending == "Ctrl-C" else "ZeroDivisionError") in error
    until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_message_is_a_header_and_bytes() -> None:
    """The form that both scripts read."""
    parts = list(web_host.message({"session": 3}, [("x", np.array([1.0], np.float32))]))
    text = b'{"session": 3, "tensors": [{"name": "x", "type": "float32", "dims": [1]}]}'
    assert parts == [struct.pack("<I", len(text)) + text, np.float32(1).tobytes()]


def test_nodes_are_read_from_the_log() -> None:
    lines = [
        "[V:onnxruntime:, session_state.cc:1377 VerifyEachNodeIsAssignedToAnEp] Node placements",
        "[.. VerifyEachNodeIsAssignedToAnEp]  Node(s) placed on [CPUExecutionProvider]. Number of nodes: 1",
        "[.. VerifyEachNodeIsAssignedToAnEp]   Cast (Cast_node_2)",
        "[.. VerifyEachNodeIsAssignedToAnEp]  Node(s) placed on [WebGpuExecutionProvider]. Number of nodes: 1",
        "[.. VerifyEachNodeIsAssignedToAnEp]   MatMul (encoder/q (1))",
    ]
    assert list(placed("g", lines)) == [
        Node("g", "Cast_node_2", "Cast", "CPUExecutionProvider"),
        Node("g", "encoder/q (1)", "MatMul", "WebGpuExecutionProvider"),
    ]
