"""The whole operator in one process, between the fakes of API server and bus: fast, for what needs no real server."""

import asyncio
import itertools
from collections import Counter

import pytest
from bench.operator_round import round_seconds
from tests.operator.objects import job, pool, tenant
from tests.operator.real.orchestrators import ADMITTED, SUCCEEDED, ScriptedOrchestrator
from tests.operator.shell.harness import ONE, ServiceHarness, in_time, playing, queued_job, running_job

from marlaas_api import subjects
from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.errors import InvalidInput, MarlaasError
from marlaas_api.wire import encode
from marlaas_operator import cluster, observe
from marlaas_operator.cluster import Invalid, Target
from marlaas_operator.cluster.resources import DEPLOYMENTS, RLJOBS
from tests import virtual_time

REFUSALS = {"c409": cluster.Conflict("no"), "c422": cluster.Invalid("no"), "c403": cluster.Forbidden("no")}
REFUSALS |= {"c500": cluster.Unavailable("no"), "silent": cluster.NoAnswer("no")}
PATIENCE: dict[str, MarlaasError] = {"c429": cluster.TooMany("no", 1.0)}
"""By itself: after this answer the operator begins nothing else either."""
PLACES = {"status": ("patch status", "rljobs", ""), "finalizer": ("patch", "rljobs", "")}
PLACES |= {"sandbox": ("apply", "deployments", "-sandbox"), "account": ("apply", "serviceaccounts", "-sandbox")}
REFUSED_FOR_S, MOST_ASKED = 600.0, 30
"""Waits double from a fraction of a second to a minute, and refused actions are tried every 30 s: a hot loop asks thousands of times."""
SANDBOX = cluster.Target(DEPLOYMENTS, "team-a", "one-sandbox")


@pytest.mark.parametrize(
    ("error", "words"),
    [(cluster.NotFound("no such kind"), r"kubectl apply -f crds/"), (cluster.Forbidden("cannot list"), "ClusterRole")],
)
async def test_what_only_a_person_can_mend_ends_the_start_with_a_sentence(error, words):
    harness = ServiceHarness()
    harness.cluster.fail = lambda verb, target: error if verb == "list" else None
    with pytest.raises(ExceptionGroup) as caught:
        await harness.service.run(harness.stop)
    (only,) = caught.value.exceptions
    assert isinstance(only, InvalidInput)
    assert words in str(only)


def in_team(verb: str, target: cluster.Target) -> bool:
    return verb == "apply" and target.namespace == "team-a"


async def test_what_was_refused_is_not_asked_for_at_the_pace_of_the_news():
    harness = ServiceHarness()
    harness.cluster.fail = lambda verb, target: cluster.Invalid("denied") if in_team(verb, target) else None
    async with queued_job(harness) as orchestrator:
        await orchestrator.say("team-a", "one", **ADMITTED)
        await harness.until(lambda: harness.status().get("reason") == "PodRefused", "told")
        for step in range(1, 5):
            await orchestrator.say("team-a", "one", **{**ADMITTED, "step": step, "message": f"step {step}"})
            harness.service.queue.add(ONE)
        await harness.until(lambda: harness.status().get("step") == 4, "figures")
    assert sum(in_team(verb, target) for verb, target in harness.cluster.calls) == 1


@pytest.mark.parametrize("error", [BusRefused("payload too large"), BusUnavailable("the store is full")])
async def test_a_document_that_the_bus_does_not_take_is_a_job_that_says_so(error, monkeypatch):
    harness = ServiceHarness()

    async def refused(action: object) -> None:
        raise error

    monkeypatch.setattr(harness.service.documents, "write", refused)
    async with queued_job(harness):
        await harness.until(lambda: harness.status().get("reason") == "BusUnavailable", "told")
        assert harness.service.health.state.available
    assert str(error) in harness.status()["message"]


