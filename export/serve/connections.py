"""Bounds on connections: how many, how many bytes, how long.

`Connection` stands between a socket and uvicorn's HTTP protocol: to the socket it is an asyncio protocol, to uvicorn a
transport. It counts bytes, passes them on, and refuses clients who send too much or too slowly. It parses nothing and
changes nothing of uvicorn. `Bounds`, an ASGI middleware, tells it when a request begins, when its body is complete, and
when it is answered:

    nothing --bytes--> head --Bounds--> body --Bounds--> answered --Bounds--> nothing
              header_seconds      body_seconds (requests.py)     uvicorn: timeout_keep_alive

A refusal is JSON, like every error, and the connection stays open long enough for the client to read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .requests import MAX_BODY, error_answer, error_content

MAX_HEAD = 64 * 1024  # bytes of a request before its body
MAX_RAW = 16 * MAX_BODY  # bytes of a body as it is sent, in chunks of a byte or more
PIECE = 8 * 1024  # bytes parsed at once
MAX_AHEAD = 64 * 1024  # bytes behind a request being answered; beyond it reading stops
HELD = 64 << 20  # bytes of unanswered requests, all connections together
WRITE_SECONDS = 30.0  # for a client who doesn't read
LINGER_SECONDS, LINGER_BYTES = 2.0, 4 << 20  # how long and how much a refused client may go on sending
SPARE_FILES = 128  # open files of the process other than connections
CONNECTION = "connection"  # in a request's state


class Connection(asyncio.Protocol):
    """guard: shared by all connections. given: uvicorn's arguments for its protocol."""

    transport: asyncio.Transport

    def __init__(self, guard: Guard, header_seconds: float, *, app_state: dict[str, Any], **given: Any):
        self.guard, self.header_seconds = guard, header_seconds
        self.http: Any = HttpToolsProtocol(app_state={**app_state, CONNECTION: self}, **given)
        self.loop = asyncio.get_running_loop()
        self.asked = False  # a request has begun at some time
        self.requests = 0  # begun and not answered: 0 or 1, for a moment 2
        self.answering = 0  # of these, requests with a complete body
        self.started = False  # an answer is being sent
        self.unread = False  # the answered request's body won't be read to the end
        self.size = 0  # bytes so far of the head or body; negative: of a refused body, still to come
        self.held = 0  # bytes counted by the guard
        self.first_line = b""  # of the head; its beginning until the rest arrives
        self.ahead = bytearray()  # not parsed yet
        self.feeding = False  # uvicorn is parsing
        self.full = False  # uvicorn wants no more now
        self.turning = False  # `_turn` is scheduled
        self.paused = False  # the socket isn't read
        self.client_ended = False  # the client sends no more, and may still read
        self.over = False  # refused or closed: further bytes are dropped
        self.left = LINGER_BYTES  # bytes to drop, at most
        self.deadline: asyncio.TimerHandle | None = None  # for a head, then for lingering
        self.write_deadline: asyncio.TimerHandle | None = None

    # Called by the socket.
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport isn't a subclass
        self._wait(self.header_seconds, self._expired)
        self.http.connection_made(self)
        self.guard.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.over = True
        for timer in (self.deadline, self.write_deadline):
            if timer is not None:
                timer.cancel()
        self.guard.remove(self)
        self.http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.over:
            self.left -= len(data)
            if self.left < 0:
                self.transport.close()
            return
        self.held += len(data)
        self.guard.hold(len(data))  # this connection may have to give way
        if self.ahead or self.answering or self.full or len(data) > PIECE:
            self.ahead += data
            self._again()
        elif not self.over:
            self._feed(data)

    def eof_received(self) -> bool:
        """Stay open for a client with nothing more to send who still reads, e.g. `nc`."""
        self.client_ended = True
        if self.over or not (self.requests or self.size or self.ahead):
            return False
        self._again()
        return True

    def pause_writing(self) -> None:
        self.http.pause_writing()
        self.write_deadline = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self.http.resume_writing()
        if self.write_deadline is not None:
            self.write_deadline.cancel()

    # Called by uvicorn.
    def write(self, data: Any) -> None:
        if self.feeding and not self.requests and bytes(data[:13]) == b"HTTP/1.1 400 ":  # uvicorn's refusal, as text
            self.refuse(400, "Invalid HTTP request received")
        else:
            self.transport.write(data)

    def close(self) -> None:
        if self.over:
            return
        if self.unread or (self.requests > self.answering and self.started):
            self._linger()
        else:
            self.over = True
            self._wait(WRITE_SECONDS, self.transport.abort)
            self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    def is_closing(self) -> bool:
        return self.over or self.transport.is_closing()

    def pause_reading(self) -> None:
        self.full = True
        self._again()

    def resume_reading(self) -> None:
        self.full = False
        self._again()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.transport.get_extra_info(name, default)

    # Called by `Bounds`.
    def begin(self) -> None:
        """A head is complete."""
        self.asked = True
        self.requests += 1
        self.size = 0
        self._stop_waiting()

    def body_complete(self) -> None:
        self.answering += 1

    def end(self, complete: bool, left: int) -> None:
        """A request is answered. left: bytes of its body still to come."""
        self.requests -= 1
        self.answering -= complete
        self.started = False
        self.size = -left
        self.guard.release(self.held - len(self.ahead))
        self.held = len(self.ahead)
        self.guard.waits(self)
        if self.ahead or self.client_ended:
            self._again()

    # Refusals.
    @property
    def stays(self) -> bool:
        """Whether a request is being answered: the connection then gives way to nobody."""
        return bool(self.answering)

    def give_way(self) -> None:
        """Make room for others: abort if closing already, close if idle after an answer, else refuse with 503."""
        if self.over:
            self.transport.abort()
        elif self.size > 0 or self.requests or not self.asked:
            self.refuse(503, "the server has no room for more connections; try again in 1 s", "retry-after: 1")
        else:
            self.close()

    def refuse(self, status: int, message: str, *headers: str) -> None:
        """Answer in place of the application and read no more. For uvicorn the connection ends here."""
        self.over = True
        self.http.connection_lost(ConnectionAbortedError(message))
        self.guard.refused(status)
        if not self.started:
            path = self.first_line.split(b" ", 2)[1:2] or [b""]
            body = json.dumps(error_content(path[0].decode("latin-1"), status, message)).encode()
            head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "content-type: application/json", *headers]
            head += [f"content-length: {len(body)}", "connection: close", "\r\n"]
            self.transport.write("\r\n".join(head).encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Close, but read on for a while: closing a socket with unread bytes would reset the connection, and the client
        would lose its answer."""
        self.over = True
        self._release()
        self.ahead.clear()
        self._pause(False)
        if self.transport.can_write_eof() and not self.client_ended:
            self.transport.write_eof()
            self._wait(LINGER_SECONDS, self.transport.abort)
        else:
            self._wait(WRITE_SECONDS, self.transport.abort)
            self.transport.close()

    def _expired(self) -> None:
        if self.requests or self.over:
            return
        if self.size > 0:
            self.refuse(408, f"the request's head is not complete after {self.header_seconds:g} s")
        else:
            self.close()

    # Reading in pieces.
    def _again(self) -> None:
        """Look at the connection in the next turn of the event loop: by then `Bounds` knows of a request whose head has
        just been parsed."""
        if not self.turning:
            self.turning = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.turning = False
        if self.over:
            return
        if self.requests:
            if self.size > MAX_RAW and not self.answering:
                return self.refuse(413, f"the body takes more than {MAX_RAW} bytes; send the text in parts")
        elif self.size > MAX_HEAD // 2 and b"\n" not in self.first_line:
            return self.refuse(414, f"the address has more than {MAX_HEAD // 2} bytes")
        elif self.size > MAX_HEAD:
            return self.refuse(431, f"the request has more than {MAX_HEAD} bytes before its body")
        if self.ahead and not (self.answering or self.full):
            piece = bytes(self.ahead[:PIECE])
            del self.ahead[:PIECE]
            self._feed(piece)
            return self._again()
        self._pause(len(self.ahead) > MAX_AHEAD)
        if self.client_ended and not self.answering and not self.ahead:
            self.close()

    def _feed(self, piece: bytes) -> None:
        if not self.requests:
            if self.size <= 0:
                self.first_line = piece.lstrip(b"\r\n")
            elif b"\n" not in self.first_line:
                self.first_line += piece
            if self.deadline is None:
                self._wait(self.header_seconds, self._expired)
            if self.size < 0:  # the rest of a refused body: uvicorn drops it
                self.held -= len(piece)
                self.guard.release(len(piece))
        self.size += len(piece)
        self.feeding = True
        self.http.data_received(piece)
        self.feeding = False
        if self.size > MAX_HEAD // 2:
            self._again()

    def _pause(self, pause: bool) -> None:
        if pause != self.paused and not self.client_ended:
            self.paused = pause
            (self.transport.pause_reading if pause else self.transport.resume_reading)()

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_waiting()
        self.deadline = self.loop.call_later(seconds, then)

    def _stop_waiting(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _release(self) -> None:
        self.guard.release(self.held)
        self.held = 0


class Guard:
    """All connections of a server. When there are too many, or they hold too many bytes, those that have waited longest
    give way; connections being answered stay.

    on_refused: called with the status of every refusal.
    """

    def __init__(self, max_connections: int, on_refused: Callable[[int], None] = lambda status: None):
        self.max_connections, self.refused = max_connections, on_refused
        self.held_bytes = 0
        self.connections: dict[Connection, None] = {}  # the longest wait first

    def add(self, connection: Connection) -> None:
        self.connections[connection] = None
        if len(self.connections) > self.max_connections:  # a sixteenth at once: the search is slow
            waiting = [each for each in self.connections if not each.stays]
            for each in waiting[: max(1, self.max_connections // 16)]:
                each.give_way()

    def waits(self, connection: Connection) -> None:
        """Move a connection to the end of the line."""
        if self.connections.pop(connection, self) is None:
            self.connections[connection] = None

    def remove(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        connection._release()

    def hold(self, size: int) -> None:
        self.held_bytes += size
        if self.held_bytes > HELD:
            for each in [each for each in self.connections if each.held and not each.stays]:
                each.give_way()
                if self.held_bytes <= HELD * 3 // 4:
                    break

    def release(self, size: int) -> None:
        self.held_bytes -= size

    def abort(self) -> None:
        """Abort all connections."""
        for connection in list(self.connections):
            connection.abort()


class Bounds:
    """Middleware: refuses heads with an error or an unknown coding, and keeps `Connection` informed."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        connection: Connection = scope["state"].pop(CONNECTION)
        fields: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            fields.setdefault(name, []).append(value)
        length = fields.get(b"content-length", [b"0"])[0]
        large = b"transfer-encoding" in fields or not length.isdigit() or int(length[:20]) > LINGER_BYTES
        complete = ended = False
        connection.begin()
        if length == b"0" and not large:
            complete = True
            connection.body_complete()

        async def received() -> Message:
            nonlocal complete
            message = await receive()
            if not complete and message["type"] == "http.request" and not message.get("more_body", False):
                complete = True
                connection.body_complete()
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                connection.started = True
                # A body too slow to wait for (408) may never come.
                connection.unread = not complete and (large or message["status"] == 408)
                if connection.unread or b"upgrade" in fields:
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                end()

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                connection.end(complete, 0 if complete or large else int(length))

        try:
            if wrong := _unfit(scope, fields):
                await error_answer(scope["path"], *wrong)(scope, received, sending)
            else:
                # Only the server cancels requests, when it ends: no fault, and no traceback.
                with contextlib.suppress(asyncio.CancelledError):
                    await self.app(scope, received, sending)
        finally:
            end()


def _unfit(scope: Scope, fields: dict[bytes, list[bytes]]) -> tuple[int, str] | None:
    """Find an error in a head: its length, its host (RFC 9112, 3.2), an unknown coding of the body (RFC 9110, 8.4;
    RFC 9112, 6.1)."""
    if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_HEAD // 2:
        return 414, f"the address has more than {MAX_HEAD // 2} bytes"
    version, hosts = scope["http_version"], len(fields.get(b"host", ()))
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return 400, f"Host: must be given once, and is {hosts} times"
    transfer, content = fields.get(b"transfer-encoding"), fields.get(b"content-encoding")
    if transfer and version == "1.0":
        return 400, "HTTP/1.0 has no Transfer-Encoding: give Content-Length"
    if transfer and [value.strip().lower() for value in transfer] != [b"chunked"]:
        return 501, "Transfer-Encoding: only chunked is known"
    if content and any(part.strip().lower() not in (b"", b"identity") for part in b",".join(content).split(b",")):
        return 415, "Content-Encoding: send the body as it is"
    return None


def allow_files(count: int) -> int:
    """Raise the process's limit of open files to `count` connections and `SPARE_FILES`, as far as the system permits.
    Returns how many connections may be open."""
    try:
        import resource
    except ImportError:  # Windows
        return count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return count
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # macOS says infinite and means less
        most = soft
    return max(8, most - SPARE_FILES)
