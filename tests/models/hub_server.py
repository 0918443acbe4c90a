"""A hub on 127.0.0.1 that speaks as much of the hub's protocol as fetching a model needs, and refuses as it is told to."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40
REVISIONS = ("main", "v1", COMMIT)


class Hub(ThreadingHTTPServer):
    """One model. refusals: what the next questions about the model are answered with, (status, error code) each; codes as the hub's
    X-Error-Code has them. private: to be read with this token alone."""

    daemon_threads = True

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.name, self.folder = name, folder
        self.refusals: list[tuple[int, str]] = []
        self.private: str | None = None
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        if hub.refusals and path.startswith("/api/models/"):
            self._refuse(*hub.refusals.pop(0))
        elif not path.removeprefix("/api/models").startswith(f"/{hub.name}/"):
            self._refuse(401, "RepoNotFound")
        elif hub.private and self.headers.get("Authorization") != f"Bearer {hub.private}":
            self._refuse(403, "GatedRepo")
        else:
            self._answer(path)

    def _answer(self, path: str) -> None:
        parts = path.removeprefix("/api/models").removeprefix(f"/{self.server.name}/").split("/", 2)
        if parts[1] not in REVISIONS:
            self._refuse(404, "RevisionNotFound")
        elif parts[0] == "revision":
            self._send(json.dumps({"id": self.server.name, "sha": COMMIT, "siblings": []}).encode())
        elif parts[0] == "tree":
            self._send(json.dumps([self._entry(file) for file in sorted(self.server.folder.iterdir())]).encode())
        else:
            data = (self.server.folder / parts[2]).read_bytes()
            self._send(data, {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(data)}"'})

    def _entry(self, file: Path) -> dict[str, object]:
        return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _oid(file.read_bytes())}

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code} if code else {}, status)

    def _send(self, data: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        common = {"Content-Length": str(len(data)), "Content-Type": "application/json"}
        for name, value in (common | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def serving(name: str, folder: Path) -> Iterator[Hub]:
    """A hub that lives as long as the block."""
    with Hub(name, folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
