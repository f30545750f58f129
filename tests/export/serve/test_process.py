"""The server as a process: an orderly start and end, and one line for what can't be served."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import forked
import pytest
from as_windows import AS_WINDOWS
from combined import thinned_rows
from forked import Forked, Process
from imports import ROOT
from serving import LINES, STREAM
from waiting import PATIENCE, port_of, until
from without_mlx import WITHOUT_MLX

from export.__main__ import main
from export.serve import batching
from export.serve.batching import Batcher
from export.serve.calls import ENDING


@pytest.fixture
def folder(text_folder):
    return text_folder / "onnx"


def started(*arguments, before="", said=None):
    """The server in a process of its own, and its port once it is ready; its lines up to then go to `said`."""
    # Tests run in the background of a shell may have been told to ignore Ctrl-C, which processes inherit.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{heard}\n{before}\nfrom export.__main__ import main\nraise SystemExit(main())"
    kind = Process if before.startswith(WITHOUT_MLX) else Forked  # of what was imported nothing can be taken away
    patient = ["--port", "0", "--grace-seconds", str(PATIENCE)]  # what is held is not given up by itself
    command = [sys.executable, "-c", script, "serve", *map(str, arguments), *patient]
    process = kind(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    return process, port_of(process, said)


@contextlib.contextmanager
def running(*arguments, **options):
    """The same for a block, after which it has ended."""
    process, port = started(*arguments, **options)
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def post(port, path, body=None):
    """-> status, text; without a body it is a GET."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def refused(port):
    try:
        post(port, "/health")
    except ConnectionError as error:  # of another kind: accepted, and closed at the end
        return isinstance(error, ConnectionRefusedError)
    return False


# Searches wait as long as a file is there.
HELD = """
import time
from pathlib import Path
from export.runtime.transformer import OnnxTransformer

generate = OnnxTransformer.generate


def held(*arguments, **options):
    while Path({file!r}).exists():
        time.sleep(0.01)
    return generate(*arguments, **options)


OnnxTransformer.generate = held
"""


@pytest.mark.parametrize(
    ("number", "status"), thinned_rows([(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)], 3)
)
def test_process(folder, text_model, tmp_path, number, status):
    """A machine without MLX serves; told to end, it answers what it has taken, and says so by its exit status."""
    hold = tmp_path / "hold"
    with running(folder, before=WITHOUT_MLX + HELD.format(file=str(hold))) as (process, port):
        assert post(port, STREAM, {"text": "x"})[1].count("event: done") == 1
        code, text = post(port, "/translate", {"text": LINES, "beam": 2})
        assert code == 200
        assert json.loads(text) == {"translations": text_model.translate(LINES, beam=2)}
        hold.touch()
        with ThreadPoolExecutor(2) as pool:
            last = []
            for line, state in (("x", "running"), ("one two", "waiting")):
                last.append(pool.submit(post, port, "/translate", {"text": line}))
                until(lambda state=state: json.loads(post(port, "/health")[1])[state] == 1)
            process.send_signal(number)
            until(lambda: refused(port))
            hold.unlink()
            found = [json.loads(answer.result()[1]) for answer in last]
        assert found == [{"translations": text_model.translate([line])} for line in ("x", "one two")]
        assert process.wait(PATIENCE) == status
        said = process.stderr.read()
        assert "Traceback" not in said


