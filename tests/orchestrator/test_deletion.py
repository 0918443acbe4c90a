"""Deleting jobs that own one of everything: what is kept, and the same end with a kill between any two effects."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from tests.harness import a_manifest, changed
from tests.killing import Killed, kill_at
from tests.orchestrator.harness import OrchestratorHarness, a_job
from tests.tables import rows

from marlaas_api import failpoints, subjects
from marlaas_api.messages import JobDocument, Phase, Pin, PolicyRecord, TenantUsage, UsageAmounts
from marlaas_api.names import AdapterRef, job_prefix, train_group
from marlaas_api.wire import encode

BUCKETS = (subjects.JOBS, subjects.PROGRESS, subjects.POLICY, subjects.PINS)
STREAMS = (subjects.TASKS, subjects.TURNS, subjects.EPISODES, subjects.GROUPS, subjects.STEPS, subjects.EVENTS)
LEVEL = {"reason": "Training", "steps": 9, "started_at": 1.0}
PAST = {"name": "opponent", "policy": {"of": "policy", "versions": "past"}}
TEAM = ({"name": "policy"}, {"name": "critic", "poolRef": {"name": "big"}}, PAST)
"""Agents on two pools, one of which plays past versions of another."""
SEAMS = ("after_messages", "after_blobs", "after_policy", "after_rounds", "after_usage", "after_progress")

PUBLISHED = ("manifest", "adapter_model.safetensors", "adapter_config.json")


async def commit(harness, document, before, agent="policy"):
    """The blobs of one more version, as a trainer writes them, a broken commit's leftovers among them."""
    version, blobs = before.version + 1, harness.blobs
    folder = AdapterRef(document.namespace, document.job, document.uid, agent, version).blob_prefix
    names = ("adapter_model.safetensors", "adapter_config.json")
    files = {name: await blobs.put(folder, name, f"{name} {version}".encode()) for name in names}
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
    for player in document.spec.agents:
        pin = f"{document.ref.key}.{player.pinned_as}.{train_group(document.ref, 0)}"
        await harness.put(subjects.PINS, pin, Pin(version=0))
    episodes, tasks = subjects.episode(namespace, job), subjects.task(namespace, job)
    for subject in (
        tasks,
        subjects.job_log(namespace, job),
        subjects.turn(namespace, job, f"{uid}-t0-0-1", 0),
        episodes,
        subjects.step(namespace, job, uid, 0),
        subjects.evaluation(namespace, job, uid, 0),
        subjects.event(namespace, job, "trainer"),
    ):
        await harness.bus.publish(subject, b"x")
    for stream, reader, subject in ((subjects.EPISODES, "orchestrator", episodes), (subjects.TASKS, "sandbox", tasks)):
        await harness.bus.consumer(stream, subjects.consumer(namespace, job, reader), subject)


async def fill_agent(harness: OrchestratorHarness, document: JobDocument, agent: str) -> None:
    record = PolicyRecord(uid=document.uid)
    for _ in range(4):
        record = await commit(harness, document, record, agent)
    await harness.put_policy(record, document, agent)
    reader = subjects.consumer(document.namespace, document.job, agent, "trainer")
    await harness.bus.consumer(subjects.GROUPS, reader, subjects.job_log(document.namespace, document.job))


async def all_there_is(harness: OrchestratorHarness) -> set[str]:
    """Every key, message and blob, as text."""
    found = {f"blob {name}" for name in await harness.blobs.list("")}
    for bucket in BUCKETS:
        found |= {f"{bucket} {entry.key}" for entry in await (await harness.bus.bucket(bucket)).entries()}
    for stream in STREAMS:
        found |= {f"{stream} {stored.subject}" for stored in await harness.bus.replay(stream, ">")}
    return found


async def document_of(harness: OrchestratorHarness, document: JobDocument) -> JobDocument | None:
    return await harness.get(JobDocument, subjects.JOBS, document.ref.key)


async def is_forgotten(harness: OrchestratorHarness, document: JobDocument) -> None:
    async with asyncio.timeout(40):
        while await document_of(harness, document) is not None:
            await harness.server.change(0.05, None)


async def deleted(harness: OrchestratorHarness, document: JobDocument) -> set[str]:
    async with harness.orchestrating():
        await is_forgotten(harness, document)
    return await all_there_is(harness)


def doomed(retention: str = "delete", agents: Sequence[dict[str, Any]] = ()) -> JobDocument:
    return changed(a_job(agents=agents), adapter_retention=retention).model_copy(update={"deleted": True})


def neighbours() -> list[JobDocument]:
    """Jobs whose names begin alike; suspended, so that the orchestrator leaves them alone."""
    other = a_job(suspend=True).model_copy(update={"namespace": "team-a-2"})
    return [a_job("sums-2", suspend=True), a_job("sum", suspend=True), other]


def once(place: str, work: Callable[[], Coroutine[Any, Any, None]]) -> list[asyncio.Task[None]]:
    """Begin the work when the failpoint is passed for the first time."""
    begun: list[asyncio.Task[None]] = []

    def hook(name: str) -> None:
        if name == place and not begun:
            begun.append(asyncio.ensure_future(work()))

    failpoints.hook = hook
    return begun


