"""20,000 requests in a row to a server: every answer right, and memory flat from the second quarter to the last."""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from random import Random

from commands import Case, Verdict
from imports import ROOT
from waiting import PATIENCE, port_of

REQUESTS = 20_000
GROWTH, SPARE = 1.02, 2.0  # of memory; MB
WORDS = "one two three. four five, six! seven größer 東京 x".split()
HEAD = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"

# What a client may do wrong, and the status of its answer; 0: it leaves without one.
ODD = (
    (HEAD % 9 + b"not JSON!", 400),
    (HEAD % 300_000 + b"x" * 1000, 413),
    (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    (b"GET / HTTP/1.1\r\nHost: x\r\nX-Filler: " + b"y" * 70_000, 431),
    (b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    (b"nonsense\r\n\r\n", 400),
    (HEAD % 50 + b'{"text"', 0),
    (b"", 0),
)


def cases(base: Path, folder: Path, count: int | None, seed: int) -> list[Case]:
    run = partial(in_a_row, package=base / "int8", count=REQUESTS if count is None else count, seed=seed)
    ways = ("one connection", "a connection each", "mistakes between them")
    return [Case("requests in a row", way, partial(run, way=way)) for way in ways]


def in_a_row(_: Path, package: Path, way: str, count: int, seed: int) -> Verdict:
    random, sizes, wrong = Random(seed), [], []
    # Its environment: the fork's own is made for commands that end.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "export", "serve", str(package), "--port", "0", "--threads", "1"]
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        port = port_of(server)
        link, expected = connected(port), {}
        for number in range(count):
            if number % max(1, count // 200) == 0:
                sizes.append(megabytes(server.pid))
            if way == "mistakes between them" and number % 2:
                sent, status = random.choice(ODD)
                if (found := mistaken(port, sent, status)) != status:
                    wrong.append(f"request {number}: {sent[:40]!r}: {found}, not {status}")
                continue
            if way == "a connection each":
                link.close()
                link = connected(port)
            body = json.dumps({"text": " ".join(random.choices(WORDS, k=random.randint(1, 3))), "max_new_tokens": 4})
            path = random.choice(["/translate", "/translate/stream"])
            link.request("POST", path, body)
            answer = link.getresponse()
            found = (answer.status, answer.read())
            if found[0] != 200 or expected.setdefault((path, body), found) != found:
                wrong.append(f"request {number}: {path} {body}: {found}, not {expected.get((path, body))}")
        link.close()
        server.terminate()
        status = server.wait(PATIENCE)
        said = (server.stderr or sys.stderr).read()
    finally:
        server.kill()
        server.wait()
    if status or "Traceback" in said:
        wrong.append(f"it ended with {status}: {said[-300:]}")
    quarter = max(1, len(sizes) // 4)
    second, last = statistics.median(sizes[quarter : 2 * quarter] or sizes), statistics.median(sizes[-quarter:])
    if count >= REQUESTS and last > GROWTH * second + SPARE:
        wrong.append(f"memory grows: {second:.1f} MB in the second quarter, {last:.1f} in the last")
    return Verdict(f"{last - second:+.1f} MB of {second:.0f}", "; ".join(wrong[:3]), count)


def connected(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)


def mistaken(port: int, sent: bytes, status: int) -> int:
    """Send something wrong over a connection of its own; the status of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as link:
        link.sendall(sent)
        if not status:
            return 0
        answer = http.client.HTTPResponse(link)
        answer.begin()
        answer.read()
        return answer.status


def megabytes(process: int) -> float:
    """Resident memory; this harness runs on Linux."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
