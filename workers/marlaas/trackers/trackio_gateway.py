"""Gateway to the HTTP interface of a trackio server (0.43), named by TRACKIO_SERVER_URL, TRACKIO_WRITE_TOKEN and TRACKIO_PROJECT.

trackio's own client is not used: it answers before the server has a row, and hides failures. The server keeps a row once for each `log_id`.
"""

import json
import os
import urllib.error
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from marlaas.http_post import post_json
from marlaas.trackers.seam import DATA, End, MetricRow, settings
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument

SERVER, TOKEN = "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN"
_TIMEOUT_S = 30.0


@dataclass(slots=True)
class TrackioTracker:
    """A trackio run with the job's uid as its id, so that a later process goes on with it."""

    server: str
    token: str
    document: JobDocument
    project: str
    _config: dict[str, object] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.server}/?project={quote(self.project)}"

    def log(self, number: int, row: MetricRow) -> None:
        config = settings(self.document) | ({DATA: row.data_digest} if row.data_digest else {})
        if self._config == config or (number and not row.data_digest):
            config = {}
        columns, samples = row.table
        table = [dict(zip(columns, one, strict=True)) for one in samples]
        values = {**row.values, **({"samples": {"_type": "trackio.table", "_value": table}} if table else {})}
        self._send(row.key, {"metrics": values, "step": row.finished, "config": config or None})
        self._config = config or self._config

    def _send(self, key: str, entry: dict[str, Any]) -> None:
        document = self.document
        names = {"project": self.project, "run": str(document.ref), "run_id": document.uid}
        body = json.dumps({"logs": [{**names, **entry, "log_id": f"{document.uid} {key}"}], "hf_token": None}).encode()
        try:
            post_json(f"{self.server}/api/bulk_log", body, _TIMEOUT_S, {"X-Trackio-Write-Token": self.token})
        except urllib.error.HTTPError as error:
            with error:
                raise OSError(
                    f"{self.server} answers {error.code}: {error.read(500).decode(errors='replace')}"
                ) from None

    def has(self, number: int, row: MetricRow) -> bool:
        return False  # what is sent again changes nothing

    def close(self, end: End | None) -> None:
        if end is not None:
            config = {**settings(self.document), **self._config, "end": end.value}
            self._send(f"end {end}", {"metrics": {}, "config": config})


def open_tracker(document: JobDocument, folder: Path) -> TrackioTracker:
    """Return the job's run. Raises InvalidInput: server or token are missing."""
    server, token = required()
    return TrackioTracker(server, token, document, os.environ.get("TRACKIO_PROJECT", "marlaas"))


def required() -> tuple[str, str]:
    """Return the server's URL and the token to write. Raises InvalidInput: one is missing."""
    parts = urlsplit(os.environ.get(SERVER, ""))
    token = os.environ.get(TOKEN) or next(iter(parse_qs(parts.query).get("write_token", ())), "")
    if parts.scheme not in ("http", "https") or not token:
        raise InvalidInput(
            f"trackio needs {SERVER}, the URL with write_token that `trackio show` prints, or {SERVER} and {TOKEN}"
        )
    return parts._replace(query="", fragment="").geturl().rstrip("/"), token
