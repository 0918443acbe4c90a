"""The whole operator in one process, between the fakes of API server and bus: fast, for what needs no real server."""

import asyncio

import httpx
import pytest
from tests.operator.objects import job, pool
from tests.operator.real.orchestrators import ADMITTED
from tests.operator.shell.harness import ONE, ServiceHarness, playing, queued_job

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.errors import InvalidInput, MarlaasError
from marlaas_api.health import HealthEndpoints, serve_health
from marlaas_operator import work_queue
from marlaas_operator.cluster import (
    Body,
    Conflict,
    Forbidden,
    Invalid,
    NoAnswer,
    NotFound,
    Target,
    TooMany,
    Unavailable,
)
from marlaas_operator.cluster.resources import MODELPOOLS, PODS, RLJOBS


async def test_a_job_is_queued_with_one_status_run_and_forgotten() -> None:
    harness = ServiceHarness()
    async with queued_job(harness) as orchestrator:
        assert harness.count("patch status", "rljobs") == 1
        await orchestrator.say("team-a", "one", **ADMITTED)
        await harness.until(lambda: harness.status().get("phase") == "Running", "running")
        await harness.cluster.delete(ONE)
        await harness.until(lambda: ONE not in harness.cluster._objects, "gone")
    left = {target for target in harness.cluster._objects if target.namespace == "team-a"}
    assert {target.resource.kind for target in left} <= {"Event"}


TRANSIENT = {"409": Conflict("x"), "429": TooMany("x", 0.1), "500": Unavailable("x"), "reset": Unavailable("reset")}


@pytest.mark.parametrize("error", TRANSIENT.values(), ids=TRANSIENT)
async def test_what_the_api_server_refuses_for_a_while_is_done_later(error: MarlaasError) -> None:
    harness = ServiceHarness()
    left = [3]

    def fail(verb: str, target: Target) -> Exception | None:
        if left[0] and verb == "patch status" and target == ONE:
            left[0] -= 1
            return error
        return None

    harness.cluster.fail = fail
    async with queued_job(harness):
        assert left == [0]
        assert harness.count("patch status", "rljobs") == 4


@pytest.mark.parametrize(
    ("error", "words"),
    [(NotFound("no such kind"), r"kubectl apply -f crds/"), (Forbidden("cannot list"), "ClusterRole")],
)
async def test_what_only_a_person_can_mend_ends_the_start_with_a_sentence(error: MarlaasError, words: str) -> None:
    harness = ServiceHarness()
    harness.cluster.fail = lambda verb, target: error if verb == "list" else None
    with pytest.raises(ExceptionGroup) as caught:
        await harness.service.run(harness.stop)
    (only,) = caught.value.exceptions
    assert isinstance(only, InvalidInput)
    assert words in str(only)


async def test_a_restart_among_jobs_that_are_as_they_should_be_writes_nothing() -> None:
    first = ServiceHarness()
    await first.cluster.create(pool("tiny"))
    for number in range(20):
        await first.cluster.create(job("team-a", f"job-{number}", "tiny"))
    targets = [Target(RLJOBS, "team-a", f"job-{number}") for number in range(20)]
    async with playing(first):
        await first.until(lambda: all(first.status(one).get("phase") == "Queued" for one in targets), "all queued")
    second = ServiceHarness(first)
    second.cluster.calls.clear()
    async with playing(second):
        async with asyncio.timeout(20):
            while second.service.metrics.reconciles["RLJob", "ok"] < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert [
        call for call in second.cluster.calls if call[0].startswith(("patch", "create")) and call[1] in targets
    ] == []


async def test_the_endpoints_say_what_is_missing_and_what_was_counted() -> None:
    harness = ServiceHarness()
    endpoints = HealthEndpoints(lambda: "", harness.service.missing, harness.service.metric_families)
    async with serve_health(endpoints, 0) as port, httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{port}"
        assert (await client.get(f"{url}/livez")).text == "ok\n"
        assert (await client.get(f"{url}/readyz")).status_code == 503
        assert (await client.get(f"{url}/nowhere")).status_code == 404
        harness.service.metrics.reconciled("RLJob", "ok", 0.02)
        harness.service.metrics.requested("PATCH", "rljobs/status", 200)
        text = (await client.get(f"{url}/metrics")).text
    assert 'marlaas_operator_reconciles_total{kind="RLJob",outcome="ok"} 1.0' in text
    assert 'marlaas_operator_api_requests_total{resource="rljobs/status",status="200",verb="PATCH"} 1.0' in text
    assert 'marlaas_operator_reconcile_seconds_bucket{le="0.025"} 1.0' in text
    assert "marlaas_operator_queue_depth 0.0" in text


