"""The client of the soak, a process of its own: more requests than the server can answer, and every answer compared.

    python tests/soak/load.py PLAN

PLAN: JSON {"port", "seconds", "seed", "questions"}. The result is one line of JSON on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from typing import Any

from mix import CHATS, COMPLETIONS, KEYS, head, is_right, may_stream, odd

CLOSED_LOOP = 16  # clients that ask one request after the other, by whom the capacity is found
MEASURED = 5.0  # seconds, for that
OVERLOAD = 2.0  # times the capacity
MOST_OPEN = 1500  # requests at the same time; beyond it one is not sent
PATIENCE = 120.0
KINDS = {"plain": 64, "leaves": 6, "slow": 4, "stalls": 2, "odd": 4, "stream": 20}


class Load:
    """`results`: the counts; `cut`: the times at which a connection broke before its answer."""

    def __init__(self, plan: dict[str, Any]):
        self.port, self.questions = plan["port"], plan["questions"]
        self.streamed: dict[str, list[dict[str, Any]]] = {}
        for each in self.questions:
            if may_stream(each["body"]):
                self.streamed.setdefault(each["path"], []).append(each)
        self.rng, self.odd = random.Random(plan["seed"]), odd()
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.health: list[tuple[float, float]] = []  # when, seconds
        self.cut: list[float] = []
        self.wrong: list[str] = []
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def run(self, seconds: float) -> dict[str, Any]:
        await self._closed_loop()
        rate = self.counts["accepted"] / MEASURED
        self.counts.clear()
        self.seconds.clear()
        tasks: set[asyncio.Task[None]] = {asyncio.create_task(self._probe(seconds))}
        end, following = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < end:
            following += self.rng.expovariate(OVERLOAD * max(rate, 1.0))
            await asyncio.sleep(max(0.0, following - time.monotonic()))
            if len(tasks) >= MOST_OPEN:
                self.counts["not sent"] += 1
                continue
            kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
            task = asyncio.create_task(self._one(kind))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        _, left = await asyncio.wait(set(tasks), timeout=PATIENCE)
        self.counts["unanswered"] = len(left)
        return {
            "capacity": rate,
            "counts": dict(self.counts),
            "seconds": sorted(self.seconds),
            "health": self.health,
            "cut": self.cut,
            "wrong": self.wrong[:20],
        }

    async def _closed_loop(self) -> None:
        end = time.monotonic() + MEASURED

        async def client() -> None:
            while time.monotonic() < end:
                await self._one("plain")

        await asyncio.gather(*(client() for _ in range(CLOSED_LOOP)))

    async def _probe(self, seconds: float) -> None:
        """Health once a second, over a connection of its own."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began, moment = time.monotonic(), time.time()
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: soak\r\n\r\n")
                    status, _, _ = await answer(reader)
                    if status == 200:
                        self.health.append((moment, time.monotonic() - began))
                    elif status != 503:  # 503: it is starting
                        self.wrong.append(f"health: {status}")
                finally:
                    writer.close()
            except (OSError, asyncio.IncompleteReadError):
                self.cut.append(time.time())
            await asyncio.sleep(1)

    async def _one(self, kind: str) -> None:
        self.counts[kind] += 1
        try:
            await asyncio.wait_for(getattr(self, f"_{kind}")(), PATIENCE)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            if kind not in ("leaves", "stalls"):
                self.cut.append(time.time())
        except TimeoutError:
            self.wrong.append(f"{kind}: no answer in {PATIENCE:.0f} s")

    def _request(self) -> tuple[dict[str, Any], bytes, bytes]:
        question = self.rng.choice(self.questions)
        self.counts[question["path"]] += 1
        body = json.dumps(question["body"]).encode()
        return question, head(body, question["path"], self.rng.choice(KEYS)), body

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self.idle:
            reader, writer = self.idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def _plain(self) -> None:
        question, start, body = self._request()
        for attempt in range(3):
            began = time.monotonic()
            reader, writer = await self._open()
            try:
                writer.write(start + body)
                status, headers, found = await answer(reader)
                break
            except (OSError, asyncio.IncompleteReadError):
                writer.close()
                if attempt == 2 or not self.idle:  # one that was kept may have been closed meanwhile
                    raise
        self._judge(question, status, headers, found, time.monotonic() - began)
        if headers.get("connection") == "close" or len(self.idle) > 200:
            writer.close()
        else:
            self.idle.append((reader, writer))

    def _judge(
        self, question: dict[str, Any], status: int, headers: dict[str, str], found: bytes, seconds: float | None
    ) -> None:
        if status == 503 and headers.get("retry-after", "").isdigit() and "error" in json.loads(found):
            self.counts["refused"] += 1
        elif status == 200 and is_right(question["path"], json.loads(found), question["answer"]):
            self.counts["accepted"] += 1
            if seconds is not None:
                self.seconds.append(seconds)
        else:
            self.wrong.append(f"{json.dumps(question['body'])[:80]}: {status} {found[:200]!r}")

    async def _leaves(self) -> None:
        _, start, body = self._request()
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(start + body)
        await asyncio.sleep(self.rng.random() * 0.5)
        writer.close()

    async def _slow(self) -> None:
        question, start, body = self._request()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        whole = start + body
        for first in range(0, len(whole), 64):
            writer.write(whole[first : first + 64])
            await asyncio.sleep(self.rng.random() * 0.2)
        status, headers, found = await answer(reader)
        self._judge(question, status, headers, found, None)
        writer.close()

    async def _stalls(self) -> None:
        """Half a head or half a body, until the server has enough of it."""
        _, start, body = self._request()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write((start + body)[: self.rng.randrange(len(start + body))])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(), 45)
            self.counts["stalls ended"] += 1
        writer.close()

    async def _odd(self) -> None:
        whole, expected = self.rng.choice(self.odd)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(whole)
        status, _, found = await answer(reader)
        if status not in (expected, 503) or b'"error"' not in found:
            self.wrong.append(f"{whole[:60]!r}: {status}, not {expected}: {found[:100]!r}")
        writer.close()

    async def _stream(self) -> None:
        """A translation, a completion or a chat in pieces; some leave in the middle, some read slowly."""
        question = self.rng.choice(self.streamed[self.rng.choice([*self.streamed])])
        theirs = question["path"] in (COMPLETIONS, CHATS)
        body = json.dumps({**question["body"], "stream": True} if theirs else question["body"]).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head(body, question["path"] + "/stream" * (not theirs), self.rng.choice(KEYS)) + body)
        if self.rng.random() < 0.2:
            await reader.read(self.rng.randrange(1, 600))
            writer.close()
            return
        if self.rng.random() < 0.1:
            await asyncio.sleep(self.rng.random())
        status, _, found = await answer(reader)
        if status == 200:
            *pieces, end = found.decode().split("\n\n")[:-1]
            values = [json.loads(piece.removeprefix("data: ")) for piece in pieces]
            text = "".join(piece_of(value) for value in values)
            whole = text if theirs else json.loads(end.removeprefix("event: done\ndata: "))["text"]
            if not text == whole == question["answer"][0] or theirs != (end == "data: [DONE]"):
                self.wrong.append(f"stream: {text!r}, not {question['answer'][0]!r}: {found[-200:]!r}")
        elif status != 503:
            self.wrong.append(f"stream: {status}")
        writer.close()


def piece_of(value: dict[str, Any]) -> str:
    """The text of an event: of a translation, a completion or a chat."""
    if "choices" not in value:
        return value["text"]
    [choice] = value["choices"]
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    if headers.get("transfer-encoding") != "chunked":
        return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return int(lines[0].split()[1]), headers, body


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        chosen = json.load(file)
    print(json.dumps(asyncio.run(Load(chosen).run(chosen["seconds"]))))
