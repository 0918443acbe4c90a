"""What the API server refuses for ever is asked for more and more seldom, and everything else goes on meanwhile."""

import asyncio
from collections import Counter

import pytest
from aiohttp import web
from tests.operator.objects import job, pool
from tests.operator.real.harness import OperatorHarness, eventually
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator
from tests.operator.real.proxy import GONE, RESET, Fault, Proxy, answer, is_watch

LOOKED_AT_S = 4.0
MOST_ASKED = 16
"""For one thing within that time: waits double from a fraction of a second, so this is generous, and a hot loop asks hundreds of times."""
MOST_GONE = 12 * int(LOOKED_AT_S)
"""A watch that is told 410 begins anew from a fresh list, at most ten times a second; a server that has just listed has no reason to say it twice."""

REFUSALS = {
    "c409": answer(409, "Conflict"),
    "c422": answer(422, "Invalid"),
    "c403": answer(403, "Forbidden"),
    "c500": answer(500, "InternalError"),
    "reset": RESET,
}
PATIENCE = {"c429": answer(429, "TooManyRequests", Retry_After="1")}
"""By itself: who is asked for patience begins nothing else either."""
PLACES = {
    "status": "/rljobs/{}/status",
    "sandbox": "/deployments/{}-sandbox",
    "finalizer": "/rljobs/{}",
    "account": "/serviceaccounts/{}-sandbox",
}


async def for_a_while() -> None:
    """A slow machine only asks less within it."""
    await asyncio.sleep(LOOKED_AT_S)


@pytest.mark.slow
@pytest.mark.parametrize("refusals", [REFUSALS, PATIENCE], ids=["refused", "asked for patience"])
async def test_what_is_refused_for_ever_is_asked_for_seldom_and_others_do_not_wait(
    harness: OperatorHarness, proxy: Proxy, orchestrator: ScriptedOrchestrator, refusals: dict[str, Fault]
) -> None:
    refused = {
        path.format(f"{name}-{place}"): fault for name, fault in refusals.items() for place, path in PLACES.items()
    }
    asked: Counter[str] = Counter()

    def decide(request: web.Request) -> Fault | None:
        path = next((path for path in refused if request.path.endswith(path)), None)
        if request.method != "PATCH" or path is None:
            return None
        asked[path] += 1
        return refused[path]

    proxy.decide = decide
    await harness.gateway.create(pool("tiny"))
    names = [f"{name}-{place}" for name in refusals for place in PLACES]
    for name in names:
        await harness.gateway.create(job("team-a", name, "tiny"))
    harness.start_operator(kubeconfig=proxy.kubeconfig(harness.folder))
    for name in names:
        if name.endswith(("sandbox", "account")):
            await harness.phase("team-a", name, "Queued")
            await orchestrator.say("team-a", name, **ADMITTED)
    await eventually(harness, "everything that is refused was asked for", lambda: set(asked) == set(refused))
    asked.clear()
    await for_a_while()
    assert {path: times for path, times in asked.items() if times > MOST_ASKED} == {}
    await harness.gateway.create(job("team-a", "fine", "tiny"))
    await harness.phase("team-a", "fine", "Queued")
    await orchestrator.say("team-a", "fine", **ADMITTED)
    await harness.phase("team-a", "fine", "Running")
    assert harness.started[-1].alive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refusal", "most"),
    [pytest.param(answer(500, "InternalError"), MOST_ASKED, id="500"), pytest.param(GONE, MOST_GONE, id="410")],
)
async def test_a_watch_that_is_refused_for_ever_is_begun_seldom_and_is_there_again_afterwards(
    harness: OperatorHarness, proxy: Proxy, orchestrator: ScriptedOrchestrator, refusal: Fault, most: int
) -> None:
    proxy.times(1_000_000, refusal, lambda request: is_watch(request) and request.path.endswith("/rljobs"))
    await harness.queue_job(kubeconfig=proxy.kubeconfig(harness.folder))
    await eventually(harness, "the watch was refused", lambda: proxy.faults > 0)
    before, seen = proxy.faults, proxy.seen.copy()
    await for_a_while()
    assert proxy.faults - before <= most
    asked = proxy.seen - seen
    jobs = {what: asked.pop(what) for what in list(asked) if what[1].endswith("/rljobs")}
    assert sum(jobs.values()) <= 3 * most, jobs  # each watch follows a list
    assert {what: times for what, times in asked.items() if times > most} == {}
    proxy.decide = lambda request: None
    await harness.gateway.create(job("team-a", "two", "tiny"))
    await harness.phase("team-a", "two", "Queued")
