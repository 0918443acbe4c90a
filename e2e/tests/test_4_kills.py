"""`kill -9` of every kind of pod while a job runs: it ends with exact accounting, and `why` told the truth meanwhile."""

import json

import pytest

from marlaas_e2e.platform import NAMESPACE, Platform, manifest
from marlaas_e2e.step_records import assert_exact

TEAM, JOB = "team-d", "survivor"
MORE_STEPS = 40
"""More than are made while somebody is away and the status stands still."""
SLOW = ("rollout", "trainer")
"""Those who need seconds to be back, so that somebody can ask; of bus and orchestrator see test_4b_outages.py."""


def step(platform: Platform) -> int:
    return int(platform.status("rljob", JOB, TEAM).get("step") or 0)


def only_pod(platform: Platform, component: str, namespace: str) -> str:
    chosen = f"app.kubernetes.io/component={component},marlaas.dev/pool notin (no-image,no-model,no-node)"
    (name,) = platform.names("pods", namespace, chosen)
    return name.removeprefix("pod/")


@pytest.fixture(scope="module")
def running(platform: Platform) -> None:
    """The job, past its first step."""
    platform.tiny_pool()
    platform.tenant(TEAM)
    platform.apply(*manifest("survivor"))
    platform.until(lambda: step(platform) >= 1, "the first step", 300)


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("component", ["trainer", "orchestrator", "nats", "sandbox", "operator", "rollout"])
def test_training_goes_on_after_a_kill(platform: Platform, component: str) -> None:
    more = {"spec": {"training": {"steps": step(platform) + MORE_STEPS}}}
    platform.kubectl("patch", "rljob", JOB, "-n", TEAM, "--type=merge", "--patch", json.dumps(more))
    namespace, container = (TEAM, "supervisor") if component == "sandbox" else (NAMESPACE, component)
    platform.cluster.kill_container(namespace, only_pod(platform, component, namespace), container)
    if component in SLOW:
        platform.until(lambda: component in platform.why(JOB, TEAM), f"`why` names the {component} that is away", 60)
    before = step(platform)  # one more may have been made before the kill and not be told yet
    platform.until(lambda: step(platform) > before + 1, f"steps after {component} was killed", 900)


@pytest.mark.usefixtures("running")
def test_the_accounts_are_exact_in_the_end(platform: Platform) -> None:
    platform.ended(JOB, TEAM)
    assert_exact(platform, TEAM, JOB)
