"""The measuring side of `worker.py`: starts an engine's process and lets it run only while it is asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from . import EngineName, Rows

BENCHMARKS = Path(__file__).parent.parent


class EngineError(Exception):
    """An engine can't be loaded, can't do what it was asked, or has died."""


class Worker:
    """One engine's process. Between requests it is stopped (SIGSTOP), so no thread of it can spin beside another's.

    python: the interpreter that has the engine; of llama.cpp the node_modules.
    """

    def __init__(self, engine_name: EngineName, python: str, folder: Path, threads: int, clock: str = "perf_counter"):
        self.engine_name = engine_name
        self.errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by close()
        paths = os.pathsep.join([str(BENCHMARKS.parent), str(BENCHMARKS)])
        environment = os.environ | engine_name.environment | {"PYTHONPATH": paths}
        place = str(folder.absolute())
        command = [python, "-m", "engines.worker", engine_name.text, place, str(threads), clock]
        if engine_name.family == "llama":
            command = ["node", str(BENCHMARKS / "engines" / "llama.mjs"), place, str(threads), python]
        self.process = subprocess.Popen(
            command,
            cwd=BENCHMARKS.parent,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        try:
            self.loaded = self._answer()
        except EngineError:
            self.close()
            raise

    def translate(
        self,
        batches: list[Rows],
        beam: int,
        length: int | None,
        limit: int = 100,
        prefix: Rows | None = None,
        timed: bool = False,
        warm: bool = False,
    ) -> tuple[float, Rows]:
        """Seconds for all batches, and the outputs in order; see `worker.py` for the arguments."""
        request = {"batches": batches, "beam": beam, "length": length, "limit": limit, "prefix": prefix}
        answer = self._ask(request | {"timed": timed, "warm": warm})
        return answer["seconds"], answer["outputs"]

    def continued(self, prompts: Rows, count: int) -> dict[str, Any]:
        """Seconds and outputs of a decoder; see `worker.py`."""
        return self._ask({"prompts": prompts, "count": count})

    def peak(self) -> int:
        """Most bytes that its process has held so far, interpreter included."""
        return self._ask({"memory": True})["peak"]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        self.process.communicate()
        self.errors.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # _answer finds out why
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise EngineError(f"its process ended: {last_line(self.errors.read())}")
        self.process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer


def last_line(text: str) -> str:
    """Of what a process wrote on stderr: where Python names the error."""
    return (text.strip().splitlines()[-1:] or ["no message"])[0][:300]
