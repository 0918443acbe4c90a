"""Whatever the API server answers, and whatever happens to its connections: the operator gets there, without a hot loop."""

from collections.abc import Callable

import pytest
from aiohttp import web
from tests.operator.objects import job
from tests.operator.real.harness import SANDBOX, OperatorHarness, eventually
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator
from tests.operator.real.proxy import GONE, RESET, SILENT, Fault, Proxy, answer, is_watch

from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import DEPLOYMENTS


def any_write(request: web.Request) -> bool:
    return request.method == "PATCH"


def sandbox_apply(request: web.Request) -> bool:
    return request.method == "PATCH" and "/deployments/" in request.path


def anything(request: web.Request) -> bool:
    return True


def jobs_watch(request: web.Request) -> bool:
    return is_watch(request) and request.path.endswith("/rljobs")


async def is_refused(harness: OperatorHarness) -> bool:
    return (await harness.status("team-a", "one")).get("reason") == "PodRefused"


async def struck(harness: OperatorHarness, proxy: Proxy, times: int) -> None:
    """Wait until the fault has happened so many times."""
    await eventually(harness, f"the fault has struck {times} times", lambda: proxy.faults == times)


@pytest.mark.parametrize(
    ("fault", "times", "matches"),
    [
        pytest.param(answer(409, "Conflict"), 6, any_write, id="409 on writes"),
        pytest.param(answer(422, "Invalid"), 1, sandbox_apply, id="422 on the Deployment"),
        pytest.param(answer(429, "TooManyRequests", Retry_After="1"), 4, any_write, id="429 on writes"),
        pytest.param(answer(500, "InternalError"), 6, any_write, id="500 on writes"),
        pytest.param(answer(503, "ServiceUnavailable"), 12, anything, id="503 on everything"),
        pytest.param(RESET, 6, any_write, id="reset on writes"),
        pytest.param(RESET, 12, anything, id="reset on everything"),
        pytest.param(GONE, 10, is_watch, id="410 on watches"),
        pytest.param(answer(500, "InternalError"), 10, is_watch, id="500 on watches"),
        pytest.param(RESET, 10, is_watch, id="reset on watches"),
        pytest.param(answer(401, "Unauthorized"), 12, anything, id="401 on everything"),
        pytest.param(answer(403, "Forbidden"), 5, is_watch, id="403 on watches"),
    ],
)
@pytest.mark.slow
async def test_a_fault_passes(
    harness: OperatorHarness,
    proxy: Proxy,
    orchestrator: ScriptedOrchestrator,
    fault: Fault,
    times: int,
    matches: Callable[[web.Request], bool],
) -> None:
    proxy.times(times, fault, matches)
    await harness.run_job(orchestrator, kubeconfig=proxy.kubeconfig(harness.folder), variant="hasty")
    await eventually(
        harness, "the sandbox is there", lambda: harness.owned("team-a"), 90.0, accept=lambda it: set(it) == SANDBOX
    )
    # The operator lists at its start, so the job may run before the first watch.
    await struck(harness, proxy, times)
    await harness.gateway.create(job("team-a", "two", "tiny"))
    await harness.phase("team-a", "two", "Queued")
    assert harness.started[-1].alive
    assert proxy.requests < 150 + 3 * times


@pytest.mark.slow
async def test_a_lasting_refusal_is_reported_and_not_retried_in_a_hot_loop(
    harness: OperatorHarness, proxy: Proxy, orchestrator: ScriptedOrchestrator
) -> None:
    proxy.times(1_000_000, answer(422, "Invalid"), sandbox_apply)
    await harness.queue_job(kubeconfig=proxy.kubeconfig(harness.folder))
    await orchestrator.say("team-a", "one", **ADMITTED)
    await eventually(harness, "the refusal is reported", lambda: is_refused(harness))
    assert "injected" in (await harness.status("team-a", "one"))["message"]
    assert proxy.faults <= 2
    assert await harness.get(Target(DEPLOYMENTS, "team-a", "one-sandbox")) is None


@pytest.mark.slow
async def test_a_lasting_error_is_reported_with_the_servers_message_until_it_ends(
    harness: OperatorHarness, proxy: Proxy, orchestrator: ScriptedOrchestrator
) -> None:
    proxy.times(1_000_000, answer(500, "InternalError"), sandbox_apply)
    await harness.run_job(orchestrator, kubeconfig=proxy.kubeconfig(harness.folder), variant="hasty")
    await eventually(harness, "the error is reported", lambda: is_refused(harness))
    assert "injected" in (await harness.status("team-a", "one"))["message"]
    proxy.decide = lambda request: None
    await harness.owns(4)
    await eventually(harness, "nothing is wrong any more", lambda: is_refused(harness), accept=lambda wrong: not wrong)


@pytest.mark.slow
async def test_a_watch_that_silently_died_is_noticed(
    harness: OperatorHarness, proxy: Proxy, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.queue_job(kubeconfig=proxy.kubeconfig(harness.folder), watch_s=3)
    proxy.times(1, SILENT, jobs_watch)
    await struck(harness, proxy, 1)
    await harness.gateway.create(job("team-a", "two", "tiny"))
    await harness.phase("team-a", "two", "Queued")


@pytest.mark.slow
async def test_an_api_server_that_was_killed_is_waited_for(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.queue_job()
    harness.plane.kill_apiserver()
    await orchestrator.say("team-a", "one", **ADMITTED)
    harness.plane.start_apiserver()
    await harness.phase("team-a", "one", "Running")
    await harness.gateway.create(job("team-a", "two", "tiny"))
    await harness.phase("team-a", "two", "Queued")