@pytest.mark.parametrize("write", ["patch", "patch status"], ids=["finalizers", "status"])
async def test_what_changes_while_a_write_is_on_its_way_is_not_overwritten(write):
    harness = ServiceHarness()
    due = [write]
    outdated: list[cluster.Body] = []

    def meanwhile(verb: str, target: cluster.Target) -> None:
        if target == ONE and verb in due:
            due.clear()
            body = harness.cluster._found(ONE)
            held = {**body["metadata"], "finalizers": [*body["metadata"].get("finalizers", ()), "example.com/theirs"]}
            harness.cluster._store(ONE, {**body, "metadata": held, "spec": {**body["spec"], "priority": 7}})

    def check(what: str, body: cluster.Body) -> None:
        if body["kind"] == "RLJob" and (body.get("status") or {}).get("observedGeneration", 2) != 2:
            outdated.append(body["status"])

    harness.cluster.fail = meanwhile
    harness.cluster.listeners.append(check)
    async with queued_job(harness):
        assert (due, outdated) == ([], []), "a status of the spec before the change"
        held = harness.cluster._objects[ONE]["metadata"]["finalizers"]
        assert sorted(held) == ["example.com/theirs", "marlaas.dev/job"]


@pytest.mark.parametrize("refusals", [REFUSALS, PATIENCE], ids=["refused", "asked for patience"])
async def test_what_is_refused_for_ever_is_asked_for_seldom_and_others_do_not_wait(refusals):
    harness = ServiceHarness()
    tries = itertools.product(refusals.items(), PLACES.items())
    refused = {
        (verb, plural, f"{answer}-{place}{end}"): error for (answer, error), (place, (verb, plural, end)) in tries
    }
    harness.cluster.fail = lambda verb, target: refused.get((verb, target.resource.plural, target.name))
    await harness.cluster.create(pool("tiny"))
    names = [f"{answer}-{place}" for answer in refusals for place in PLACES]
    for name in names:
        await harness.cluster.create(job("team-a", name, "tiny"))
    async with playing(harness) as orchestrator:
        for name in names:
            if name.endswith(("sandbox", "account")):
                await harness.until(lambda one=name: harness.status(job_of(one)) != {}, f"{name} queued")
                await orchestrator.say("team-a", name, **ADMITTED)
        await asyncio.sleep(REFUSED_FOR_S)
        asked = Counter((verb, target.resource.plural, target.name) for verb, target in harness.cluster.calls)
        assert set(refused) <= set(asked)
        assert {what: asked[what] for what in refused if asked[what] > MOST_ASKED} == {}
        since = asyncio.get_running_loop().time()
        await harness.cluster.create(job("team-a", "fine", "tiny"))
        await harness.until(lambda: harness.status(job_of("fine")) != {}, "queued")
        await orchestrator.say("team-a", "fine", **ADMITTED)
        await harness.until(lambda: harness.status(job_of("fine")).get("phase") == "Running", "running")
        assert asyncio.get_running_loop().time() - since < 10


def job_of(name: str) -> cluster.Target:
    return cluster.Target(RLJOBS, "team-a", name)


async def test_figures_alone_are_written_once_a_second_and_an_end_at_once_also_by_a_clock_that_is_set_back():
    back_s = [0.0]
    harness = ServiceHarness(now=lambda: 1.8e9 + virtual_time.now() - back_s[0])
    async with running_job(harness) as orchestrator:
        await asyncio.sleep(60)
        before = harness.count("patch status", "rljobs")
        for number in range(1, 31):
            await orchestrator.say("team-a", "one", **ADMITTED, tokens=number)
            await asyncio.sleep(0.1)
        await harness.until(lambda: harness.status().get("tokens") == 30, "the last figure")
        assert harness.count("patch status", "rljobs") - before == 4, "at 0, 1, 2 and 3 s"
        back_s[0] = 3600.0
        await orchestrator.say("team-a", "one", **ADMITTED, step=1)
        await harness.until(lambda: harness.status().get("step") == 1, "the step")
        await orchestrator.say("team-a", "one", **SUCCEEDED, tokens=31)
        since = asyncio.get_running_loop().time()
        await harness.until(lambda: harness.status().get("phase") == "Succeeded", "succeeded")
        assert (harness.status()["tokens"], asyncio.get_running_loop().time() - since) == (31, 0.0)


