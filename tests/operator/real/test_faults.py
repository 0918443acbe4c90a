"""Whatever the API server answers, and whatever happens to its connections: the operator gets there, without a hot loop."""

from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from tests.operator.real.harness import OperatorHarness, eventually, job, pool
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator
from tests.operator.real.proxy import GONE, RESET, SILENT, Fault, Proxy, answer, is_watch

from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import DEPLOYMENTS

SANDBOX = {"Deployment one-sandbox", "NetworkPolicy one-sandbox", "Secret one-sandbox", "ServiceAccount one-sandbox"}


@pytest.fixture
async def proxy(harness: OperatorHarness) -> AsyncIterator[Proxy]:
    async with Proxy(harness.plane).running() as proxy:
        yield proxy


def status_write(request: web.Request) -> bool:
    return request.method == "PATCH" and request.path.endswith("/status")


def any_write(request: web.Request) -> bool:
    return request.method == "PATCH"


def sandbox_apply(request: web.Request) -> bool:
    return request.method == "PATCH" and "/deployments/" in request.path


def anything(request: web.Request) -> bool:
    return True


def watches(request: web.Request) -> bool:
    return is_watch(request)


def jobs_watch(request: web.Request) -> bool:
    return is_watch(request) and request.path.endswith("/rljobs")


async def struck(harness: OperatorHarness, proxy: Proxy, times: int) -> None:
    """Wait until the fault has happened so many times."""

    async def look() -> bool:
        return proxy.faults == times

    await eventually(harness, f"the fault has struck {times} times", look)


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
        pytest.param(GONE, 10, watches, id="410 on watches"),
        pytest.param(answer(500, "InternalError"), 10, watches, id="500 on watches"),
        pytest.param(RESET, 10, watches, id="reset on watches"),
        pytest.param(answer(401, "Unauthorized"), 12, anything, id="401 on everything"),
        pytest.param(answer(403, "Forbidden"), 5, watches, id="403 on watches"),
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
    await harness.gateway.create(pool("tiny"))
    await harness.gateway.create(job("team-a", "one", "tiny"))
    proxy.times(times, fault, matches)
    harness.start_operator(kubeconfig=proxy.kubeconfig(harness.folder), variant="hasty")
    await harness.phase("team-a", "one", "Queued")
    await orchestrator.say("team-a", "one", **ADMITTED)
    await harness.phase("team-a", "one", "Running")

    async def has_sandbox() -> bool:
        return set(await harness.owned("team-a")) == SANDBOX

    await eventually(harness, "the sandbox is there", has_sandbox, 90.0)
    await struck(
        harness, proxy, times
    )  # the operator lists at its start: it may get so far before it has begun to watch
    await harness.gateway.create(job("team-a", "two", "tiny"))
    await harness.phase("team-a", "two", "Queued")
    assert harness.started[-1].alive
    assert proxy.requests < 150 + 3 * times


@pytest.mark.slow
async def test_a_refusal_that_stays_is_told_and_is_not_asked_for_again_and_again(
    harness: OperatorHarness, proxy: Proxy, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.gateway.create(pool("tiny"))
    await harness.gateway.create(job("team-a", "one", "tiny"))
    proxy.times(1_000_000, answer(422, "Invalid"), sandbox_apply)
    harness.start_operator(kubeconfig=proxy.kubeconfig(harness.folder))
    await harness.phase("team-a", "one", "Queued")
    await orchestrator.say("team-a", "one", **ADMITTED)

    async def told() -> bool:
        return (await harness.status("team-a", "one")).get("reason") == "PodRefused"

    await eventually(harness, "the refusal is told", told)
    assert "injected" in (await harness.status("team-a", "one"))["message"]
    assert proxy.faults <= 2
    assert await harness.get(Target(DEPLOYMENTS, "team-a", "one-sandbox")) is None


@pytest.mark.slow
async def test_a_trouble_that_lasts_is_told_in_the_servers_words_and_is_over_when_it_is(
    harness: OperatorHarness, proxy: Proxy, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.gateway.create(pool("tiny"))
    await harness.gateway.create(job("team-a", "one", "tiny"))
    proxy.times(1_000_000, answer(500, "InternalError"), sandbox_apply)
    harness.start_operator(kubeconfig=proxy.kubeconfig(harness.folder), variant="hasty")
    await harness.phase("team-a", "one", "Queued")
    await orchestrator.say("team-a", "one", **ADMITTED)
    await harness.phase("team-a", "one", "Running")

    async def told() -> bool:
        return (await harness.status("team-a", "one")).get("reason") == "PodRefused"

    await eventually(harness, "what keeps failing is told", told)
    assert "injected" in (await harness.status("team-a", "one"))["message"]
    proxy.decide = lambda request: None

    async def over() -> bool:
        return set(await harness.owned("team-a")) == SANDBOX and not await told()

    await eventually(harness, "the sandbox is there and nothing is wrong any more", over, 90.0)


@pytest.mark.slow
async def test_a_watch_that_silently_died_is_noticed(
    harness: OperatorHarness, proxy: Proxy, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.gateway.create(pool("tiny"))
    harness.start_operator(kubeconfig=proxy.kubeconfig(harness.folder), watch_s=3)
    await harness.gateway.create(job("team-a", "one", "tiny"))
    await harness.phase("team-a", "one", "Queued")
    proxy.times(1, SILENT, jobs_watch)
    await struck(harness, proxy, 1)
    await harness.gateway.create(job("team-a", "two", "tiny"))
    await harness.phase("team-a", "two", "Queued")


@pytest.mark.slow
async def test_an_api_server_that_was_killed_is_waited_for(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.gateway.create(pool("tiny"))
    harness.start_operator()
    await harness.gateway.create(job("team-a", "one", "tiny"))
    await harness.phase("team-a", "one", "Queued")
    harness.plane.kill_apiserver()
    await orchestrator.say("team-a", "one", **ADMITTED)
    harness.plane.start_apiserver()
    await harness.phase("team-a", "one", "Running")
    await harness.gateway.create(job("team-a", "two", "tiny"))
    await harness.phase("team-a", "two", "Queued")