async def test_pods_of_a_tenant_that_pass_themselves_off_as_a_pools_count_for_nothing() -> None:
    harness = ServiceHarness()
    of_pool = Target(MODELPOOLS, "", "tiny")
    await harness.cluster.create(pool("tiny"))
    async with playing(harness):
        for component in ("rollout", "trainer"):
            await harness.cluster.create(forged(component))
            await harness.cluster.patch(Target(PODS, "team-a", component), {"status": READY}, status=True)
        await harness.until(lambda: "rolloutReady" in harness.status(of_pool), "told")
        await harness.service._reconciler(of_pool)
    assert (harness.status(of_pool)["rolloutReady"], harness.status(of_pool)["trainerReady"]) == ("0/1", "0/1")


READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


def forged(component: str) -> Body:
    labels = {
        "app.kubernetes.io/managed-by": "marlaas-operator",
        "app.kubernetes.io/component": component,
        "marlaas.dev/pool": "tiny",
    }
    metadata = {"name": component, "namespace": "team-a", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}}


async def test_what_keeps_failing_is_told_in_the_servers_words_once_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "LASTING_S", 0.3)
    harness = ServiceHarness()
    harness.cluster.fail = lambda verb, target: Unavailable("webhook down") if in_team(verb, target) else None
    async with queued_job(harness) as orchestrator:
        await orchestrator.say("team-a", "one", **ADMITTED)
        await harness.until(lambda: harness.status().get("reason") == "PodRefused", "told")
        assert harness.status()["message"] == "webhook down"
        harness.cluster.fail = lambda verb, target: None
        await harness.until(lambda: harness.status().get("reason") != "PodRefused", "over")


def in_team(verb: str, target: Target) -> bool:
    return verb == "apply" and target.namespace == "team-a"


async def test_what_was_refused_is_not_asked_for_at_the_pace_of_the_news() -> None:
    harness = ServiceHarness()
    harness.cluster.fail = lambda verb, target: Invalid("denied") if in_team(verb, target) else None
    async with queued_job(harness) as orchestrator:
        await orchestrator.say("team-a", "one", **ADMITTED)
        await harness.until(lambda: harness.status().get("reason") == "PodRefused", "told")
        for step in range(1, 5):
            await orchestrator.say("team-a", "one", **{**ADMITTED, "step": step, "message": f"step {step}"})
            harness.service.queue.add(ONE)
        await harness.until(lambda: harness.status().get("step") == 4, "figures")
    assert sum(in_team(verb, target) for verb, target in harness.cluster.calls) == 1


@pytest.mark.parametrize("error", [BusRefused("payload too large"), BusUnavailable("the store is full")])
async def test_a_document_that_the_bus_does_not_take_is_a_job_that_says_so(
    error: MarlaasError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_queue, "LASTING_S", 0.3)
    harness = ServiceHarness()

    async def refused(action: object) -> None:
        raise error

    monkeypatch.setattr(harness.service.documents, "write", refused)
    await harness.cluster.create(pool("tiny"))
    await harness.cluster.create(job("team-a", "one", "tiny"))
    async with playing(harness):
        await harness.until(lambda: harness.status().get("reason") == "BusUnavailable", "told")
        assert harness.service.health.state.available
    assert str(error) in harness.status()["message"]


async def test_a_server_that_does_not_answer_is_not_asked_for_the_status_as_well() -> None:
    harness = ServiceHarness()
    await harness.cluster.create(pool("tiny"))
    async with playing(harness):
        await harness.until(lambda: bool(harness.status(Target(MODELPOOLS, "", "tiny"))), "told")
        harness.service.queue.stop()
        harness.service.cache.see(await harness.cluster.create(job("team-a", "one", "tiny")))
        harness.cluster.fail = lambda verb, target: NoAnswer("no route") if target == ONE else None
        before = len(harness.cluster.calls)
        with pytest.raises(NoAnswer):
            await harness.service._reconciler(ONE)
    assert harness.cluster.calls[before:] == [("patch", ONE)]