@pytest.mark.parametrize(("is_team", "level", "kept"), rows(__file__, "kept"))
async def test_a_kept_adapter_is_the_published_one_and_nothing_else(harness, is_team, level, kept):
    job = doomed("keep", TEAM if is_team else ())
    await fill(harness, job, level)
    left = await deleted(harness, job)
    folders = [f"blob team-a/sums/uid-sums/{agent}/v{version}/" for agent, version in kept.items()]
    assert sorted(name.split("-", 3)[-1] for name in left) == sorted([*PUBLISHED] * len(kept))
    assert [sum(name.startswith(folder) for name in left) for folder in folders] == [len(PUBLISHED)] * len(kept)
    contents = list(harness.blobs.contents.values())
    assert all(f"adapter_model.safetensors {version}".encode() in contents for version in kept.values())


@pytest.mark.parametrize("retention", ["keep", "delete"])
@pytest.mark.parametrize("seam", SEAMS)
async def test_killed_between_any_two_effects_the_end_is_the_same_and_so_is_the_usage(harness, seam, retention):
    """Also what replicas report after the last write of its progress: the job is deleted while it runs."""
    job, used = doomed(retention), {"policy": UsageAmounts(generated_tokens=30, trained_tokens=30)}
    told = {"usage": used, "tokens": 40, "counted": {"tiny/rollout-0": (40, 1.0)}, "tenant": "acme"}
    await fill(harness, job, {"phase": Phase.RUNNING, "promoted": {"policy": 1}, **told})
    await harness.put_report(job_tokens={job.uid: 47}, job_engine_s={job.uid: 3.5})
    kill_at(place := f"orchestrator.delete.{seam}")
    left = await deleted(harness, job)
    assert harness.deaths == [place]
    assert len(left) == (3 if retention == "keep" else 0)
    assert all("policy/v1/" in name for name in left)
    account = await harness.get(TenantUsage, subjects.TENANTS, subjects.tenant_usage_key("acme"))
    assert (account.removed.trained_tokens, account.removed.unrecorded_tokens) == (30, 17)
    assert (account.removed.engine_s, account.removed.generated_tokens) == (2.5, 47)


@pytest.mark.parametrize("num_deleted", range(1, 13))
async def test_killed_while_blobs_go_the_published_adapter_stays(harness, num_deleted):
    job = doomed("keep")
    await fill(harness, job, {"phase": Phase.SUCCEEDED, "promoted": {"policy": 1}})
    delete, count = harness.blobs.delete, 0

    async def dying(name: str) -> None:
        nonlocal count
        count += 1
        if count == num_deleted:
            raise Killed(name)
        await delete(name)

    harness.blobs.delete = dying
    left = await deleted(harness, job)
    assert len(harness.deaths) == 1
    assert sorted(name.split("-", 3)[-1] for name in left) == sorted(PUBLISHED)
    assert b"adapter_model.safetensors 1" in harness.blobs.contents.values()


async def test_everything_of_a_deleted_job_is_gone_and_its_neighbours_are_untouched(harness):
    for other in neighbours():
        await fill(harness, other)
    before = await all_there_is(harness)
    await fill(harness, team := doomed(agents=TEAM))
    assert await deleted(harness, team) == before
    consumers = [harness.server.stream(name).consumers for name in (subjects.EPISODES, subjects.TASKS, subjects.GROUPS)]
    assert [len(names) for names in consumers] == [len(neighbours())] * 3
    assert not [name for names in consumers for name in names if name.startswith("team-a_sums_")]


async def test_a_job_that_only_waited_is_gone_at_once(harness, document):
    await harness.submit(document())
    async with harness.orchestrating():
        await harness.progress(document(), lambda progress: True)
        await harness.submit(doomed())
        await is_forgotten(harness, document())
    assert await all_there_is(harness) == set()


async def test_what_a_trainer_writes_too_late_goes_as_well(harness):
    await fill(harness, job := doomed())

    async def write() -> None:
        await harness.put_policy(await commit(harness, job, PolicyRecord(uid=job.uid, version=3)), job)

    late = once("orchestrator.delete.after_policy", write)
    assert await deleted(harness, job) == set()
    assert late


async def test_a_trainer_that_still_has_the_job_in_hand_is_waited_for(harness):
    await fill(harness, job := doomed())
    await harness.put_report("trainer", "t0", bound=("team-a.sums.uid-sums.policy@v3",))
    async with harness.orchestrating():
        holds = asyncio.create_task(is_forgotten(harness, job))
        await asyncio.sleep(0)
        assert not holds.done()
        assert await document_of(harness, job) is not None
        replicas = await harness.bus.bucket(subjects.REPLICAS)
        await replicas.delete(subjects.replica_key("trainer", "tiny", "t0"))
        await holds
    assert await all_there_is(harness) == set()


async def test_a_new_job_of_the_name_begins_only_when_nothing_of_the_old_one_is_left_but_its_adapter(harness, document):
    await fill(harness, document(agents=TEAM))
    await harness.submit(new := document(suspend=True).model_copy(update={"uid": "uid-new"}))
    async with harness.orchestrating():
        await harness.progress(new, lambda progress: True)
    left = await all_there_is(harness)
    assert {name for name in left if not name.startswith("blob")} == {"jobs team-a.sums", "progress team-a.sums"}
    assert await document_of(harness, new) == new
    assert {name.split("-", 3)[-1] for name in left if name.startswith("blob")} == set(PUBLISHED)


async def test_a_document_that_took_the_place_of_the_deleted_one_stays(harness, document):
    await fill(harness, doomed())
    new = document(suspend=True).model_copy(update={"uid": "uid-new"})
    once("orchestrator.delete.after_progress", lambda: harness.submit(new))
    async with harness.orchestrating():
        await harness.progress(new, lambda progress: True)
    assert await document_of(harness, new) == new
    assert not [name for name in await all_there_is(harness) if name.startswith("blob")]
