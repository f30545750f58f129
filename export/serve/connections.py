"""HTTP connections: uvicorn's, with bounds on what a stranger may send and on the time that it may take, and what they
share: how many there are, the bytes that are held for them, and whose place a new one takes.

    idle ----> head ----> body ----> answered ----> idle           closed after:
    idle_seconds, header_seconds, (app.py: body_seconds), WRITE_SECONDS without a reader

A head that is too long or too slow, and what is no HTTP, is answered here: JSON, as everywhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .answers import error_content

MAX_HEAD = 64 * 1024  # bytes of a request that are not its body
PIECE = 4 * 1024  # bytes that are parsed at once: so much more a head may have
FRAMING = 16  # bytes around each byte of a body that comes in tiny chunks
MAX_PIPELINE = 32  # requests that are read before the first is answered; the others wait to be read
WRITE_SECONDS = 30.0  # for a client that does not read
LINGER_SECONDS = 2.0  # in which what a client still sends is read, so that it sees why it was refused
LINGER_BYTES = 4 << 20
CODINGS = (b"transfer-encoding", b"content-encoding")

HELD = 64 << 20
"""Bytes of requests that are read or answered now, all together."""

SPARE_FILES = 128
"""Files that the process has open beside its connections."""


def unfit(headers: list[tuple[bytes, bytes]], version: str) -> tuple[int, str] | None:
    """Return (status, message) for a head that names no host, or several (RFC 9112, 3.2), and for a body in a coding
    that nobody here undoes (RFC 9110, 8.4; RFC 9112, 6.1): what it stands for is another text than its bytes."""
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return 400, f"Host: must be given once, and is {hosts} times"
    named = {
        name: [v.strip().lower() for n, value in headers if n == name for v in value.split(b",")] for name in CODINGS
    }
    transfer, content = (named[name] for name in CODINGS)
    if transfer and version == "1.0":
        return 400, "HTTP/1.0 has no Transfer-Encoding: give Content-Length"
    if transfer and transfer != [b"chunked"]:
        return 501, "Transfer-Encoding: only chunked is known"
    if any(coding not in (b"", b"identity") for coding in content):
        return 415, "Content-Encoding: send the body as it is"
    return None


OVERRIDDEN = (
    *("connection_made", "connection_lost", "eof_received", "data_received", "pause_writing", "resume_writing"),
    *("on_message_begin", "on_headers_complete", "on_body", "on_message_complete", "on_response_complete"),
    *("_start_asgi_task", "_unsupported_upgrade_warning", "_unset_keepalive_if_required", "send_400_response"),
)
"""Methods of uvicorn's that `Connection` replaces or calls; another version may have renamed those that are private."""


def missing_methods() -> list[str]:
    """Name the `OVERRIDDEN` that this uvicorn has not: with them gone, `Connection` would bound nothing."""
    return [name for name in OVERRIDDEN if not hasattr(HttpToolsProtocol, name)]


