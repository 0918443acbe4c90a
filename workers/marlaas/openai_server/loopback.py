"""HTTP server on 127.0.0.1: one accepting thread, and one thread per connection.

It handles routes, keys and bodies; completions are the backend's. It stops quickly and leaves no threads, because
episodes are many and may take milliseconds. `http.server.ThreadingHTTPServer` does neither: its `shutdown` waits for the
next poll, up to half a second (python/cpython#88932), and it cannot close a client's idle connection, so that its
thread would stay.
"""

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol

from marlaas.openai_server.answers import Answer
from marlaas.openai_server.chat_request import ChatRequest, RequestError

MAX_BODY_BYTES = 4 << 20
_BACKLOG = 128


class Backend(Protocol):
    """Handler of the server's requests."""

    @property
    def models(self) -> tuple[str, ...]: ...

    def allows(self, authorization: str | None) -> bool: ...

    def complete(self, body: object) -> tuple[ChatRequest, Answer]:
        """Answer a request. Raises RequestError."""
        ...


class Loopback:
    """HTTP server that runs from its creation until `close`. `port` is a free port chosen at creation."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._closing = False
        self._open: dict[threading.Thread, socket.socket] = {}
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, name="openai server", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop the server after the running requests have been answered."""
        self._closing = True
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()  # wakes the accepting thread
        self._accepting.join()
        self._listener.close()
        with self._lock:
            connections, threads = list(self._open.values()), list(self._threads)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        for thread in threads:  # also those that have closed their connection and are about to end
            thread.join()

    def _accept(self) -> None:
        while not self._closing:
            with contextlib.suppress(OSError):
                connection, address = self._listener.accept()
                self._begin(connection, address)

    def _begin(self, connection: socket.socket, address: Any) -> None:
        if self._closing:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        thread = threading.Thread(target=self._serve, args=(connection, address), name="openai client", daemon=True)
        with self._lock:
            self._open[thread] = connection
        thread.start()
        self._threads = {one for one in self._threads if one.is_alive()} | {thread}

    def _serve(self, connection: socket.socket, address: Any) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                _Handler(connection, address, self)  # type: ignore[arg-type]  # it is given back as `self.server`, no more
        finally:
            with self._lock:
                del self._open[threading.current_thread()]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Loopback  # type: ignore[assignment]

    def do_GET(self) -> None:
        try:
            self._check_key()
            self._answer(200, _listed(self.server.backend.models, self.path))
        except RequestError as refusal:
            self._answer(refusal.status, refusal.body)

    def do_POST(self) -> None:
        try:
            body = self._body()
            self._check_key()
            if self.path != "/v1/chat/completions":
                raise _unknown(self.path)
            asked, answer = self.server.backend.complete(body)
        except RequestError as refusal:
            self._answer(refusal.status, refusal.body)
        except Exception as error:  # the client needs an answer to any error
            broken = RequestError(f"{type(error).__name__}: {error}", status=500, code="broken")
            self._answer(broken.status, broken.body)
        else:
            if asked.streams:
                self._send(200, "text/event-stream", answer.events(asked.streams_usage))
            else:
                self._answer(200, answer.body())

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: requests are not logged."""

    def _check_key(self) -> None:
        if not self.server.backend.allows(self.headers.get("Authorization")):
            raise RequestError("the API key is not this episode's (server.api_key)", status=401, code="invalid_api_key")

    def _body(self) -> object:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            self.close_connection = True
            raise RequestError("the request has no Content-Length", status=411, code="no_length") from None
        if not 0 <= length <= MAX_BODY_BYTES:
            self.close_connection = True
            raise RequestError(
                f"the request has {length} bytes; at most {MAX_BODY_BYTES} are allowed", status=413, code="too_large"
            )
        try:
            return json.loads(self.rfile.read(length))
        except ValueError as error:
            raise RequestError(f"the request body is not JSON: {error}") from None

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if status != 200:
            self.send_header("x-should-retry", "false")  # a retry would be another turn
        self.end_headers()
        self.wfile.write(data)


def _listed(names: tuple[str, ...], path: str) -> dict[str, Any]:
    models = {name: {"id": name, "object": "model", "created": 0, "owned_by": "marlaas"} for name in names}
    if path == "/v1/models":
        return {"object": "list", "data": list(models.values())}
    prefix, _, name = path.rpartition("/")
    if prefix != "/v1/models" or name not in models:
        raise _unknown(path)
    return models[name]


def _unknown(path: str) -> RequestError:
    return RequestError(
        f"{path} does not exist; this server has only /v1/chat/completions and /v1/models", status=404, code="not_found"
    )