@pytest.mark.slow
def test_a_system_without_posix_serves(folder, text_model):
    with running(folder, before=WITHOUT_MLX + AS_WINDOWS) as (process, port):
        assert json.loads(post(port, "/translate", {"text": LINES})[1]) == {"translations": text_model.translate(LINES)}
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(("number", "status"), thinned_rows([(signal.SIGINT, 130), (signal.SIGTERM, 0)], 2))
def test_told_again_it_gives_up(folder, tmp_path, number, status):
    """Three times in all: who waits for an answer or a stream is told so, and the log has no traceback."""
    hold = tmp_path / "hold"
    with running(folder, before=HELD.format(file=str(hold))) as (process, port):
        hold.touch()
        with ThreadPoolExecutor(3) as pool, socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            asked = [pool.submit(post, port, "/translate", {"text": "x"})]
            until(lambda: json.loads(post(port, "/health")[1])["running"] == 1)
            asked += [pool.submit(post, port, path, {"text": "one"}) for path in ("/translate", STREAM)]
            until(lambda: [json.loads(post(port, "/health")[1])[name] for name in ("running", "waiting")] == [2, 1])
            process.send_signal(number)
            until(lambda: refused(port))
            assert not any(answer.done() for answer in asked)
            process.send_signal(number)
            answers = [answer.result() for answer in asked]
            assert [(code, json.loads(text)) for code, text in answers] == [(503, {"error": ENDING})] * 3
            process.send_signal(number)
            hold.unlink()
            assert process.wait(PATIENCE) == status
        said = process.stderr.read()
        assert "Traceback" not in said
        assert said.count("\n") <= 2, said


TOLD_FIRST = """
import os, signal, uvicorn
begin = uvicorn.Config.get_loop_factory

def told(config):
    os.kill(os.getpid(), signal.SIGTERM)
    return begin(config)

uvicorn.Config.get_loop_factory = told
from export.__main__ import main
raise SystemExit(main())
"""


def test_told_to_end_before_it_listens_to_signals(folder):
    command = [sys.executable, "-c", TOLD_FIRST, "serve", str(folder), "--port", "0"]
    done = forked.run(command, cwd=ROOT, timeout=PATIENCE)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_several_models_of_both_runtimes(folder):
    """A checkpoint, which MLX runs, beside a folder, which ONNX Runtime does."""
    with running(f"en-de={folder.parent / 'model'}", f"de-en={folder}") as (process, port):
        for source, target in (("en", "de"), ("de", "en")):
            status, text = post(port, "/translate", {"q": "one two", "source": source, "target": target})
            assert (status, list(json.loads(text))) == (200, ["translatedText"])
        assert "event: done" in post(port, STREAM, {"text": "one two", "source": "en"})[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert "Traceback" not in process.stderr.read()


def test_settings_reach_the_queue(folder, monkeypatch):
    given = []
    monkeypatch.setattr(batching, "Batcher", lambda *settings: given.append(settings) or Batcher(*settings))
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    settings = ["--max-batch", "3", "--max-wait-ms", "400", "--max-queue", "7", "--workers", "2"]
    assert main(["serve", str(folder), "--port", "0", *settings]) == 0
    assert given == [(3, 0.4, 7, 2)]


def test_what_cannot_be_served(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: pytest.fail("it is served"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--port", port]) == 2
        assert f"127.0.0.1:{port}: can't listen there (Address already in use); choose" in capsys.readouterr().err
    for arguments, message in [
        ([str(folder), "--max-batch", "0"], "--max-batch 0 must be a whole number of at least 1"),
        ([str(folder), "--threads", "0"], "--threads 0 must be a whole number of at least 1"),
        ([str(folder), "--max-wait-ms", "-1"], "--max-wait-ms -1.0 must be a number of at least 0 and at most 60,000"),
        ([str(folder), "--port", "70000"], "--port 70000 must be a whole number of at least 0 and at most 65,535"),
        ([str(folder), "--host", "256.0.0.1"], "256.0.0.1:8000: can't listen there"),
        ([str(tmp_path)], str(tmp_path)),
    ]:
        assert main(["serve", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_model_that_cannot_translate(folder, tmp_path, capsys):
    """Found only when it is loaded: one line and exit 2 all the same."""
    for file in folder.rglob("*"):
        if file.is_file() and file.name not in ("tokenizer.json", "manifest.json"):  # as if there had never been one
            target = tmp_path / "onnx" / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "export", "serve", str(tmp_path / "onnx"), "--port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert "no tokenizer.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra(folder):
    script = (
        "import sys\nsys.modules['starlette'] = None\n"  # importing it is ModuleNotFoundError
        f"from export.__main__ import main\nraise SystemExit(main(['serve', {str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr == "python -m export: serve needs starlette: pip install -e '.[serve]'\n"
