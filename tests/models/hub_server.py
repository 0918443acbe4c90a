"""A hub on 127.0.0.1 that speaks as much of the hub's protocol as fetching a model needs."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """One model, at one commit. private: to be read with this token alone."""

    daemon_threads = True

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.name, self.folder = name, folder
        self.private: str | None = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        path = self.path.partition("?")[0].removeprefix("/api/models").removeprefix(f"/{hub.name}/")
        kind, _, file = path.split("/", 2) if path.count("/") > 1 else (*path.split("/"), "")
        if hub.private and self.headers.get("Authorization") != f"Bearer {hub.private}":
            self._send(b"{}", {"X-Error-Code": "GatedRepo"}, 403)
        elif kind == "revision":
            self._send(json.dumps({"id": hub.name, "sha": COMMIT, "siblings": []}).encode())
        elif kind == "tree":
            files = {one.name: one.read_bytes() for one in sorted(hub.folder.iterdir())}
            entries = [{"path": name, "size": len(data), "oid": _oid(data)} for name, data in files.items()]
            self._send(json.dumps([{"type": "file", **entry} for entry in entries]).encode())
        else:
            data = (hub.folder / file).read_bytes()
            self._send(data, {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(data)}"'})

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
