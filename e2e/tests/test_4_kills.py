"""`kill -9` of every kind of pod while a job runs: it ends with exact accounting, and `why` told the truth meanwhile."""

import json

import pytest

from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform, manifest

TEAM, JOB = "team-d", "survivor"
MORE_STEPS = 40
"""More than are made while somebody is away and the status stands still."""
SLOW = ("rollout", "trainer")
"""Those who need seconds to be back, so that somebody can ask; of bus and orchestrator see test_4b_outages.py."""

# What is on record of the job, read where the orchestrator reads it, with the orchestrator's own credential.
_RECORDS = """
import asyncio, json, sys
from pathlib import Path
from marlaas_api import subjects
from marlaas_api.bus_nats import connect
from marlaas_api.messages import StepRecord
from marlaas_api.wire import decode_as
async def main(url, creds, namespace, job, uid):
    bus = await connect(url, name="accounting", creds=Path(creds))
    try:
        stored = await bus.replay(subjects.STEPS, f"step.{namespace}.{job}.*")
    finally:
        await bus.close()
    records = [record for each in stored if (record := decode_as(StepRecord, each.data)).uid == uid]
    print(json.dumps([[r.step, r.version, r.num_groups, r.num_episodes, list(r.indices)] for r in records]))
asyncio.run(main(*sys.argv[1:]))
"""


def records(platform: Platform) -> list[list[object]]:
    """step, version, groups, episodes and task indices of every record of the job, in the order in which they were stored."""
    uid = platform.get("rljob", JOB, TEAM)["metadata"]["uid"]
    words = [f"nats://{RELEASE}-nats.{NAMESPACE}.svc:4222", "/etc/marlaas/bus/orchestrator.creds", TEAM, JOB, uid]
    pod = ("exec", "-n", NAMESPACE, f"deployment/{RELEASE}-orchestrator", "-c", "orchestrator", "--")
    found: list[list[object]] = json.loads(platform.kubectl(*pod, "python3", "-c", _RECORDS, *words))
    return found


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
    status = platform.ended(JOB, TEAM)
    steps = platform.get("rljob", JOB, TEAM)["spec"]["training"]["steps"]
    assert (status["phase"], status["step"]) == ("Succeeded", steps), status
    found = records(platform)
    assert [record[0] for record in found] == list(range(steps))
    trained = [index for record in found for index in record[4]]  # type: ignore[attr-defined]
    assert len(trained) == len(set(trained)), "a task was counted in two steps"
    assert status["agents"][0]["policyVersion"] == found[-1][1]