async def marked(orchestrator: ScriptedOrchestrator, *keys: str) -> None:
    """Wait until just these documents are marked as deleted."""
    await in_time(lambda: {key for key, one in orchestrator.documents.items() if one.deleted} == set(keys))


async def test_the_document_of_a_job_that_went_while_nobody_looked_is_marked_as_deleted():
    """The API server is asked, for the cache may lag: there are jobs of which no watch has told."""
    harness = ServiceHarness()
    async with queued_job(harness) as orchestrator:
        orchestrator.forgets = False
        harness.cluster.listeners.clear()
        await asyncio.sleep(30)  # past the list that follows the start
        jobs = await harness.server.connect("other").bucket(subjects.JOBS)
        for name, uid in (("gone", "u-gone"), ("untold", "")):
            if not uid:
                uid = (await harness.cluster.create(job("team-a", name, "tiny")))["metadata"]["uid"]
            document = orchestrator.documents["team-a.one"].model_copy(update={"job": name, "uid": uid})
            await jobs.put(f"team-a.{name}", encode(document))
        await marked(orchestrator, "team-a.gone")
        await asyncio.sleep(300)
        await marked(orchestrator, "team-a.gone")


async def test_a_job_goes_although_the_bus_is_away_and_its_document_is_swept_when_it_is_back():
    harness = ServiceHarness()
    async with running_job(harness) as orchestrator:
        harness.server.available = False
        await harness.cluster.delete(ONE)
        await harness.until(lambda: ONE not in harness.cluster._objects, "gone")
        assert not [one for one in harness.cluster._objects if one.name == "one-sandbox"]
        harness.server.available = True
        await in_time(lambda: not orchestrator.documents)


async def test_a_job_that_goes_before_it_has_our_finalizer_leaves_no_document():
    harness = ServiceHarness()
    await harness.cluster.create(pool("tiny"))

    def vanish(verb: str, target: cluster.Target) -> None:
        if verb == "patch" and target == ONE:
            harness.cluster._objects.pop(ONE, None)

    harness.cluster.fail = vanish
    async with playing(harness) as orchestrator:
        await harness.until(lambda: bool(harness.cluster._objects), "the pool is there")
        await harness.cluster.create(job("team-a", "one", "tiny"))
        await harness.until(lambda: ("get", ONE) in harness.cluster.calls, "looked at again")
        await harness.cluster.create(job("team-a", "two", "tiny"))
        await harness.until(lambda: harness.status(job_of("two")) != {}, "the next one is told")
        assert set(orchestrator.documents) == {"team-a.two"}
        assert harness.service.cache.get(ONE) is None


async def test_two_operators_at_once_tell_everything_once_and_leave_nothing():
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


async def test_jobs_over_queued_jobs_wait_outside_and_the_oldest_follows_when_one_is_admitted_ends_or_goes():
    harness = ServiceHarness()
    for body in (pool("tiny"), tenant("acme", "team-a", "team-b", quota={"queuedJobs": 2})):
        await harness.cluster.create(body)
    for name in "abcdef":
        await harness.cluster.create(job("team-a", name, "nowhere" if name == "a" else "tiny"))

    def waiting() -> str:
        return "".join(name for name in "abcdef" if harness.status(job_of(name)).get("reason") == "OverQuota")

    async with playing(harness) as orchestrator:
        await harness.until(lambda: waiting() == "def", "b and c queued")
        assert sorted(orchestrator.documents) == ["team-a.b", "team-a.c"], "a waits for its pool and takes no room"
        told = harness.status(job_of("d"))
        assert (told["phase"], told["conditions"][0]["status"]) == ("Queued", "False")
        assert "all 2 places in the queue of Tenant 'acme' (quota.queuedJobs)" in told["message"]
        await orchestrator.say("team-a", "b", **ADMITTED)
        await harness.until(lambda: waiting() == "ef", "d queued")
        await orchestrator.say("team-a", "c", **SUCCEEDED)
        await harness.until(lambda: waiting() == "f", "e queued")
        await harness.cluster.delete(job_of("d"))
        await harness.until(lambda: waiting() == "", "f queued")


