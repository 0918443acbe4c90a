"""A real trackio server over HTTP that does what it is asked and then loses the answer."""

import asyncio
import json
import socket
import threading
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from tests.exporter.delivering import delivered
from tests.harness import a_progress, a_step, job_document

from marlaas.trackers.seam import MetricRow, require, row_of
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import EvalRecord, EvalSample

TOKEN = "a-token-of-hunter2"


class Lossy:
    """The server. lost: numbers of calls whose answer is lost after their effect. calls: how often it was told something."""

    def __init__(self, app, lost):
        self.app, self.lost, self.calls = app, lost, 0

    async def __call__(self, scope, receive, send):
        if not scope.get("path", "").endswith("/bulk_log"):
            await self.app(scope, receive, send)
            return
        self.calls += 1
        told = []
        await self.app(scope, receive, lambda message: _append(told, message))
        if self.calls in self.lost:
            told = [{"type": "http.response.start", "status": 504, "headers": []}, {"type": "http.response.body"}]
        for message in told:
            await send(message)


async def _append(told, message):
    told.append(message)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", TOKEN)
    from trackio.server import build_starlette_app_only

    lossy = Lossy(build_starlette_app_only()[0], {2, 5})
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(lossy, log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(running.serve([listener])))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.delenv("TRACKIO_WRITE_TOKEN")
    monkeypatch.setenv("TRACKIO_SERVER_URL", f"{url}/?write_token={TOKEN}")
    yield lossy, url
    running.should_exit = True
    thread.join()


@pytest.mark.slow
def test_every_row_is_kept_once_although_answers_are_lost_and_exporters_are_killed(server, tmp_path):
    lossy, url = server
    document = job_document(spec={"training": {"steps": 3}, "export": {"trackers": ["trackio"]}})
    steps = [row_of(a_step(document, n, version=n + 1, at=100.0 + n, reward_mean=0.25 * n)) for n in range(3)]
    names = {"namespace": document.namespace, "job": document.job, "uid": document.uid}
    sample = EvalSample(suite="", index=3, prompt="reverse: ab", reply="ba", reward=1.0)
    record = EvalRecord(**names, step=0, version=0, at=99.0, reward_mean=0.5, num_episodes=1, samples=(sample,))
    rows: tuple[MetricRow, ...] = (row_of(record), *steps)
    end = a_progress(document, phase="Succeeded", step=3, steps=3)
    looks = ((1, False), (3, False), (3, True), (4, False), (4, True), (4, False))
    destination, failures = delivered("trackio", document, rows, end, tmp_path, looks)
    assert [one.partition("answers ")[2] for one in failures] == ["504:", "504:"]
    assert lossy.calls == len(rows) + 2, "each row once, and the end twice, with the last row"
    assert urlsplit(destination.url or url).netloc == urlsplit(url).netloc
    assert "hunter2" not in str((failures, destination.url))

    def ask(name, **given):
        given |= {"project": "marlaas", "run": "team-a/sums", "run_id": document.uid}
        return httpx.post(f"{url}/api/{name}", json=given).raise_for_status().json()["data"]

    logs = ask("get_logs")
    assert [(one["step"], one.get("reward/train"), one.get("reward/held_out")) for one in logs] == [
        (0, None, 0.5),
        *((n + 1, 0.25 * n, None) for n in range(3)),
    ]
    assert json.dumps(logs[0]["samples"]).count("reverse: ab") == 1
    config = ask("get_run_summary")["config"]
    assert (config["training.steps"], config["end"]) == (3, "succeeded")


def test_a_server_that_is_not_named_is_told_before_the_run(monkeypatch):
    monkeypatch.delenv("TRACKIO_WRITE_TOKEN", raising=False)
    told = "the URL with write_token that `trackio show` prints"
    for url, reason in (
        ("", told),
        ("http://127.0.0.1:1", told),
        ("http://a:hunter2@host/?write_token=t", "has a login"),
    ):
        monkeypatch.setenv("TRACKIO_SERVER_URL", url)
        with pytest.raises(InvalidInput, match=reason) as raised:
            require([job_document(spec={"export": {"trackers": ["trackio"]}})])
        assert "hunter2" not in str(raised.value)
