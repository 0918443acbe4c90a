"""What the bus holds of a job, read where the orchestrator reads it, with the orchestrator's own credential."""

import json
from typing import Any

from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform

_PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from marlaas_api import subjects
from marlaas_api.bus_nats import connect
from marlaas_api.messages import StepRecord
from marlaas_api.wire import decode_as
async def steps(bus, namespace, job, uid):
    stored = await bus.replay(subjects.STEPS, f"step.{namespace}.{job}.*")
    records = [record for each in stored if (record := decode_as(StepRecord, each.data)).uid == uid]
    return [[r.step, r.version, r.num_groups, r.num_episodes, list(r.indices)] for r in records]
async def keys(bus, prefix):
    buckets = [await bus.bucket(name) for name in (subjects.JOBS, subjects.PROGRESS, subjects.POLICY, subjects.LEDGER)]
    return [entry.key for bucket in buckets for entry in await bucket.entries(prefix)]
async def main(url, creds, question, *words):
    bus = await connect(url, name="accounting", creds=Path(creds))
    try:
        print(json.dumps(await globals()[question](bus, *words)))
    finally:
        await bus.close()
asyncio.run(main(*sys.argv[1:]))
"""


def keys(platform: Platform, prefix: str) -> list[str]:
    return list(_answer(platform, "keys", prefix))


def assert_exact(platform: Platform, namespace: str, job: str) -> None:
    """Assert that a job that does not run has one record for each of its steps, and that no task was counted in two steps."""
    body = platform.get("rljob", job, namespace)
    found = _answer(platform, "steps", namespace, job, body["metadata"]["uid"])
    assert [record[0] for record in found] == list(range(body["status"]["step"]))
    trained = [index for record in found for index in record[4]]
    assert len(trained) == len(set(trained)), "a task was counted in two steps"
    assert body["status"]["agents"][0]["policyVersion"] == found[-1][1]


def _answer(platform: Platform, question: str, *words: str) -> list[Any]:
    place = [f"nats://{RELEASE}-nats.{NAMESPACE}.svc:4222", "/etc/marlaas/bus/orchestrator.creds"]
    pod = f"deployment/{RELEASE}-orchestrator"
    return list(json.loads(platform.python(pod, "orchestrator", _PROGRAM, *place, question, *words)))
