"""Python in a process of its own that need not import everything first: its parent has done that, and forks.

Half a second of each process that tests start went by with imports. `Forked` is started as `subprocess.Popen` is, with
the command `[sys.executable, "-c", code, ...]`, and ends as that would. `Process` is a Python of its own all the same:
for what depends on how Python starts and ends, and on packages that can't be imported.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

from imports import ROOT

READ_AT_START = ("PYTHONPATH", "PYTHONUTF8", "LD_PRELOAD", "OMP_NUM_THREADS")
READY = b"ready"
LARGEST_REQUEST = 2**20  # bytes
NUMBER = 4  # bytes of one that is told
PER_CHILD = 4  # descriptors: its standard streams, and one on which its end is told


class Process(subprocess.Popen):
    """One that is killed where a test fails: leaving its `with` would wait for an end that need not come."""

    def __exit__(self, kind, *others) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *others)


if sys.platform == "linux":  # Apple's frameworks may not be used after a fork

    class Forked(Process):
        def _execute_child(self, args, _executable, _before, _close, _pass, cwd, env, *others) -> None:
            _, _, _, *pipes = others[:9]
            python, option, code, *arguments = map(str, args)
            assert (python, option) == (sys.executable, "-c"), "another program can't be forked"
            request = {"code": code, "arguments": arguments, "cwd": os.fspath(cwd or os.getcwd())}
            request["env"] = dict(os.environ if env is None else env)
            assert _of_python(request["env"]) == _of_python(os.environ), "Python reads these when it starts"
            streams = [number if end == -1 else end for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
            self._told, end = socket.socketpair()
            with end:
                socket.send_fds(_parent(), [json.dumps(request).encode()], [*streams, end.fileno()])
            self.pid = self._number()
            self._child_created = True
            self._close_pipe_fds(*pipes)

        def _number(self) -> int:
            told = self._told.recv(NUMBER)
            assert len(told) == NUMBER, "the process that forks has gone"
            return int.from_bytes(told, "big")

        def _internal_poll(self, *_, **__) -> int | None:
            if self.returncode is None and select.select([self._told], [], [], 0)[0]:
                self._wait(None)
            return self.returncode

        def _wait(self, timeout: float | None) -> int:
            if self.returncode is None:
                if not select.select([self._told], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                self.returncode = os.waitstatus_to_exitcode(self._number())
                self._told.close()
            return self.returncode

else:
    Forked = Process


def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess:
    """As `subprocess.run` with captured output, as text unless `text=False`."""
    told, patience = options.pop("input", None), options.pop("timeout", None)
    pipes = {"stdin": subprocess.PIPE} if told is not None else {}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **pipes, **options}
    with Forked(command, **options) as process:
        out, error = process.communicate(told, timeout=patience)
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def _of_python(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name in READ_AT_START}


@cache
def _parent() -> socket.socket:
    """A connection to the process that forks, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
    with theirs:
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": paths},
        )
    assert ours.recv(len(READY)) == READY

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


LATE = "filelock h11 httpcore2 httpx2 mlx.optimizers pydantic.fields pydantic.type_adapter rich._emoji_codes rich.live "
LATE += "starlette.applications starlette.staticfiles stringprep tqdm.auto truststore "
LATE += "uvicorn uvicorn.protocols.http.httptools_impl yaml"
"""What commands and their libraries import when it is needed. huggingface_hub reads the environment meanwhile: each
process imports it for itself."""


def _import_all() -> None:
    import export
    import mlx_transformer
    from mlx_transformer.commands import app

    for package in (mlx_transformer, export):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                import_module(module.name)
    for name in LATE.split():
        with suppress(ImportError):  # another version's
            import_module(name)
    for program, (names, _) in app.PROGRAMS.items():
        for name in names:
            app.command_of(program).commands[app.BUILD.get(name, name) if program == app.EXPORT else name]


def _requested(connection: socket.socket) -> dict:
    """What to do, in a process that is to do it; this one goes on to fork until its client has gone."""
    while True:
        data, given, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, PER_CHILD)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not data:
            os._exit(0)
        if not os.fork():
            break
        for descriptor in given:
            os.close(descriptor)
    connection.close()
    *streams, end = given
    if child := os.fork():
        for descriptor in streams:
            os.close(descriptor)
        with suppress(OSError):  # who started it may have gone
            os.write(end, child.to_bytes(NUMBER, "big"))
            os.write(end, os.waitpid(child, 0)[1].to_bytes(NUMBER, "big"))
        os._exit(0)
    os.close(end)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in streams:
        os.close(descriptor)
    return json.loads(data)


def _begin(request: dict) -> str:
    """As Python does before it runs the code of `-c`, which is returned."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv, sys.path[0] = ["-c", *request["arguments"]], ""
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    for number, (name, mode, usual) in enumerate(
        [("stdin", "r", "strict"), ("stdout", "w", "strict"), ("stderr", "w", "backslashreplace")]
    ):
        stream = open(number, mode, encoding=encoding or None, errors=errors or usual, closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=number == 2 or stream.isatty())
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return request["code"]


def _run(code: str) -> NoReturn:
    """Run it as `__main__`, and end as Python does, but for taking down all that was imported."""
    status: object = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as done:
        status = done.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # as Python ends that could not say all
        status = status or 120
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(status or 0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as client:
        _import_all()
        gc.collect()
        gc.freeze()
        client.send(READY)
        code = _begin(_requested(client))
    _run(code)
