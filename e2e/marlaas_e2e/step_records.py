"""Records of a job's finished steps, read where the orchestrator reads them, with the orchestrator's own credential."""

import json

from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform

_PROGRAM = """
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


def step_records(platform: Platform, namespace: str, job: str) -> list[list[object]]:
    """Return step, version, groups, episodes and task indices of every record of a job, in the order in which they were stored."""
    uid = platform.get("rljob", job, namespace)["metadata"]["uid"]
    words = [f"nats://{RELEASE}-nats.{NAMESPACE}.svc:4222", "/etc/marlaas/bus/orchestrator.creds", namespace, job, uid]
    pod = ("exec", "-n", NAMESPACE, f"deployment/{RELEASE}-orchestrator", "-c", "orchestrator", "--")
    found: list[list[object]] = json.loads(platform.kubectl(*pod, "python3", "-c", _PROGRAM, *words))
    return found


def assert_exact(platform: Platform, namespace: str, job: str) -> None:
    """Assert that a succeeded job has one record for each of its steps, and that no task was counted in two steps."""
    status = platform.status("rljob", job, namespace)
    steps = platform.get("rljob", job, namespace)["spec"]["training"]["steps"]
    assert (status["phase"], status["step"]) == ("Succeeded", steps), status
    found = step_records(platform, namespace, job)
    assert [record[0] for record in found] == list(range(steps))
    trained = [index for record in found for index in record[4]]  # type: ignore[attr-defined]
    assert len(trained) == len(set(trained)), "a task was counted in two steps"
    assert status["agents"][0]["policyVersion"] == found[-1][1]
