"""The few requests to an API server that the fixtures make themselves: JSON over one kept connection, and one more for each watch."""

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from marlaas_e2e.certificates import KeyPair

Object = Mapping[str, Any]
_WATCH_S = 300
"""Seconds after which the server ends a watch."""
_IDLE_S = 60.0
"""Seconds after which an idle connection is not used again. The server closes it after 90."""


class ApiError(Exception):
    """The API server refused, or could not be asked (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class ApiClient:
    """Not for use by two threads at once. After an error the next request connects anew."""

    def __init__(self, url: str, authority: str, client: KeyPair) -> None:
        self._address = urlsplit(url).netloc
        self._context = ssl.create_default_context(cafile=authority)
        self._context.load_cert_chain(client.certificate, client.key)
        self._connection: http.client.HTTPSConnection | None = None
        self._used_at = 0.0

    def get(self, path: str) -> Object:
        return self._object("GET", path)

    def watch(self, path: str, version: str) -> Iterator[Object]:
        """Events of a collection after a resource version, as the server sends them, on a connection of its own; ends when the server closes it.

        Raises ApiError.
        """
        connection = http.client.HTTPSConnection(self._address, context=self._context, timeout=2 * _WATCH_S)
        try:
            connection.request("GET", f"{path}?watch=1&resourceVersion={version}&timeoutSeconds={_WATCH_S}")
            response = connection.getresponse()
            if response.status >= 300:
                raise ApiError(response.status, response.read().decode(errors="replace")[:500])
            while line := response.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":  # a Status; 410: the version is too old
                    raise ApiError(int(event["object"].get("code", 0)), str(event["object"].get("message")))
                yield cast(Object, event)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ApiError(0, str(error)) from error
        finally:
            connection.close()

    def create(self, path: str, content: Object) -> Object:
        return self._object("POST", path, content)

    def delete(self, path: str) -> Object:
        return self._object("DELETE", path)

    def healthy(self, path: str = "/readyz") -> bool:
        try:
            return self._request("GET", path, None)[0] == 200
        except ApiError:
            return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _object(self, method: str, path: str, content: Object | None = None) -> Object:
        status, body = self._request(method, path, content)
        if status >= 300:
            raise ApiError(status, body.decode(errors="replace")[:500])
        return cast(Object, json.loads(body))

    def _request(self, method: str, path: str, content: Object | None) -> tuple[int, bytes]:
        body = None if content is None else json.dumps(content)
        try:
            if time.monotonic() - self._used_at > _IDLE_S:
                self.close()
            if self._connection is None:
                self._connection = http.client.HTTPSConnection(self._address, context=self._context, timeout=5)
            self._connection.request(method, path, body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            answer = response.read()
            self._used_at = time.monotonic()
            return response.status, answer
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ApiError(0, str(error)) from error
