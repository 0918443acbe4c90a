"""The whole operator between the fakes, in corners: versions that differ, clocks that are set back, objects that go or come again unexpectedly."""

import asyncio

import ormsgpack
import pytest
from tests.operator.objects import job, pool
from tests.operator.real.orchestrators import ADMITTED
from tests.operator.shell.harness import ONE, ServiceHarness, playing, queued_job

from marlaas_api import subjects
from marlaas_api.errors import MarlaasError
from marlaas_api.wire import SCHEMA_VERSION
from marlaas_operator import watching
from marlaas_operator.cluster import Forbidden, NotFound, Target
from marlaas_operator.cluster.resources import DEPLOYMENTS, PODS
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy
monotonic = virtual_time.monotonic
pytestmark = pytest.mark.usefixtures("monotonic")

SANDBOX = Target(DEPLOYMENTS, "team-a", "one-sandbox")


async def test_what_a_newer_orchestrator_says_takes_no_sandbox_away() -> None:
    harness = ServiceHarness()
    async with queued_job(harness) as orchestrator:
        await orchestrator.say("team-a", "one", **ADMITTED)
        await harness.until(lambda: SANDBOX in harness.cluster._objects, "its sandbox")
        key = subjects.job_key("team-a", "one")
        newer = ormsgpack.packb({"v": SCHEMA_VERSION + 1, "t": "Progress", "d": {}})
        await (await harness.server.connect("newer").bucket(subjects.PROGRESS)).put(key, newer)
        for _ in range(2):
            await harness.service.documents._progress.refresh()
        assert (harness.service.documents.progress(key), harness.service.documents.has_progress(key)) == (None, True)
        before = harness.status()
        await harness.service._reconciler(ONE)
        assert SANDBOX in harness.cluster._objects
        assert harness.status() == before


async def test_a_job_that_goes_before_it_has_our_finalizer_leaves_no_document() -> None:
    harness = ServiceHarness()
    await harness.cluster.create(pool("tiny"))

    def vanish(verb: str, target: Target) -> None:
        if verb == "patch" and target == ONE:
            harness.cluster._objects.pop(ONE, None)

    harness.cluster.fail = vanish
    async with playing(harness) as orchestrator:
        await harness.until(lambda: bool(harness.cluster._objects), "the pool is there")
        await harness.cluster.create(job("team-a", "one", "tiny"))
        await harness.until(lambda: ("get", ONE) in harness.cluster.calls, "looked at again")
        await harness.cluster.create(job("team-a", "two", "tiny"))
        await harness.until(lambda: harness.status(Target(ONE.resource, "team-a", "two")) != {}, "the next one is told")
        assert set(orchestrator.documents) == {"team-a.two"}
        assert harness.service.cache.get(ONE) is None


async def test_a_list_that_is_refused_for_a_moment_does_not_end_an_operator_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "_SOON_S", 0.01)
    harness = ServiceHarness()
    refused = asyncio.Event()
    answers: list[MarlaasError] = [Forbidden("cannot list"), NotFound("no such kind")]

    def fail(verb: str, target: Target) -> MarlaasError | None:
        if verb != "list" or not answers:
            return None
        error = answers.pop()
        if not answers:
            refused.set()
        return error

    async with playing(harness):
        async with asyncio.timeout(20):
            await harness.service.resync.synced.wait()
        harness.cluster.fail = fail
        harness.service.resync.request(PODS)
        async with asyncio.timeout(20):
            await refused.wait()
        await harness.cluster.create(pool("tiny"))
        await harness.cluster.create(job("team-a", "one", "tiny"))
        await harness.until(lambda: harness.status().get("phase") == "Queued", "queued")


async def test_two_operators_at_once_tell_everything_once_and_leave_nothing() -> None:
    """A node that is drained lets its operator end while the next one has begun."""
    harness = ServiceHarness()
    other = ServiceHarness(harness)
    await harness.cluster.create(pool("tiny"))
    await harness.cluster.create(job("team-a", "one", "tiny"))
    async with playing(harness) as orchestrator, asyncio.TaskGroup() as tasks:
        tasks.create_task(other.service.run(other.stop))
        await harness.until(lambda: harness.status().get("phase") == "Queued", "queued")
        await orchestrator.say("team-a", "one", **ADMITTED)
        await harness.until(lambda: SANDBOX in harness.cluster._objects, "its sandbox")
        await harness.until(lambda: harness.status().get("phase") == "Running", "running")
        await harness.cluster.delete(ONE)
        await harness.until(lambda: ONE not in harness.cluster._objects, "gone")
        other.stop.set()
    left = [target for target in harness.cluster._objects if target.namespace == "team-a"]
    told = [harness.cluster._objects[target]["reason"] for target in left]
    assert sorted(told) == ["Admitted", "Deleting"]
    outcomes = {outcome for one in (harness, other) for _, outcome in one.service.metrics.reconciles}
    assert outcomes <= {"ok", "Conflict", "AlreadyExists", "Stale"}
