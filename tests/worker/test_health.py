"""Health checks and metrics over real HTTP; errors of devices sorted by their words, and the failures that jobs wait for."""

import asyncio
import builtins
import contextlib
import signal
import sys

import pytest
from tests.harness import WITHIN_S
from tests.tables import rows

from marlaas_api import health
from marlaas_api.blobs import BlobUnavailable
from marlaas_api.errors import InvalidInput
from marlaas_api.health import exposition
from marlaas_api.messages import ReplicaReport
from marlaas_api.names import JobRef
from marlaas_api.nats_server import EmbeddedNats
from marlaas_worker.devices import first_line, is_out_of_memory, says_lost
from marlaas_worker.health import families, health_server
from marlaas_worker.metrics import Metrics, Sample, of_report
from marlaas_worker.waits import KEPT_S, SILENT_S, Waits

METRICS = rows(__file__, "metrics")


async def get(port, path, method="GET"):
    answer = await raw(port, f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


async def raw(port, request):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_worker_lives_before_it_is_ready_and_has_no_other_pages():
    """The endpoints run in the role's own event loop; a process that can do nothing more asks for its restart."""
    loops: list[asyncio.AbstractEventLoop] = []
    metrics = Metrics(alive=lambda: not loops.append(asyncio.get_running_loop()))  # type: ignore[func-returns-value]
    async with health_server(0, metrics) as port:
        assert await get(port, "/livez") == (200, "ok\n")
        assert loops == [asyncio.get_running_loop()]
        assert await get(port, "/readyz") == (503, "not ready\n")
        metrics.ready = lambda: True
        assert await get(port, "/readyz?verbose") == (200, "ok\n")
        assert await get(port, "/readyz", "HEAD") == (200, "")
        for path, method, status in (("/", "GET", 404), ("/secrets", "GET", 404), ("/livez", "POST", 405)):
            assert (await get(port, path, method))[0] == status
        with pytest.raises(InvalidInput, match=f"--health {port}: .*in use"):
            async with health_server(port, Metrics()):
                pass
    async with health_server(0, Metrics(alive=lambda: False)) as port:
        assert await get(port, "/livez") == (503, "not alive\n")


async def test_figures_are_those_of_the_moment_and_samples_of_one_name_stand_together():
    used = {"num_running": 1, "busy_s": 1.5, "wall_s": 60, "job_engine_s": {"u": 1.25, "old": 9}}
    report = ReplicaReport(role="trainer", pool="p", replica="t", **used)
    metrics = Metrics(samples=lambda: of_report(report, {"u": JobRef("team-a", "sums", "u")}))
    async with health_server(0, metrics) as port:
        status, page = await get(port, "/metrics")
        assert (status, [text for text in METRICS if f"{text}\n" not in page]) == (200, [])
        assert page.count("marlaas_trainer_job_seconds_total{") == 1, "a job that has no document is left out"
        report = report.model_copy(update={"busy_s": 2.5})
        assert "marlaas_trainer_busy_seconds_total 2.5\n" in (await get(port, "/metrics"))[1]
    labels = (("a", "x"), ("b", ""), ("a", 'q"\\\n'))
    samples = [Sample(name, "gauge", "Text.", 1, {"class": label}) for name, label in labels]
    assert exposition(families(samples)) == (
        '# HELP a Text.\n# TYPE a gauge\na{class="x"} 1.0\na{class="q\\"\\\\\\n"} 1.0\n'
        '# HELP b Text.\n# TYPE b gauge\nb{class=""} 1.0\n'
    )


async def test_what_is_no_request_is_refused_and_a_client_that_sends_no_complete_one_is_disconnected(monkeypatch):
    monkeypatch.setattr(health, "REQUEST_S", 0.5)
    async with health_server(0, Metrics()) as port:
        for sent in (b"hello\r\n\r\n", b"\xff\xff /livez HTTP/1.1\r\n\r\n", b"GET /" + b"x" * 16384):
            with contextlib.suppress(ConnectionResetError):
                assert (await raw(port, sent)).split()[1] == b"400"
            assert await get(port, "/livez") == (200, "ok\n")
        for sent in (b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n"):
            async with asyncio.timeout(10):
                assert await raw(port, sent) == b""


@contextlib.asynccontextmanager
async def orchestrator(url, folder, name):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "marlaas_worker", "orchestrator", "--nats", url, "--blobs", str(folder / "blobs")),
        *("--name", name, "--scratch", str(folder / name), "--health", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async for line in process.stderr:
            if b"health at port " in line:
                yield process, int(line.rsplit(b" ", 1)[1])
                break
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until(ask, is_so):
    async with asyncio.timeout(WITHIN_S):
        while not is_so(await ask()):  # noqa: ASYNC110 - of a process, nobody tells
            await asyncio.sleep(0.1)


async def answers(port, status):
    await until(lambda: get(port, "/readyz"), lambda answer: answer[0] == status)


async def led_by(*ports):
    return [port for port in ports if "marlaas_orchestrator_leads 1.0\n" in (await get(port, "/metrics"))[1]]


@pytest.mark.processes
async def test_a_leader_and_its_standby_are_ready_until_the_bus_goes(tmp_path):
    async with (
        EmbeddedNats(tmp_path / "nats") as server,
        orchestrator(server.url, tmp_path, "one") as (_, first),
        orchestrator(server.url, tmp_path, "two") as (process, second),
    ):
        for port in (first, second):
            await answers(port, 200)
        await until(lambda: led_by(first, second), lambda leaders: len(leaders) == 1)
        assert "marlaas_bus_connected 1.0\n" in (await get(first, "/metrics"))[1]
        await server.kill()
        await answers(second, 503)
        assert await get(second, "/livez") == (200, "ok\n")
        await server.start()
        await answers(second, 200)
        assert "marlaas_bus_breaks_total 1.0\n" in (await get(second, "/metrics"))[1]
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.parametrize(("error", "expected"), rows(__file__, "errors"))
def test_an_error_is_of_a_lost_device_of_memory_or_neither(error, expected):
    kind, *words = error
    error = getattr(builtins, kind)(*words)
    assert [says_lost(str(error)), is_out_of_memory(error)] == expected


def test_of_a_long_error_the_first_line_is_told():
    assert first_line(RuntimeError("CUDA error: unknown\nFor debugging ...")) == "RuntimeError: CUDA error: unknown"
    assert first_line(MemoryError()) == "MemoryError: no words"


async def test_calls_that_a_silent_store_lets_time_out_are_one_wait_since_the_first_one_began():
    now = [100.0]
    waits = Waits(lambda: now[0])
    for _ in range(3):
        with contextlib.suppress(BlobUnavailable):
            async with waits.watched("u", "write", "x"):
                now[0] += SILENT_S + 1 + 4 * KEPT_S
                assert waits.reported()["u"].since == 100.0
                raise BlobUnavailable("operation timed out")
        assert waits.reported()["u"].since == 100.0
        now[0] += KEPT_S / 2
