"""`kill -9` of every kind of container while a job runs, and a bus and an orchestrator that are away: the job goes on, `why` tells the truth, the accounts are exact."""

import contextlib

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform, endless, plain_pool, tenant
from marlaas_e2e.step_records import assert_exact

TEAM, JOB = "team-d", "survivor"
SLOW = ("rollout", "trainer")
"""These take seconds to come back, so `why` names them; for bus and orchestrator see the outages below."""
OUTAGES = {
    "orchestrator": (f"deployment/{RELEASE}-orchestrator", "WaitingForOrchestrator"),
    "bus": (f"statefulset/{RELEASE}-nats", "BusUnavailable"),
}


def begin(_: Platform) -> list[Object]:
    return [*plain_pool(), *tenant(TEAM), endless(JOB, TEAM)]


@pytest.fixture(scope="module", autouse=True)
def running(platform: Platform) -> None:
    platform.until(lambda: platform.step(JOB, TEAM), "the first step", 600)


def kill(platform: Platform, component: str) -> None:
    namespace, container = (TEAM, "supervisor") if component == "sandbox" else (NAMESPACE, component)
    chosen = f"app.kubernetes.io/component={component},marlaas.dev/pool notin (tiny,shared,absent,crowded)"
    (pod,) = platform.names("pods", namespace, chosen)
    platform.cluster.kill_container(namespace, pod.removeprefix("pod/"), container)


@pytest.mark.parametrize("component", ["trainer", "orchestrator", "nats", "sandbox", "operator", "rollout"])
def test_training_goes_on_after_a_kill(platform, component):
    kill(platform, component)

    def named() -> bool:
        """Kill it again where it was back before anybody looked: Kubernetes waits longer each time."""
        if component in platform.why(JOB, TEAM):
            return True
        with contextlib.suppress(LookupError, CommandFailed):
            kill(platform, component)
        return False

    if component in SLOW:
        platform.until(named, f"`why` names the {component} that is away")
    platform.steps_on(JOB, TEAM, f"after {component} was killed")


@pytest.mark.parametrize("missing", OUTAGES)
def test_why_names_what_is_away_and_takes_it_back(platform, missing):
    workload, reason = OUTAGES[missing]
    platform.kubectl("scale", "-n", NAMESPACE, workload, "--replicas=0")
    try:
        platform.until(lambda: reason == platform.status("rljob", JOB, TEAM)["reason"], f"the reason is {reason}")
        text = platform.why(JOB, TEAM)
    finally:
        platform.kubectl("scale", "-n", NAMESPACE, workload, "--replicas=1")
    assert [other for _, other in OUTAGES.values() if other in text] == [reason], text
    platform.steps_on(JOB, TEAM, f"after {missing} was away")
    platform.until(lambda: reason not in platform.why(JOB, TEAM), f"`why` says {reason} no more")
    assert platform.status("rljob", JOB, TEAM)["phase"] == "Running"


def test_the_accounts_are_exact_in_the_end(platform):
    status = platform.status("rljob", JOB, TEAM)
    assert not status.get("faults"), "waiting is no fault"
    platform.patch("rljob", JOB, {"suspend": True}, TEAM)
    suspended = lambda: platform.status("rljob", JOB, TEAM)["phase"] == "Suspended"  # noqa: E731
    platform.until(suspended, "the job is suspended")
    assert_exact(platform, TEAM, JOB)
    events = platform.kubectl("describe", "rljob", JOB, "-n", TEAM)
    assert "Failed" not in events.partition("Events:")[2], events
    platform.kubectl("delete", "rljob", JOB, "-n", TEAM, "--timeout=120s")
