"""A Hub of a few repositories on this machine: what `huggingface_hub` asks for a model's facts and its files, and how
it sends them."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_that_may_write"


@contextmanager
def nobody() -> Iterator[str]:
    """An address at which nobody answers, kept from everybody else."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{kept.getsockname()[1]}"


@contextmanager
def hub(repositories: dict[str, Path], new: Path | None = None) -> Iterator[tuple[str, list[str]]]:
    """{name: folder} -> the address, and the files that were asked for, while the context lasts. Each has the branch
    main alone, at `COMMIT`. new: where who has `TOKEN` makes and fills repositories; "private" is a file of private
    ones."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self.facts("/".join(parts[2:4]), parts[5] if parts[4:5] == ["revision"] else "main", body)
            elif parts[2:3] == ["resolve"] and "/".join(parts[:2]) in repositories:
                self.file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)
            else:
                self.send(404, b"", {}, body)

        def facts(self, name: str, revision: str, body: bool) -> None:
            if name not in repositories:
                return self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)
            if revision not in ("main", COMMIT):
                return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
            files = sorted(path.relative_to(repositories[name]).as_posix() for path in repositories[name].rglob("*.*"))
            values = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            self.send(200, json.dumps(values).encode(), {"Content-Type": "application/json"}, body)

        def file(self, name: str, revision: str, file: str, body: bool) -> None:
            path = repositories[name] / file
            if revision not in ("main", COMMIT) or not path.is_file():
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body)
            if body:
                asked.append(file)
            data = path.read_bytes()
            self.send(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, body)

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}" or new is None:
                return self.send(401, b'{"error": "Invalid username or password."}', {}, body=True)
            values: dict = {}
            if parts == ["api", "repos", "create"]:
                values = self.create(json.loads(data), new)
            elif parts[4:] == ["preupload", "main"]:
                files = json.loads(data)["files"]
                how = {"uploadMode": "regular", "shouldIgnore": False}
                values = {"files": [{"path": file["path"], **how} for file in files]}
            elif parts[4:] == ["commit", "main"]:
                name = "/".join(parts[2:4])
                self.commit(repositories[name], [json.loads(line) for line in data.splitlines()])
                values = {"commitUrl": f"{self.address()}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
            self.send(200, json.dumps(values).encode(), {"Content-Type": "application/json"}, body=True)

        def create(self, asked_for: dict, place: Path) -> dict:
            name = f"{asked_for['organization']}/{asked_for['name']}"
            if name not in repositories:
                repositories[name] = place / name
                repositories[name].mkdir(parents=True)
                if asked_for.get("visibility") == "private" or asked_for.get("private"):
                    (place / name / "private").touch()
            return {"url": f"{self.address()}/{name}"}

        def commit(self, folder: Path, entries: list[dict]) -> None:
            for entry in entries:
                if entry["key"] == "file":
                    path = folder / entry["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(base64.b64decode(entry["value"]["content"]))

        def address(self) -> str:
            return f"http://127.0.0.1:{server.server_port}"

        def send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
