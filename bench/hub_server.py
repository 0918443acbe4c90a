"""As much of the Hugging Face hub as a download of a data set and an upload of an adapter ask for, and its failures; in memory, on 127.0.0.1."""

import base64
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from bench import loopback

COMMIT, TOKEN = "a" * 40, "hf_may_read"
_FILES = ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl")


def _row(name: str) -> bytes:
    return json.dumps({"question": name, "answer": "#### 2"}).encode()


@dataclass
class Hub:
    """One private data set, `acme/rows`, with two files of its split `train` and one of `test`; and any number of models of `acme`.

    failures: statuses of the next requests of a file, or of `commit`, by name; they go before the answer. asked: method and last part of each
    request's path. models: by repository, whether it is private, and its files.
    """

    files: dict[str, bytes] = field(default_factory=lambda: {name: _row(name) for name in _FILES})
    failures: dict[str, list[int]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    models: dict[str, tuple[bool, dict[str, bytes]]] = field(default_factory=dict)
    url: str = ""

    @property
    def constants(self) -> dict[str, object]:
        """Constants of a client of this hub, which its library reads from the environment when it is imported."""
        files = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        return {"ENDPOINT": self.url, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_OFFLINE": False}


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A hub."""
    hub = Hub()
    handler = type(
        "OneDataSet",
        (_Handler,),
        {"hub": hub, "do_GET": _Handler.serve, "do_HEAD": _Handler.serve, "do_POST": _Handler.take},
    )
    with loopback.serving(handler) as hub.url:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def serve(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        self.hub.asked.append(f"{self.command} {name}")
        status, content = self._answer(path, name)
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{name}-{len(content)}"')
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound" if "acme/rows" not in path else "RevisionNotFound")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def take(self) -> None:
        path, content = self.path, self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.asked.append(f"{self.command} {path}")
        status = 403 if self.headers.get("Authorization") != f"Bearer {TOKEN}" else 200
        failures = self.hub.failures.get("commit") if "/commit/" in path else None
        status = failures.pop(0) if failures else status
        answer = json.dumps(self._taken(path, content) if status == 200 else {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _taken(self, path: str, content: bytes) -> object:
        *_, owner, name = path.partition("/preupload/")[0].partition("/commit/")[0].split("/")
        repository = f"{owner}/{name}"
        if path == "/api/repos/create":
            asked = json.loads(content)
            repository = f"{asked['organization']}/{asked['name']}"
            self.hub.models.setdefault(repository, (asked["visibility"] == "private", {}))
            return {"url": f"{self.hub.url}/{repository}"}
        if "/preupload/" in path:
            files = json.loads(content)["files"]
            return {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]}
        if "/commit/" in path:
            lines = [json.loads(line) for line in content.splitlines()]
            written = {one["value"]["path"]: one["value"]["content"] for one in lines if one["key"] == "file"}
            self.hub.models[repository][1].update({key: base64.b64decode(text) for key, text in written.items()})
            return {"commitUrl": f"{self.hub.url}/{repository}/commit/{COMMIT}", "commitOid": COMMIT}
        return {}

    def _answer(self, path: str, name: str) -> tuple[int, bytes]:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401 if "Authorization" not in self.headers else 403, b""
        if self.hub.failures.get(name):
            return self.hub.failures[name].pop(0), b""
        if path in (f"/api/datasets/acme/rows/revision/{one}" for one in ("main", COMMIT)):
            listed = [{"rfilename": one} for one in self.hub.files]
            return 200, json.dumps({"id": "acme/rows", "sha": COMMIT, "siblings": listed}).encode()
        if path == f"/api/datasets/acme/rows/tree/{COMMIT}":
            files = self.hub.files.items()
            tree = [{"type": "file", "oid": one, "path": one, "size": len(content)} for one, content in files]
            return 200, json.dumps(tree).encode()
        if path.startswith(f"/datasets/acme/rows/resolve/{COMMIT}/"):
            return 200, self.hub.files[path.partition(f"{COMMIT}/")[2]]
        return 404, b""

    def log_message(self, *_: object) -> None:
        return
