"""The server at twice its capacity, from a second process on loopback, killed and started again meanwhile: `make soak`.

    python tests/soak/soak.py [--minutes 30] [--model ONNX] [--seed 1] [--kills 3]

A translator, in our form and LibreTranslate's, a decoder and an encoder, in OpenAI's, are served together. Clients
leave, stall, send slowly and send nonsense. Every answer is compared with the one computed alone. A table at the end;
exit 1 on a wrong answer, on a connection that broke while nothing was killed, and where memory grows: from the first to
the last quarter of the last life of the server, which is the second half of the run.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from mix import CHATS, COMPLETIONS, EMBEDDINGS, KEYS, models, questions
from waiting import PATIENCE

from export import OnnxTransformer

ROOT = Path(__file__).resolve().parents[2]
GROWTH = 1.1  # of memory, that noise may be
SPARE = 15.0  # MB, beside it
AROUND = 2.0  # seconds around a kill in which a connection may break


class Server:
    """The process, and what was seen of it. lives: of each, when it was ready and MB at each second since."""

    def __init__(self, models: dict[str, Path], folder: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        keys = folder / "keys"
        keys.write_text("\n".join(KEYS) + "\n")
        given = ["--port", str(self.port), "--threads", "1", "--max-queue", "256", "--api-key-file", str(keys)]
        named = [f"{name}={path}" for name, path in models.items()]
        self.command = [sys.executable, "-m", "export", "serve", *named, *given]
        self.lives: list[list[float]] = []
        self.down: list[tuple[float, float]] = []
        self.said: list[str] = []
        self.ready = threading.Event()

    def start(self) -> None:
        began = time.time()
        self.ready.clear()
        self.process = subprocess.Popen(self.command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lives.append([])
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()
        if not self.ready.wait(PATIENCE):
            raise SystemExit(f"the server is not ready: {self.said[-3:]}")
        self.down.append((began, time.time()))

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.said.append(line.rstrip())
            if re.search(r"serving .* \(ready", line):
                self.ready.set()

    def kill(self) -> None:
        began = time.time()
        self.process.kill()
        self.process.wait()
        self.start()
        self.down[-1] = (began, self.down[-1][1])

    def look(self) -> None:
        done = subprocess.run(["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True, text=True)
        if done.stdout.strip():
            self.lives[-1].append(int(done.stdout) / 1024)

    def excused(self, moment: float) -> bool:
        return any(first - AROUND <= moment <= last + AROUND for first, last in self.down)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", type=Path, help="an ONNX folder that translates (default: random weights)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=3, help="with SIGKILL, in the first half")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served = models(folder, chosen.model)
        opened = {name: OnnxTransformer(path, threads=1) for name, path in served.items()}
        plan = {"questions": questions(opened, 60, chosen.seed)}
        server = Server(served, folder)
        server.start()
        try:
            result = loaded(server, {**plan, "port": server.port, "seed": chosen.seed}, chosen, folder)
            server.process.terminate()
            status = server.process.wait(60)
        finally:
            server.process.kill()
            server.process.wait()
    return report(server, result, status)


def loaded(server: Server, plan: dict[str, Any], chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the load found, while the server was watched and killed."""
    seconds = 60 * chosen.minutes
    path = folder / "plan.json"
    path.write_text(json.dumps({**plan, "seconds": seconds}))
    rng = random.Random(chosen.seed)
    kills = sorted(10 + rng.random() * max(1.0, seconds / 2 - 10) for _ in range(chosen.kills))
    # Its output is a file: a pipe that nobody reads is full at some point.
    with (folder / "result.json").open("w+") as out:
        load = subprocess.Popen([sys.executable, str(ROOT / "tests" / "soak" / "load.py"), str(path)], stdout=out)
        began = time.monotonic()
        while load.poll() is None:
            time.sleep(1)
            server.look()
            if server.process.poll() is not None:
                load.kill()
                raise SystemExit(f"the server ended by itself: {server.said[-5:]}")
            if kills and time.monotonic() - began > kills[0]:
                kills.pop(0)
                server.kill()
        if load.returncode:
            raise SystemExit(f"the load ended with {load.returncode}")
        out.seek(0)
        return json.load(out)


def report(server: Server, result: dict[str, Any], status: int) -> int:
    """Print the table; the exit status."""
    counts, memory = result["counts"], server.lives[-1]
    if not memory:
        raise SystemExit("the last life of the server was too short to be seen: give it more --minutes")
    quarter = max(1, len(memory) // 4)
    first, last = statistics.median(memory[:quarter]), statistics.median(memory[-quarter:])
    unexplained = [moment for moment in result["cut"] if not server.excused(moment)]
    faults = [line for line in server.said if "ERROR" in line or "Traceback" in line]

    started = server.excused  # it answers when it is there

    def times(seconds: list[float]) -> str:
        if not seconds:
            return "-"
        p50, p99 = (seconds[int(part * (len(seconds) - 1))] for part in (0.5, 0.99))
        return f"p50 {1000 * p50:.0f}, p99 {1000 * p99:.0f}, max {1000 * seconds[-1]:.0f} ms"

    asked = sum(counts.get(kind, 0) for kind in ("plain", "leaves", "slow", "stalls", "odd", "stream"))
    sent = ", ".join(f"{counts.get(kind, 0)} {kind}" for kind in ("leaves", "slow", "stalls", "odd", "stream"))
    rows = [
        ("capacity, closed loop", f"{result['capacity']:.0f} requests/s"),
        ("requests", f"{asked}: {counts.get('plain', 0)} plain, {sent}"),
        (
            "of them",
            ", ".join(f"{counts.get(path, 0)} {path}" for path in ("/translate", COMPLETIONS, CHATS, EMBEDDINGS)),
        ),
        ("accepted", str(counts.get("accepted", 0))),
        ("refused (503)", str(counts.get("refused", 0))),
        ("wrong answers", str(len(result["wrong"]))),
        ("without an answer", str(counts.get("unanswered", 0))),
        ("killed and started", str(len(server.lives) - 1)),
        ("broken by a kill, otherwise", f"{len(result['cut']) - len(unexplained)}, {len(unexplained)}"),
        ("latency of accepted", times(result["seconds"])),
        ("latency of /health", times(sorted(seconds for moment, seconds in result["health"] if not started(moment)))),
        ("memory, last life", f"begin {first:.0f}, max {max(memory):.0f}, end {last:.0f} MB"),
        ("errors in the log", str(len(faults))),
        ("exit status on SIGTERM", str(status)),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in rows))
    for line in [*result["wrong"][:5], *faults[:5]]:
        print("  " + line)
    grown = last > GROWTH * first + SPARE
    bad = result["wrong"] or unexplained or faults or grown or status or counts.get("unanswered", 0)
    return 1 if bad or not result["seconds"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
