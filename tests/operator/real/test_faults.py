"""The operator reaches the desired state after faults of the API server and of its connections."""

from functools import partial

import pytest
from tests.operator.objects import job, kubeconfig, pool
from tests.operator.real.harness import SANDBOX, eventually
from tests.operator.real.orchestrators import ADMITTED
from tests.operator.real.proxy import answer, gone, is_watch, reset, silent
from tests.tables import data

from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import RLJOBS

WATCH_S = 1.0
"""Watches end and begin anew at this pace, and meet the fault."""


REQUESTS = {
    "anything": lambda request: True,
    "any_write": lambda request: request.method == "PATCH",
    "sandbox_apply": lambda request: request.method == "PATCH" and "/deployments/" in request.path,
    "is_watch": is_watch,
    "jobs_watch": lambda request: is_watch(request) and request.path.endswith("/rljobs"),
}


def fault_of(what):
    if isinstance(what, str):
        return {"reset": reset, "gone": gone, "silent": silent}[what]
    status, reason, *after = what
    return answer(status, reason, **({"Retry_After": after[0]} if after else {}))


@pytest.mark.slow
async def test_faults_pass_one_after_the_other(harness, proxy, orchestrator):
    """Each with a job of its own; those that hit everything also hit a start of the operator."""
    await harness.gateway.create(pool("tiny"))
    for fault, (what, times, which) in data(__file__, "faults").items():
        name = "job-" + fault.lower().replace(" ", "-")
        proxy.times(times, fault_of(what), REQUESTS[which])
        if which == "anything":
            start(harness, proxy)
        await harness.gateway.create(job("team-a", name, "tiny"))
        await harness.phase("team-a", name, "Queued")
        await orchestrator.say("team-a", name, **ADMITTED)
        if "422" in fault:  # refused for good: the job frees its slots, and is tried again in a minute
            told = lambda status: status.get("reason") == "PodRefused"  # noqa: E731
            await eventually(harness, f"{fault}: told", partial(harness.status, "team-a", name), accept=told)
        else:
            found = lambda: harness.owned("team-a")  # noqa: E731
            await eventually(harness, f"{fault}: its sandbox", found, accept=has_sandbox(name))
            await harness.phase("team-a", name, "Running")
        await eventually(harness, f"{fault} has struck {times} times", lambda: proxy.faults, accept=times.__eq__)
        assert harness.started[-1].alive, fault
        await harness.gateway.delete(Target(RLJOBS, "team-a", name))
        await harness.gone(Target(RLJOBS, "team-a", name))


def start(harness, proxy):
    if harness.started:
        harness.started[-1].kill()
    harness.start_operator(kubeconfig=kubeconfig(harness.folder, proxy.url), variant="hasty", watch_s=WATCH_S)


def has_sandbox(name):
    return lambda owned: set(owned) == {each.replace("one-", f"{name}-") for each in SANDBOX}


@pytest.mark.slow
async def test_an_api_server_that_was_killed_is_waited_for(harness, orchestrator):
    await harness.queue_job()
    harness.plane.kill_apiserver()
    await orchestrator.say("team-a", "one", **ADMITTED)
    harness.plane.start_apiserver()
    await harness.phase("team-a", "one", "Running")
    await harness.gateway.create(job("team-a", "two", "tiny"))
    await harness.phase("team-a", "two", "Queued")