async def test_an_installation_may_require_a_tenant():
    harness = ServiceHarness(requireTenant=True)
    async with queued_job(harness) as orchestrator:
        await harness.until(lambda: harness.status().get("reason") == "TenantRequired", "told")
        assert "no Tenant has the namespace 'team-a'" in harness.status()["message"]
        assert not orchestrator.documents
        await harness.cluster.create(tenant("acme", "team-a"))
        await harness.until(lambda: harness.status().get("tenant") == "acme", "queued")


def test_a_round_reads_only_the_jobs_that_changed(monkeypatch):
    """The seconds of 10,000 jobs and 100 Tenants are measured by `bench operator_scale`."""
    read: list[Target] = []
    of = observe.JobLoads._read

    def noted(self: observe.JobLoads, target: Target) -> object:
        read.append(target)
        return of(self, target)

    monkeypatch.setattr(observe.JobLoads, "_read", noted)
    round_seconds(60, 3)
    assert len(read) == 60 + 3
    assert {target.resource for target in read} == {RLJOBS}


async def test_a_job_whose_sandbox_is_refused_says_why_frees_its_slots_and_is_tried_again_ever_later():
    harness = ServiceHarness()

    def refused(verb: str, target: Target) -> Exception | None:
        return Invalid("Secret too long") if (verb, target.name) == ("apply", "one-sandbox") else None

    async with queued_job(harness) as orchestrator:
        harness.cluster.fail = refused
        waits_s: list[float] = []
        for _ in range(3):
            await orchestrator.say("team-a", "one", **ADMITTED)
            await in_time(lambda: orchestrator.documents["team-a.one"].is_held)
            held = orchestrator.documents["team-a.one"].hold
            told = {"reason": held.reason, "message": held.message}
            await orchestrator.say("team-a", "one", phase="Queued", admitted=False, **told)
            await harness.until(lambda: harness.status().get("phase") == "Queued", "held")
            assert harness.status()["reason"] == "PodRefused"
            assert "Secret too long; its adapter" in harness.status()["message"]
            began = virtual_time.now()
            await in_time(lambda: not orchestrator.documents["team-a.one"].is_held)
            waits_s.append(round(virtual_time.now() - began, -1))
        assert waits_s == [60, 120, 240]
        harness.cluster.fail = lambda verb, target: None
        await orchestrator.say("team-a", "one", **ADMITTED)
        await harness.until(lambda: harness.status().get("phase") == "Running", "begun")


@pytest.mark.parametrize("error", [Invalid("exceeded quota"), cluster.Unavailable("no answer")])
async def test_an_exporter_that_cannot_be_made_costs_the_job_nothing_and_is_asked_for_seldom(error):
    harness = ServiceHarness()
    name = "one-exporter--sandbox"
    harness.cluster.fail = lambda verb, target: error if (verb, target.name) == ("apply", name) else None
    reporting = {"trackers": ["mlflow"]}
    async with running_job(harness, export=reporting) as orchestrator:
        await orchestrator.say("team-a", "one", **ADMITTED, started_at=1.0)
        told = lambda: [one for one in harness.status()["conditions"] if one["type"] == "Reporting"]  # noqa: E731
        await harness.until(lambda: str(error) in str(told()), "told")
        for step in range(1, 40):
            await orchestrator.say("team-a", "one", **ADMITTED, started_at=1.0, step=step)
            await harness.until(lambda step=step: harness.status().get("step") == step, "counted")
        assert (harness.status()["phase"], orchestrator.documents["team-a.one"].hold) == ("Running", None)
        assert sum(target.name == name for _, target in harness.cluster.calls) < 40
        harness.cluster.fail = lambda verb, target: None
        await in_time(lambda: "exceeded" not in str(told()) and "answer" not in str(told()))
        assert {key.name for key in harness.cluster._objects} >= {name, "one-sandbox"}