class Flow(FlowControl):
    """As uvicorn's, but nothing is read while what came before still waits to be parsed."""

    full = False

    def resume_reading(self) -> None:
        if not self.full:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """`guard`: shared by all; the other arguments are uvicorn's."""

    flow: Flow  # type: ignore[assignment]

    def __init__(self, guard: Guard, header_seconds: float, idle_seconds: float, **settings: Any):
        super().__init__(**settings)
        self.guard, self.header_seconds, self.idle_seconds = guard, header_seconds, idle_seconds
        self.held_bytes = 0
        self.url = b""  # of the request that came last
        self.unfit: tuple[int, str] | None = None  # what is wrong with a request's head
        self.answered: Any = None  # the request whose turn it is, of several that were sent at once
        self.waiting = b""  # bytes behind many requests: they are parsed when some of those are answered
        self.client_ended = False  # the client sends nothing more
        self.in_head = True
        self.incomplete = False  # a request has begun and not ended
        self.overhead = 0  # bytes since its beginning that are not its body
        self.dropped = 0  # bytes of a body since its request was answered
        self.left_over: int | None = None  # bytes that may yet come after the last request, and are dropped
        self.deadline: asyncio.TimerHandle | None = None
        self.write_deadline: asyncio.TimerHandle | None = None

    @property
    def stays(self) -> bool:
        return self.working or self.transport.is_closing()

    @property
    def working(self) -> bool:
        cycle = self.cycle
        return bool(self.pipeline or self.waiting) or (
            cycle is not None and not cycle.response_complete and not cycle.more_body
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        self._wait(self.header_seconds)
        self.guard.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answered is not None:  # uvicorn tells the last request of several alone
            self.answered.disconnected = True
            self.answered.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._cancel()
        if self.write_deadline is not None:
            self.write_deadline.cancel()
        self.release()
        self.guard.remove(self)

    def hold(self, size: int) -> None:
        """Keep `size` more bytes; others may have to give way for them."""
        self.held_bytes += size
        self.guard.hold(size)

    def release(self) -> None:
        self.guard.release(self.held_bytes)
        self.held_bytes = 0

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.answered = cycle
        super()._start_asgi_task(cycle, app)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether it stays open for what is still to be said: to one who has asked, and now only reads."""
        self.client_ended = True
        return bool(self.waiting) or self._answers_the_last()

    def _answers_the_last(self) -> bool:
        """Return whether a request is still to be answered to one who sends nothing more."""
        if self.working and not self.incomplete:
            self.cycle.keep_alive = False  # the last that was asked; closed after its answer
            return True
        return False

    def data_received(self, data: bytes) -> None:
        self.waiting += data
        self._read_on()

    def _read_on(self) -> None:
        """Parse what has come, until many requests wait for their answers; the rest then waits, and no more is read."""
        data, self.waiting = self.waiting, b""
        for first in range(0, len(data), PIECE):
            if self.transport.is_closing():
                return
            if len(self.pipeline) > MAX_PIPELINE:
                self.waiting = data[first:]
                self.hold(len(self.waiting))
                break
            piece = data[first : first + PIECE]
            if self.left_over is not None:
                self.left_over -= len(piece)
                if self.left_over < 0:
                    self._close()
                continue
            self.overhead += len(piece)
            answered = self.cycle is not None and self.cycle.response_complete
            if answered and self.incomplete and not self.in_head:  # the rest of a body that was refused
                self.dropped += len(piece)
                if self.dropped > LINGER_BYTES:
                    self._close()
            else:
                self.hold(len(piece))
                if self.left_over is not None or self.transport.is_closing():
                    return
            super().data_received(piece)
            if self.transport.is_closing() or self.left_over is not None:
                return
            if self.overhead > MAX_HEAD:
                self._refuse_head()
        self.flow.full = bool(self.waiting)
        if self.waiting:
            self.flow.pause_reading()
        elif self.client_ended and not self._answers_the_last():
            self._close()

    # Callbacks of the parser.
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.in_head = self.incomplete = True
        if not self.working:
            self._wait(self.header_seconds)

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        if reason := unfit(self.headers, self.parser.get_http_version()):
            self.unfit = reason
            raise ValueError(reason[1])  # the parser ends there, and `send_400_response` follows
        super().on_headers_complete()
        self.in_head = False
        self.overhead = 0
        self._cancel()

    def on_body(self, body: bytes) -> None:
        self.overhead = max(0, self.overhead - (1 + FRAMING) * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.incomplete, self.overhead = False, 0
        super().on_message_complete()
        if self.cycle.response_complete:
            self._idle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.release()
        if self.waiting and not self.transport.is_closing():
            self._read_on()
            self.flow.resume_reading()
        if self.transport.is_closing():
            self._abort_later()
        elif not self.working:
            if self.incomplete and not self.in_head:
                self.dropped = 0
                self._wait(LINGER_SECONDS)
            else:
                self._idle()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing of ours is spoken after an upgrade: the request is answered, and what follows is not read."""
        if self.cycle is not None:
            self.cycle.keep_alive = False
        self.left_over = LINGER_BYTES

    def send_400_response(self, msg: str) -> None:
        self.refuse(*(self.unfit or (400, msg.rstrip("."))))

    # Limits on a client that does nothing.
    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.write_deadline is not None and not self.transport.is_closing():
            self.write_deadline.cancel()
            self.write_deadline = None

    def give_way(self) -> None:
        if self.left_over is None and (self.held_bytes or self.cycle is None):
            self.refuse(503, "the server has no room for more connections; try again in 1 s", 1)
        else:
            self._close()

    def refuse(self, status: int, message: str, retry_after: int | None = None) -> None:
        """Answer in the application's place and read no more. Where an answer is on its way, only close."""
        cycle = self.cycle
        self.release()
        if self.pipeline or (cycle is not None and not cycle.response_complete and cycle.response_started):
            self._close()
            return
        if cycle is not None and not cycle.response_complete:  # its body is not complete: nobody is to be told more
            cycle.disconnected = True
            cycle.message_event.set()
        body = json.dumps(error_content(self.url.decode("latin-1"), status, message)).encode()
        head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "content-type: application/json"]
        head += [f"content-length: {len(body)}", "connection: close"]
        head += [f"retry-after: {retry_after}"] if retry_after else []
        self.transport.write("\r\n".join([*head, "\r\n"]).encode() + body)
        self.guard.refused(status)
        self.left_over = LINGER_BYTES
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._wait(LINGER_SECONDS)

    def _refuse_head(self) -> None:
        if self.incomplete and self.in_head and len(self.url) > MAX_HEAD // 2:
            self.refuse(414, f"the address has more than {MAX_HEAD // 2} bytes")
        else:
            self.refuse(431, f"the request has more than {MAX_HEAD} bytes beside its body")

    def _idle(self) -> None:
        self.guard.waits(self)
        self._wait(self.idle_seconds)

    def _wait(self, seconds: float) -> None:
        """Close the connection after `seconds` without a request."""
        self._cancel()
        self.deadline = self.loop.call_later(seconds, self._expired)

    def _cancel(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _expired(self) -> None:
        if self.incomplete and self.in_head and self.left_over is None:
            self.refuse(408, f"the request's head is not complete after {self.header_seconds:g} s")
        else:
            self._close()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        if self.write_deadline is None:
            self.write_deadline = self.loop.call_later(WRITE_SECONDS, self.transport.abort)


class Guard:
    """Counts work, not sockets: connections that only wait or send give way to new ones, the oldest first.

    refused: told the status of each answer that a connection gives by itself.
    """

    def __init__(self, max_connections: int, refused: Callable[[int], None] = lambda status: None):
        self.max_connections = max_connections
        self.refused = refused
        self.held_bytes = 0
        self.connections: dict[Connection, None] = {}  # who has waited for longest is first

    def add(self, connection: Connection) -> None:
        self.connections[connection] = None
        if len(self.connections) > self.max_connections:  # several at once, as finding them takes as long as one
            waiting = [one for one in self.connections if not one.stays]
            for one in waiting[: max(1, self.max_connections // 16)]:
                one.give_way()

    def waits(self, connection: Connection) -> None:
        """Put a connection behind all who wait already."""
        if self.connections.pop(connection, self) is None:
            self.connections[connection] = None

    def remove(self, connection: Connection) -> None:
        self.connections.pop(connection, None)

    def hold(self, size: int) -> None:
        """Count `size` more bytes that a connection keeps."""
        self.held_bytes += size
        if self.held_bytes > HELD:
            for one in [one for one in self.connections if one.held_bytes and not one.stays]:
                one.give_way()
                if self.held_bytes <= HELD * 3 // 4:
                    break

    def release(self, size: int) -> None:
        self.held_bytes -= size


def allow_files(count: int) -> int:
    """Let the process open so many files beside a few of its own, as far as the system permits; how many it may."""
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
    except (OSError, ValueError):  # macOS: an infinite limit is not meant so
        most = soft
    return max(8, most - SPARE_FILES)
