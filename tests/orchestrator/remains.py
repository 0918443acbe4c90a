"""One of everything that a job owns, on a bus and in a blob store, and a list of all that is there."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.harness import a_manifest, changed, identity
from tests.orchestrator.harness import OrchestratorHarness, a_job

from marlaas_api import subjects
from marlaas_api.messages import IssueLedger, JobDocument, Pin, PolicyRecord
from marlaas_api.names import AdapterRef, job_prefix, train_group
from marlaas_api.wire import encode

BUCKETS = (subjects.JOBS, subjects.PROGRESS, subjects.POLICY, subjects.PINS, subjects.LEDGER)
STREAMS = (subjects.TASKS, subjects.TURNS, subjects.EPISODES, subjects.GROUPS, subjects.STEPS, subjects.EVENTS)
LEVEL = {"reason": "Training", "steps": 9, "started_at": 1.0}
TEAM = (
    {"name": "policy"},
    {"name": "critic", "poolRef": {"name": "big"}},
    {"name": "opponent", "policy": {"of": "policy", "versions": "past"}},
)
"""Agents on two pools, one of which plays past versions of another."""


async def commit(
    harness: OrchestratorHarness, document: JobDocument, before: PolicyRecord, agent: str = "policy"
) -> PolicyRecord:
    """The blobs of one more version, as a trainer writes them, a broken commit's leftovers among them."""
    version, blobs = before.version + 1, harness.blobs
    folder = AdapterRef(document.namespace, document.job, document.uid, agent, version).blob_prefix
    files = {
        name: await blobs.put(folder, name, f"{name} {version}".encode())
        for name in ("adapter_model.safetensors", "adapter_config.json")
    }
    await blobs.put(folder, "adapter_model.safetensors", b"of a commit that broke")
    state = await blobs.put(folder, "state", f"state {version}".encode())
    manifest = a_manifest(document, version, agent=agent, parent=before.manifest, files=files, state=state)
    ref = await blobs.put(folder, "manifest", encode(manifest))
    return PolicyRecord(uid=document.uid, version=version, manifest=ref, step=version - 1)


async def fill(harness: OrchestratorHarness, document: JobDocument, level: dict[str, object] | None = None) -> None:
    """Everything that a job owns; the versions of its agents are 0 to 3."""
    namespace, job, uid = document.namespace, document.job, document.uid
    trained = [agent.name for agent in document.spec.policies]
    await harness.blobs.put(f"{job_prefix(document.ref)}/claims", "message", b"a large turn")
    await harness.admit(document, **{**LEVEL, "versions": dict.fromkeys(trained, 3), **(level or {})})
    for agent in trained:
        await fill_agent(harness, document, agent)
    await harness.put(subjects.LEDGER, document.ref.key, IssueLedger(**identity(document)))
    for player in document.spec.agents:
        pin = f"{document.ref.key}.{player.pinned_as}.{train_group(document.ref, 0)}"
        await harness.put(subjects.PINS, pin, Pin(version=0))
    episodes, tasks = subjects.episode(namespace, job), subjects.task(namespace, job)
    for subject in (
        tasks,
        subjects.turn(namespace, job, f"{uid}-t0-0-1", 0),
        episodes,
        subjects.step(namespace, job, uid, 0),
        subjects.evaluation(namespace, job, uid, 0),
        subjects.event(namespace, job, "trainer"),
    ):
        await harness.bus.publish(subject, b"x")
    for stream, reader, subject in (
        (subjects.EPISODES, "orchestrator", episodes),
        (subjects.TASKS, "sandbox", tasks),
    ):
        await harness.bus.consumer(stream, subjects.consumer(namespace, job, reader), subject)


async def fill_agent(harness: OrchestratorHarness, document: JobDocument, agent: str) -> None:
    """Write what the trainer of an agent writes, and publish its groups."""
    record = PolicyRecord(uid=document.uid)
    for _ in range(4):
        record = await commit(harness, document, record, agent)
    await harness.put_policy(record, document, agent)
    groups = subjects.group(document.namespace, document.job, agent)
    await harness.bus.publish(groups, b"x")
    reader = subjects.consumer(document.namespace, document.job, agent, "trainer")
    await harness.bus.consumer(subjects.GROUPS, reader, groups)


async def all_there_is(harness: OrchestratorHarness) -> set[str]:
    """Every key, message and blob, as text."""
    found = {f"blob {name}" for name in await harness.blobs.list("")}
    for bucket in BUCKETS:
        found |= {f"{bucket} {entry.key}" for entry in await (await harness.bus.bucket(bucket)).entries()}
    for stream in STREAMS:
        found |= {f"{stream} {stored.subject}" for stored in await harness.bus.replay(stream, ">")}
    return found


async def document_of(harness: OrchestratorHarness, document: JobDocument) -> JobDocument | None:
    """What the bucket `jobs` says under the job's name."""
    return await harness.get(JobDocument, subjects.JOBS, document.ref.key)


async def poll(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(40):
        while not await what():  # noqa: ASYNC110 - of a bus, nobody tells
            await asyncio.sleep(0.05)


async def is_forgotten(harness: OrchestratorHarness, document: JobDocument) -> None:
    async def gone() -> bool:
        return await document_of(harness, document) is None

    await poll(gone)


async def deleted(harness: OrchestratorHarness, document: JobDocument) -> set[str]:
    """What is left after an orchestrator has deleted the job."""
    async with harness.orchestrating():
        await is_forgotten(harness, document)
    return await all_there_is(harness)


def doomed(retention: str = "delete", agents: Sequence[dict[str, Any]] = ()) -> JobDocument:
    return changed(a_job(agents=agents), adapter_retention=retention).model_copy(update={"deleted": True})


def neighbours() -> list[JobDocument]:
    """Jobs whose names begin alike; suspended, so that the orchestrator leaves them alone."""
    other = a_job(suspend=True).model_copy(update={"namespace": "team-a-2"})
    return [a_job("sums-2", suspend=True), a_job("sum", suspend=True), other]
