"""Deleting jobs: on a real nats-server with a folder of blobs, and on the fakes with a kill between any two effects."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.orchestrator.harness import Killed
from tests.orchestrator.places import Place, doomed, neighbours
from tests.orchestrator.remains import commit, document_of, fill

from marlaas_api import failpoints, subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus import Bus
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_nats import connect
from marlaas_api.messages import JobDocument, Phase, PolicyRecord, ReplicaReport
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import encode
from marlaas_worker.orchestrator import deletion

SEAMS = ("after_messages", "after_blobs", "after_policy", "after_rounds", "after_level")

PUBLISHED = ("manifest", "adapter_model.safetensors", "adapter_config.json")


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[Place]:
    async with EmbeddedNats(tmp_path / "nats") as server:
        place = Place(lambda name: connect(server.url, name=name), open_blobs(tmp_path / "blobs"), tmp_path)
        place.bus = await place.dial("test")
        await place.bus.ensure()
        yield place
        await place.bus.close()


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(deletion, "ROUND_S", 0.02)
    server = MemoryServer()

    async def dial(name: str) -> Bus:
        return server.connect(name)

    place = Place(dial, MemoryBlobs(), tmp_path)
    place.bus = await dial("test")
    await place.bus.ensure()
    yield place
    failpoints.hook = None


async def test_everything_of_a_deleted_job_is_gone_and_its_neighbours_are_untouched(real, document):
    for other in neighbours(document):
        await fill(real.bus, real.blobs, other)
    before = await real.all_there_is()
    await fill(real.bus, real.blobs, doomed(document))
    async with real.orchestrating():
        await real.is_forgotten(doomed(document))
    assert await real.all_there_is() == before
    link = real.bus._jetstream
    for stream, kept in ((subjects.EPISODES, 3), (subjects.TASKS, 3), (subjects.GROUPS, 3)):
        names = (await link.api(f"CONSUMER.NAMES.{stream}", "list consumers"))["consumers"]
        assert not [name for name in names if name.startswith("team-a_sums_")]
        assert len(names) == kept


async def test_a_removed_key_leaves_no_trace_for_ever(real, document):
    await fill(real.bus, real.blobs, doomed(document))
    async with real.orchestrating():
        await real.is_forgotten(doomed(document))
    request = {"last_by_subj": "$KV.jobs.team-a.sums"}
    answer = await real.bus._jetstream.api("STREAM.MSG.GET.KV_jobs", "read a marker", request)
    assert b"Nats-TTL: 1h" in base64.b64decode(answer["message"]["hdrs"])


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ({"phase": Phase.SUCCEEDED, "admitted": False, "promoted": {"policy": 2}}, 2),
        ({"phase": Phase.SUCCEEDED, "admitted": False, "promoted": {"policy": 0}}, 0),
        ({"phase": Phase.RUNNING}, 3),
        ({"phase": Phase.RUNNING, "versions": {"policy": 0}}, None),
    ],
)
async def test_a_kept_adapter_is_the_published_one_and_nothing_else(fake, document, level, kept):
    job = doomed(document, "keep")
    await fill(fake.bus, fake.blobs, job, level)
    async with fake.orchestrating():
        await fake.is_forgotten(job)
    left = await fake.all_there_is()
    folder = f"blob team-a/sums/uid-sums/policy/v{kept}/"
    assert sorted(name.split("-", 3)[-1] for name in left) == (sorted(PUBLISHED) if kept is not None else [])
    assert all(name.startswith(folder) for name in left)
    contents = list(fake.blobs.contents.values())
    assert kept is None or f"adapter_model.safetensors {kept}".encode() in contents


@pytest.mark.parametrize("retention", ["keep", "delete"])
@pytest.mark.parametrize("seam", SEAMS)
async def test_killed_between_any_two_effects_the_end_is_the_same(fake, document, seam, retention):
    job = doomed(document, retention)
    await fill(fake.bus, fake.blobs, job, {"phase": Phase.SUCCEEDED, "promoted": {"policy": 1}})
    passed = False

    def hook(name: str) -> None:
        nonlocal passed
        if name == f"orchestrator.delete.{seam}" and not passed:
            passed = True
            raise Killed(name)

    failpoints.hook = hook
    async with fake.orchestrating():
        await fake.is_forgotten(job)
    assert fake.deaths == 1
    left = await fake.all_there_is()
    assert len(left) == (3 if retention == "keep" else 0)
    assert all("policy/v1/" in name for name in left)


@pytest.mark.parametrize("num_deleted", range(1, 13))
async def test_killed_while_blobs_go_the_published_adapter_stays(fake, document, num_deleted):
    job = doomed(document, "keep")
    await fill(fake.bus, fake.blobs, job, {"phase": Phase.SUCCEEDED, "promoted": {"policy": 1}})
    delete, count = fake.blobs.delete, 0

    async def dying(name: str) -> None:
        nonlocal count
        count += 1
        if count == num_deleted:
            raise Killed(name)
        await delete(name)

    fake.blobs.delete = dying
    async with fake.orchestrating():
        await fake.is_forgotten(job)
    assert fake.deaths == 1
    left = await fake.all_there_is()
    assert sorted(name.split("-", 3)[-1] for name in left) == sorted(PUBLISHED)
    assert b"adapter_model.safetensors 1" in fake.blobs.contents.values()


async def test_a_job_that_only_waited_is_gone_at_once(fake, document):
    await fake.put(document())

    async def told() -> bool:
        return await fake.level(document()) is not None

    async with fake.orchestrating():
        await fake.until(told)
        await fake.put(doomed(document))
        await fake.is_forgotten(document())
    assert await fake.all_there_is() == set()


async def test_what_a_trainer_writes_too_late_goes_as_well(fake, document):
    job = doomed(document)
    await fill(fake.bus, fake.blobs, job)
    late = False

    async def write() -> None:
        record = await commit(fake.blobs, job, PolicyRecord(uid=job.uid, version=3))
        await (await fake.bus.bucket(subjects.POLICY)).put(f"{job.ref.key}.policy", encode(record))

    def hook(name: str) -> None:
        nonlocal late
        if name == "orchestrator.delete.after_policy" and not late:
            late = True
            writing.append(asyncio.ensure_future(write()))

    writing: list[asyncio.Future[None]] = []
    failpoints.hook = hook
    async with fake.orchestrating():
        await fake.is_forgotten(job)
    assert late
    assert await fake.all_there_is() == set()


async def test_a_trainer_that_still_has_the_job_in_hand_is_waited_for(fake, document):
    job = doomed(document)
    await fill(fake.bus, fake.blobs, job)
    replicas = await fake.bus.bucket(subjects.REPLICAS)
    key = subjects.replica_key("trainer", "tiny", "t0")
    bound = ReplicaReport(role="trainer", pool="tiny", replica="t0", bound=("team-a.sums.uid-sums.policy@v3",))
    await replicas.put(key, encode(bound))
    async with fake.orchestrating():
        holds = asyncio.create_task(fake.is_forgotten(job))
        await asyncio.sleep(0)
        assert not holds.done()
        assert await document_of(fake.bus, job) is not None
        await replicas.delete(key)
        await holds
    assert await fake.all_there_is() == set()


async def test_a_new_job_of_the_name_begins_only_when_nothing_of_the_old_one_is_left_but_its_adapter(fake, document):
    await fill(fake.bus, fake.blobs, document())
    new = document(suspend=True).model_copy(update={"uid": "uid-new"})
    await fake.put(new)

    async def told() -> bool:
        level = await fake.level(new)
        return level is not None and level.uid == "uid-new"

    async with fake.orchestrating():
        await fake.until(told)
    left = await fake.all_there_is()
    assert {name for name in left if not name.startswith("blob")} == {"jobs team-a.sums", "progress team-a.sums"}
    assert await document_of(fake.bus, new) == new
    assert {name.split("-", 3)[-1] for name in left if name.startswith("blob")} == set(PUBLISHED)


async def test_a_document_that_took_the_place_of_the_deleted_one_stays(fake, document):
    await fill(fake.bus, fake.blobs, doomed(document))
    new = document(suspend=True).model_copy(update={"uid": "uid-new"})
    data, replaced = encode(new), False

    def hook(name: str) -> None:
        nonlocal replaced
        if name == "orchestrator.delete.after_level" and not replaced:
            replaced = True
            writing.append(asyncio.ensure_future(fake.put(new)))

    async def told() -> bool:
        level = await fake.level(new)
        return level is not None and level.uid == "uid-new"

    writing: list[asyncio.Future[None]] = []
    failpoints.hook = hook
    async with fake.orchestrating():
        await fake.until(told)
    found = await document_of(fake.bus, new)
    assert found is not None
    assert encode(found) == data
    assert not [name for name in await fake.all_there_is() if name.startswith("blob")]


async def test_a_job_that_was_found_unable_to_go_on_fails_with_those_words(fake, document):
    verdict = {"reason": "BackoffLimitExceeded", "message": "sandbox sums-sandbox crashed 7 times: exit code 1"}
    job = document()
    await fill(fake.bus, fake.blobs, job)
    await fake.put(JobDocument.model_validate({**job.model_dump(), "verdict": verdict}))

    async def ended() -> bool:
        level = await fake.level(job)
        return level is not None and level.phase is Phase.FAILED

    async with fake.orchestrating():
        await fake.until(ended)
    level = await fake.level(job)
    assert level is not None
    assert (level.reason, level.message, level.admitted) == (verdict["reason"], verdict["message"], False)
    assert level.versions == {"policy": 3}, "what it had reached stays"
    assert level.finished_at is not None
