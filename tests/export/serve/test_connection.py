"""What strangers may send and keep open is bounded, and everybody else is answered meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest
from combined import combined
from serving import Held, alone
from waiting import PATIENCE, until

from export.serve import connections
from export.serve.app import App
from export.serve.batching import Batcher
from export.serve.server import Server, listening
from export.settings import ServeSettings

HEAD = b"POST /translate HTTP/1.1\r\nHost: x\r\n"


@contextlib.contextmanager
def served(model, max_queue=64, before=lambda port: None, **settings):
    """A server on a port of its own, in a thread, patient unless it is told otherwise; what `before` sends is there
    when it begins. -> port, app"""
    chosen = ServeSettings(**{"header_seconds": PATIENCE, "idle_seconds": PATIENCE, "grace_seconds": 0, **settings})
    app = App(lambda: alone(model), Batcher(8, 0, max_queue), chosen)
    server = Server(app, chosen)
    listener = listening("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # of all connections: little is sent ahead
    port = listener.getsockname()[1]
    before(port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started and app.shared.loaded is not None)
        yield port, app
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()


def opened(port, first=b""):
    link = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    link.sendall(first)
    return link


def sent(link, *parts):
    """Send as much as is taken. -> status, body of the answer"""
    try:
        for part in parts:
            link.sendall(part)
    except OSError:  # refused meanwhile
        pass
    return answered(link)


def answered(link):
    answer = http.client.HTTPResponse(link)
    answer.begin()
    body = answer.read()
    if answer.status == 503:
        assert int(answer.headers["retry-after"]) >= 1
    return answer.status, json.loads(body)


def ended(link):
    """It was closed by the other side."""
    try:
        while link.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def health(port):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as link:
        link.request("GET", "/health")
        return link.getresponse().status


@pytest.fixture(scope="module")
def port(text_model):
    with served(text_model) as (port, _):
        yield port


def held(port):
    """Bytes that the server counts as held, those of this question among them."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as link:
        link.request("GET", "/metrics")
        text = link.getresponse().read().decode()
    return float(text.partition("\nmlx_transformer_held_bytes ")[2].split()[0])


