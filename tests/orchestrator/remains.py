"""One of everything that a job owns, on a bus and in a blob store, and a list of all that is there."""

from marlaas_api import subjects
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_api.messages import IssueLedger, JobDocument, Manifest, Phase, Pin, PolicyRecord, Progress
from marlaas_api.names import AdapterRef, job_prefix, train_group
from marlaas_api.wire import decode_as, encode

BUCKETS = (subjects.JOBS, subjects.PROGRESS, subjects.POLICY, subjects.PINS, subjects.LEDGER)
STREAMS = (subjects.TASKS, subjects.TURNS, subjects.EPISODES, subjects.GROUPS, subjects.STEPS, subjects.EVENTS)
CONSUMERS = ((subjects.EPISODES, "orchestrator"), (subjects.TASKS, "sandbox"), (subjects.GROUPS, "policy_trainer"))
LEVEL = {"phase": Phase.RUNNING, "admitted": True, "reason": "Training", "steps": 9, "started_at": 1.0}


async def commit(blobs: Blobs, document: JobDocument, before: PolicyRecord) -> PolicyRecord:
    """The blobs of one more version, as a trainer writes them, a broken commit's leftovers among them."""
    version = before.version + 1
    folder = AdapterRef(document.namespace, document.job, document.uid, "policy", version).blob_prefix
    files = {
        name: await blobs.put(folder, name, f"{name} {version}".encode())
        for name in ("adapter_model.safetensors", "adapter_config.json")
    }
    await blobs.put(folder, "adapter_model.safetensors", b"of a commit that broke")
    manifest = Manifest(
        namespace=document.namespace,
        job=document.job,
        uid=document.uid,
        agent="policy",
        version=version,
        step=version - 1,
        parent=before.manifest,
        rank=8,
        files=files,
        state=await blobs.put(folder, "state", f"state {version}".encode()),
        tensor_digests={},
        probes=(),
    )
    ref = await blobs.put(folder, "manifest", encode(manifest))
    return PolicyRecord(uid=document.uid, version=version, manifest=ref, step=version - 1)


async def fill(bus: Bus, blobs: Blobs, document: JobDocument, level: dict[str, object] | None = None) -> None:
    """Everything that a job owns; its versions are 0 to 3."""
    namespace, job, uid = document.namespace, document.job, document.uid
    record = PolicyRecord(uid=uid)
    for _ in range(4):
        record = await commit(blobs, document, record)
    await blobs.put(f"{job_prefix(document.ref)}/claims", "message", b"a large turn")
    progress = Progress.model_validate(
        {**LEVEL, "namespace": namespace, "job": job, "uid": uid, "versions": {"policy": 3}, **(level or {})}
    )
    for bucket, key, message in (
        (subjects.PROGRESS, document.ref.key, progress),
        (subjects.POLICY, f"{document.ref.key}.policy", record),
        (subjects.LEDGER, document.ref.key, IssueLedger(namespace=namespace, job=job, uid=uid)),
        (subjects.PINS, f"{document.ref.key}.policy.{train_group(document.ref, 0)}", Pin(version=0)),
        (subjects.JOBS, document.ref.key, document),
    ):
        await (await bus.bucket(bucket)).put(key, encode(message))
    for subject in (
        subjects.task(namespace, job),
        subjects.turn(namespace, job, f"{uid}-t0-0-1", 0),
        subjects.episode(namespace, job),
        subjects.group(namespace, job, "policy"),
        subjects.step(namespace, job, uid, 0),
        subjects.evaluation(namespace, job, uid, 0),
        subjects.event(namespace, job, "trainer"),
    ):
        await bus.publish(subject, b"x")
    for stream, reader in CONSUMERS:
        await bus.consumer(stream, subjects.consumer(namespace, job, reader), _subject(stream, document))


def _subject(stream: str, document: JobDocument) -> str:
    namespace, job = document.namespace, document.job
    return {
        subjects.EPISODES: subjects.episode(namespace, job),
        subjects.TASKS: subjects.task(namespace, job),
        subjects.GROUPS: subjects.group(namespace, job, "policy"),
    }[stream]


async def all_there_is(bus: Bus, blobs: Blobs) -> set[str]:
    """Every key, message and blob, as text."""
    found = {f"blob {name}" for name in await blobs.list("")}
    for bucket in BUCKETS:
        found |= {f"{bucket} {entry.key}" for entry in await (await bus.bucket(bucket)).entries()}
    for stream in STREAMS:
        found |= {f"{stream} {stored.subject}" for stored in await bus.replay(stream, ">")}
    return found


async def document_of(bus: Bus, document: JobDocument) -> JobDocument | None:
    """What the bucket `jobs` says under the job's name."""
    entry = await (await bus.bucket(subjects.JOBS)).get(document.ref.key)
    return None if entry is None else decode_as(JobDocument, entry.data or b"")
