"""The bus and the orchestrator are away for longer than a restart takes: `why` says who is missing, and of nobody else, and everything goes on afterwards."""

import time
from collections.abc import Iterator

import pytest

from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform, manifest

TEAM, JOB = "team-k", "endless"
AWAY = {
    "orchestrator": (f"deployment/{RELEASE}-orchestrator", "WaitingForOrchestrator"),
    "bus": (f"statefulset/{RELEASE}-nats", "BusUnavailable"),
}
AT_LEAST_S = {"orchestrator": 0.0, "bus": 60.0}
REASONS = [reason for _, reason in AWAY.values()]


def step(platform: Platform) -> int:
    return int(platform.status("rljob", JOB, TEAM).get("step") or 0)


def scale(platform: Platform, workload: str, replicas: int) -> None:
    platform.kubectl("scale", "-n", NAMESPACE, workload, f"--replicas={replicas}")


@pytest.fixture(scope="module")
def running(platform: Platform) -> Iterator[None]:
    """A job at work."""
    platform.tiny_pool()
    platform.tenant(TEAM)
    (body,) = manifest("endless")
    body["metadata"]["namespace"] = TEAM
    platform.apply(body)
    platform.until(lambda: step(platform), "the first step", 300)
    yield
    platform.kubectl("delete", "rljob", JOB, "-n", TEAM, "--timeout=120s")


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("missing", AWAY)
def test_why_names_who_is_away_and_takes_it_back(platform: Platform, missing: str) -> None:
    workload, reason = AWAY[missing]
    scale(platform, workload, 0)
    until = time.monotonic() + AT_LEAST_S[missing]
    try:
        text = platform.until(lambda: reason in (said := platform.why(JOB, TEAM)) and said, f"`why` says {reason}", 90)
        time.sleep(max(0.0, until - time.monotonic()))
    finally:
        scale(platform, workload, 1)
    assert isinstance(text, str)
    assert not any(other in text for other in REASONS if other != reason), text
    assert platform.status("rljob", JOB, TEAM)["phase"] == "Running"
    before = step(platform)
    platform.until(lambda: step(platform) > before, f"a step after {missing} was away", 180)
    platform.until(lambda: reason not in platform.why(JOB, TEAM), f"`why` says {reason} no more", 180)
    assert not platform.status("rljob", JOB, TEAM).get("faults"), "waiting is no fault"
    events = platform.kubectl("describe", "rljob", JOB, "-n", TEAM)
    assert "Failed" not in events.partition("Events:")[2], events