def endless(part):
    return (part for _ in range(64 * 1024 * 1024 // len(part)))  # far more than is read


@pytest.mark.parametrize(
    ("first", "rest", "status", "message"),
    [
        (b"GET /", b"x" * 5000, 414, "the address has more than 32768 bytes"),
        (b"GET /?", b"x=1&" * 5000, 414, "the address has more"),
        (HEAD, b"X-Filler: 0123456789\r\n" * 100, 431, "more than 65536 bytes before its body"),
        (HEAD + b"X-Filler: ", b"y" * 5000, 431, "more than 65536 bytes before its body"),
        (HEAD, b"x" * 5000, 431, "more than 65536"),
        (b"", b"\r\n" * 2000, 431, "more than 65536"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"y" * 5000, 413, "the body takes more"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Trailer: 1\r\n" * 500, 413, "the body takes more"),
        (b"", b"\0" * 5000, 400, "Invalid HTTP request received"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"z" * 99, 400, "Invalid HTTP request received"),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", b"x" * 999, 400, "Invalid HTTP request received"),
    ],
    ids=["url", "query", "headers", "value", "name", "newlines", "chunk", "trailers", "zeros", "length", "no ascii"],
)
def test_an_endless_head_is_refused(port, first, rest, status, message):
    with opened(port, first) as link:
        found, body = sent(link, *endless(rest))
        assert found == status
        assert message in body["error"]
        assert ended(link)
    assert health(port) == 200
    until(lambda: held(port) < 500)


def test_long_but_bounded_heads_are_taken(port):
    with opened(port) as link:
        for _ in range(3):  # the count begins anew
            filler = b"X-Filler: " + b"y" * 15_000 + b"\r\n"
            body = b'{"text": "x"}'
            head = HEAD + filler * 3 + b"Content-Length: %d\r\n\r\n" % len(body)
            assert sent(link, head, body)[0] == 200


def test_a_body_in_tiny_chunks_is_taken(port, text_model):
    body = json.dumps({"text": ["one two"] * 40}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with opened(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n") as link:
        assert sent(link, chunks, b"0\r\n\r\n") == (200, {"translations": text_model.translate(["one two"] * 40)})


def test_a_large_body_is_refused_and_its_rest_not_kept(port):
    with opened(port, HEAD + b"Content-Length: 999999999999\r\n\r\n") as link:
        assert sent(link, b"x" * 1000)[0] == 413, "from its length"
        with contextlib.suppress(OSError):
            for part in endless(b"x" * 65536):
                link.sendall(part)
        assert ended(link)
    with opened(port) as link:  # one that is a little too large is read, and the connection goes on
        big = b"x" * 300_000
        assert sent(link, HEAD + b"Content-Length: %d\r\n\r\n" % len(big), big)[0] == 413
        body = b'{"text": "x"}'
        assert sent(link, HEAD + b"Content-Length: %d\r\n\r\n" % len(body), body)[0] == 200


def test_an_upgrade_is_answered_and_not_waited_for(port):
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with opened(port, upgrade) as link:
        assert answered(link)[0] == 200
        assert ended(link)


@pytest.fixture
def brief_lingering(monkeypatch):
    """Whoever is refused has read it at once."""
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.2)


@pytest.mark.usefixtures("brief_lingering")
def test_slow_clients_are_closed(text_model):
    """They have sent all that they will before the server looks: what is late isn't this test."""
    whole, links = b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", []

    def arrive(port):
        links.extend(opened(port, first) for first in (b"", HEAD, whole, HEAD))

    with served(text_model, before=arrive, header_seconds=0.3, idle_seconds=0.3) as (_, app):
        silent, half, used, dripping = links
        assert answered(used)[0] == 404
        with contextlib.suppress(OSError):
            for _ in range(round(PATIENCE / 0.02)):
                dripping.sendall(b"X-A: b\r\n")
                time.sleep(0.02)
        assert ended(silent)
        assert answered(half) == (408, {"error": "the request's head is not complete after 0.3 s"})
        for link in (half, used, dripping):
            assert ended(link)
            link.close()
        silent.close()
        assert 'refused_heads_total{status="408"} 2.0' in app.metrics.text().decode()


@pytest.mark.usefixtures("brief_lingering")
def test_a_slow_body_is_not_waited_for(text_model):
    half = HEAD + b"Content-Length: 50\r\n\r\n{"
    with served(text_model, body_seconds=0.3) as (port, _), opened(port, half) as slow:
        status, body = answered(slow)
        assert (status, "not complete after 0.3 s" in body["error"]) == (408, True)
        assert ended(slow)


def test_idle_connections_give_way(text_model):
    """Three times as many as are allowed: the newest are there, health is answered, and so is who was taken."""
    held = Held(text_model)
    with served(held, max_connections=40) as (port, app), contextlib.ExitStack() as stack:
        body = b'{"text": "x"}'
        working = stack.enter_context(opened(port, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body))
        until(lambda: app.batcher.running == 1)
        links = []
        for i in range(120):
            links.append(stack.enter_context(opened(port, HEAD if i % 2 else b"")))
            if i % 20 == 0:
                assert health(port) == 200
        assert health(port) == 200
        assert answered(links[0])[0] == 503
        assert ended(links[0])
        held.go.set()
        assert answered(working) == (200, {"translations": text_model.translate(["x"])})
        last = links[-2]
        assert sent(last, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")[0] == 200


def test_what_is_held_for_all_is_bounded(text_model, monkeypatch):
    """Many send large bodies and don't end: the oldest are told that there is no room."""
    monkeypatch.setattr(connections, "HELD", 400_000)
    start = HEAD + b"Content-Length: 200000\r\n\r\n" + b"x" * 100_000
    with served(text_model) as (port, _), contextlib.ExitStack() as stack:
        links = [stack.enter_context(opened(port, start)) for _ in range(8)]
        assert answered(links[0])[0] == 503
        body = b'{"text": "x"}'
        last = stack.enter_context(opened(port))
        assert sent(last, HEAD + b"Content-Length: %d\r\n\r\n" % len(body), body)[0] == 200


def test_who_does_not_read_is_dropped(text_model, monkeypatch):
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.3)
    with served(text_model) as (port, app), socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(PATIENCE)
        link.connect(("127.0.0.1", port))
        with contextlib.suppress(OSError):
            link.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 300)
        assert link.recv(4) == b"HTTP"
        until(lambda: "mlx_transformer_connections 0.0" in app.metrics.text().decode())
        assert ended(link)


def answers(link, count):
    """(status, body) of so many answers to what was sent at once."""
    with link.makefile("rb") as stream:
        for _ in range(count):
            status = int(stream.readline().split()[1])
            fields = dict(line.strip().lower().split(b": ", 1) for line in iter(stream.readline, b"\r\n"))
            yield status, json.loads(stream.read(int(fields[b"content-length"])))


@pytest.mark.fast("150-False")
@pytest.mark.parametrize(("count", "half_closed"), combined([150, 300], [False, True]))
def test_many_requests_at_once_on_a_connection_are_answered_in_order(text_model, count, half_closed):
    held, texts = Held(text_model), ["", "x", "one two"]

    def request(i):
        body = json.dumps({"text": texts[i % 3], "max_new_tokens": 4}).encode()
        return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def send(link):  # whose sender waits while nobody reads
        link.sendall(b"".join(map(request, range(1, count))))
        if half_closed:
            link.shutdown(socket.SHUT_WR)

    with served(held) as (port, app), opened(port, request(1)) as link:
        until(lambda: app.batcher.running == 1)
        sender = threading.Thread(target=send, args=(link,))
        sender.start()
        assert health(port) == 200
        held.go.set()
        expected = [{"translations": text_model.translate([text], max_new_tokens=4)} for text in texts]
        assert len(set(map(str, expected))) == 3, "there is something to mix up"
        found = list(answers(link, count))
        assert found == [(200, expected[i % 3]) for i in (1, *range(1, count))]
        sender.join(PATIENCE)
        if half_closed:
            assert ended(link)
        else:
            assert sent(link, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")[0] == 200


@pytest.mark.parametrize(
    ("version", "fields", "status", "message"),
    [
        ("1.1", "Transfer-Encoding: gzip, chunked", 501, "only chunked is known"),
        ("1.1", "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked", 501, "only chunked is known"),
        ("1.1", "Content-Encoding: gzip\r\nContent-Length: 3", 415, "send the body as it is"),
        ("1.0", "Transfer-Encoding: chunked", 400, "HTTP/1.0 has no Transfer-Encoding"),
    ],
)
def test_a_coded_body_is_refused_not_read_as_it_is(port, version, fields, status, message):
    body = json.dumps({"text": "one"}).encode()
    for path in ("/translate", "/v1/completions"):
        head = f"POST {path} HTTP/{version}\r\nHost: x\r\n{fields}\r\n\r\n".encode()
        with opened(port) as link:
            found, said = sent(
                link, head + (b"" if b"Length" in head else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            )
        error = said["error"]["message"] if path.startswith("/v1/") else said["error"]
        assert (found, message in error) == (status, True)


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 0, 400), ("1.1", 2, 400), ("1.0", 2, 400), ("1.1", 1, 200), ("1.0", 0, 200)],
)
def test_a_request_names_one_host(port, version, hosts, status):
    with opened(port) as link:
        found, said = sent(link, b"GET /health HTTP/%s\r\n%s\r\n" % (version.encode(), b"Host: x\r\n" * hosts))
    assert found == status
    if status == 400:
        assert said == {"error": f"Host: must be given once, and is {hosts} times"}


def test_who_has_said_all_still_reads_the_answer(port):
    """`nc`, and whatever closes its half of the connection behind the request."""
    body = json.dumps({"text": "one"}).encode()
    with opened(port) as link:
        link.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        link.shutdown(socket.SHUT_WR)
        assert answered(link)[0] == 200
        assert ended(link)
