"""The server under load against direct calls: sentences a second and latencies with 1, 8 and 32 clients.

    python benchmarks/serve.py ONNX --text FILE [--seconds 5] [--beam 1] [--threads 2] [--workers 1] [--clients 1 8 32]

The server is a process of its own on a free port, and so is each row of direct calls; the clients are this one process
and send one sentence after the other over connections that stay open. Everything shares the machine's cores.
Sentences are taken from FILE in a fixed order.

    python benchmarks/serve.py ONNX --text FILE --tokens 32 [--clients 1 8 32]

Of a decoder: each client streams one completion of so many tokens, of a line of FILE; all begin at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path

from mlx_transformer.system.machine import versions

DIRECT = """
import json, sys, time
from export import OnnxTransformer
folder, text, seconds, beam, threads, batch = json.loads(sys.argv[1])
model = OnnxTransformer(folder, threads=threads)
lines = open(text, encoding="utf-8").read().split("\\n")[:-1]
model.translate(lines[:batch], beam=beam)
taken, place, start = [], 0, time.perf_counter()
while time.perf_counter() - start < seconds:
    began = time.perf_counter()
    model.translate([lines[(place + i) % len(lines)] for i in range(batch)], beam=beam)
    taken.append(time.perf_counter() - began)
    place += batch
print(json.dumps({"sentences": place / (time.perf_counter() - start), "seconds": taken}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="one sentence a line")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of one operator (default: the machine's cores)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--max-wait-ms", type=float, default=5.0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--direct", type=int, nargs="*", default=[1, 8, 32], help="batch sizes of direct calls")
    parser.add_argument("--tokens", type=int, help="of each completion of a decoder")
    chosen = parser.parse_args()
    lines = chosen.text.read_text(encoding="utf-8").split("\n")[:-1]
    if chosen.tokens:
        return of_decoder(chosen, lines)
    rows = []
    for batch in chosen.direct:
        given = [str(chosen.model), str(chosen.text), chosen.seconds, chosen.beam, chosen.threads, batch]
        done = subprocess.run([sys.executable, "-c", DIRECT, json.dumps(given)], capture_output=True, check=True)
        result = json.loads(done.stdout)
        rows.append(row(f"direct calls of {batch}", result["sentences"], result["seconds"]))
    process, port = started(chosen)
    try:
        for clients in chosen.clients:
            asyncio.run(load(port, lines, min(1.0, chosen.seconds), clients, chosen.beam))
            rows.append(
                row(f"{clients} clients", *asyncio.run(load(port, lines, chosen.seconds, clients, chosen.beam)))
            )
    finally:
        process.terminate()
        process.wait()
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    print(f"beam {chosen.beam}, threads {chosen.threads}, workers {chosen.workers}, {chosen.seconds:g} s a row\n")
    print("| | sentences/s | median, ms | p99, ms |\n|-|-|-|-|")
    print(*rows, sep="\n")
    return 0


def of_decoder(chosen: argparse.Namespace, lines: list[str]) -> int:
    rows = []
    process, port = started(chosen)
    try:
        asyncio.run(completions(port, lines[:2], 2))
        for clients in chosen.clients:
            prompts, before, began = list(islice(cycle(lines), clients)), used(process.pid), time.perf_counter()
            first, tokens = zip(*asyncio.run(completions(port, prompts, chosen.tokens)), strict=True)
            seconds, busy = time.perf_counter() - began, used(process.pid) - before
            about = f"{sum(tokens) / seconds:.1f} | {sum(tokens) / max(busy, 1):.1f}"
            rows.append(f"| {clients} clients | {about} | {statistics.median(first):.2f} | {max(first):.2f} |")
    finally:
        process.terminate()
        process.wait()
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    print(f"{chosen.tokens} tokens each, threads {chosen.threads}, workers {chosen.workers}\n")
    print("| | tokens/s | tokens a CPU second of the server | first token, s | last client's |\n|-|-|-|-|-|")
    print(*rows, sep="\n")
    return 0


async def completions(port: int, prompts: list[str], tokens: int) -> list[tuple[float, int]]:
    """Seconds to the first token, and the number of tokens, of a streamed completion of each prompt."""

    async def client(prompt: str) -> tuple[float, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        body = json.dumps({"model": "decoder", **asked, "stream_options": {"include_usage": True}}).encode()
        began, first, usage = time.perf_counter(), 0.0, 0
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        async for line in reader:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                usage = (json.loads(line[6:])["usage"] or {}).get("completion_tokens", 0)
        writer.close()
        return first, usage

    return await asyncio.gather(*map(client, prompts))


def used(process: int) -> float:
    """CPU seconds of a process."""
    done = subprocess.run(["ps", "-o", "time=", "-p", str(process)], capture_output=True, text=True, check=True)
    days, _, clock = done.stdout.strip().rpartition("-")
    parts = [float(part) for part in clock.split(":")]
    return 86400 * int(days or 0) + sum(part * 60**i for i, part in enumerate(reversed(parts)))


def row(name: str, rate: float, seconds: list[float]) -> str:
    p99 = sorted(seconds)[int(0.99 * (len(seconds) - 1))]
    return f"| {name} | {rate:.0f} | {1000 * statistics.median(seconds):.1f} | {1000 * p99:.1f} |"


def started(chosen: argparse.Namespace) -> tuple[subprocess.Popen[str], int]:
    """The server once it is ready, and its port."""
    name = "decoder=" if chosen.tokens else ""
    command = [sys.executable, "-m", "export", "serve", f"{name}{chosen.model}", "--port", "0"]
    command += ["--workers", str(chosen.workers), "--max-wait-ms", str(chosen.max_wait_ms)]
    command += ["--threads", str(chosen.threads)] if chosen.threads else []
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+) \(ready", line):
            return process, int(found[1])
    raise SystemExit(f"the server ended with {process.wait()}")


async def load(port: int, lines: list[str], seconds: float, clients: int, beam: int) -> tuple[float, list[float]]:
    """Sentences a second and the seconds of each request, `clients` at a time."""
    taken: list[float] = []
    start = time.perf_counter()

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for line in islice(cycle(lines), number * len(lines) // clients, None):
            body = json.dumps({"text": line, "beam": beam}).encode()
            began = time.perf_counter()
            if began - start >= seconds:
                break
            writer.write(b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            await reader.readexactly(int(length[1]))
            taken.append(time.perf_counter() - began)
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*map(client, range(clients)))
    return len(taken) / (time.perf_counter() - start), taken


if __name__ == "__main__":
    raise SystemExit(main())
