"""Gateway to the HTTP interface of a trackio server (0.43), named by TRACKIO_SERVER_URL, TRACKIO_WRITE_TOKEN and TRACKIO_PROJECT.

trackio's own client is not used: it answers before the server has a row, and hides failures. The server keeps a row once for each `log_id`.
"""

import json
import os
import urllib.error
from dataclasses import dataclass, field
from http.client import HTTPException
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
    """A trackio run with the job's uid as its id, so that a later process goes on with it.

    Attributes:
        num_known: rows that the server had when the run was opened. Rows arrive in the order of their numbers.
    """

    server: str
    token: str
    document: JobDocument
    project: str
    num_known: int = 0
    _config: dict[str, object] = field(default_factory=dict)
    _last: dict[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.server}/?project={quote(self.project)}"

    def log(self, number: int, row: MetricRow) -> None:
        config = settings(self.document) | ({DATA: row.data_digest} if row.data_digest else {})
        is_told = bool(self._config) and (config == self._config or not row.data_digest)
        self._last = self._entry(row)
        self._send({**self._last, "config": None if is_told else config})
        self._config = self._config if is_told else config

    def has(self, number: int, row: MetricRow) -> bool:
        if number < self.num_known:
            self._last = self._entry(row)
        return number < self.num_known

    def close(self, end: End | None) -> None:
        """Tell the end beside the last row, which the server has: it takes the settings, and no second row."""
        if end is not None and self._last:
            self._send({**self._last, "config": {**settings(self.document), **self._config, "end": end.value}})

    def _entry(self, row: MetricRow) -> dict[str, Any]:
        columns, samples = row.table
        table = [dict(zip(columns, one, strict=True)) for one in samples]
        values = {**row.values, **({"samples": {"_type": "trackio.table", "_value": table}} if table else {})}
        names = {"project": self.project, "run": str(self.document.ref), "run_id": self.document.uid}
        return {**names, "metrics": values, "step": row.finished, "log_id": f"{self.document.uid} {row.key}"}

    def _send(self, entry: dict[str, Any]) -> None:
        _ask(self.server, self.token, "bulk_log", {"logs": [entry], "hf_token": None})


def open_tracker(document: JobDocument, folder: Path) -> TrackioTracker:
    """Resume the job's run. Raises InvalidInput: server or token are missing; OSError: the server does not answer."""
    server, token = required()
    project = os.environ.get("TRACKIO_PROJECT", "marlaas")
    names = {"project": project, "run": str(document.ref), "run_id": document.uid}
    summary = _ask(server, token, "get_run_summary", names)
    return TrackioTracker(server, token, document, project, int(summary["num_logs"]))


def required() -> tuple[str, str]:
    """Return the server's URL and the token to write. Raises InvalidInput: one is missing, or the URL has a login."""
    parts = urlsplit(os.environ.get(SERVER, "").strip())
    token = os.environ.get(TOKEN, "").strip() or next(iter(parse_qs(parts.query).get("write_token", ())), "")
    if parts.scheme not in ("http", "https") or not token:
        raise InvalidInput(
            f"trackio needs {SERVER}, the URL with write_token that `trackio show` prints, or {SERVER} and {TOKEN}"
        )
    if "@" in parts.netloc:
        raise InvalidInput(f"trackio: {SERVER} has a login, which its server does not take; give the token only")
    return parts._replace(query="", fragment="").geturl().rstrip("/"), token


def _ask(server: str, token: str, name: str, given: object) -> Any:
    """Return the answer of a function of the server. Raises OSError, without the token in its text."""
    try:
        answer = post_json(
            f"{server}/api/{name}", json.dumps(given).encode(), _TIMEOUT_S, {"X-Trackio-Write-Token": token}
        )
        return json.loads(answer)["data"]
    except urllib.error.HTTPError as error:
        with error:
            text = f"answers {error.code}: {error.read(500).decode(errors='replace')}"
    except (OSError, HTTPException, ValueError, KeyError) as error:
        text = f"{type(error).__name__}: {error}"
    raise OSError(f"{server} {text}".replace(token, "***"))
