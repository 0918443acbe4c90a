"""Deleting jobs: on a real nats-server with a folder of blobs, and on the fakes with a kill between any two effects."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.killing import Killed, kill_at
from tests.orchestrator.harness import OrchestratorHarness
from tests.orchestrator.remains import (
    TEAM,
    all_there_is,
    commit,
    deleted,
    document_of,
    doomed,
    fill,
    is_forgotten,
    neighbours,
)

from marlaas_api import failpoints, subjects
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus_nats import connect
from marlaas_api.messages import JobDocument, Phase, PolicyRecord
from marlaas_api.nats_server import EmbeddedNats
from marlaas_worker.orchestrator import deletion

SEAMS = ("after_messages", "after_blobs", "after_policy", "after_rounds", "after_usage", "after_level")

PUBLISHED = ("manifest", "adapter_model.safetensors", "adapter_config.json")


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[OrchestratorHarness]:
    async with EmbeddedNats(tmp_path / "nats") as server:
        blobs = open_blobs(tmp_path / "blobs")
        made = OrchestratorHarness(tmp_path, dial=lambda name: connect(server.url, name=name), blobs=blobs)
        made.bus = await made.connect("test")
        await made.bus.ensure()
        yield made
        await made.bus.close()


@pytest.fixture
def fake(harness: OrchestratorHarness, monkeypatch: pytest.MonkeyPatch) -> OrchestratorHarness:
    monkeypatch.setattr(deletion, "ROUND_S", 0.02)
    return harness


def once(place: str, work: Callable[[], Coroutine[Any, Any, None]]) -> list[asyncio.Task[None]]:
    """Begin the work when the failpoint is passed for the first time."""
    begun: list[asyncio.Task[None]] = []

    def hook(name: str) -> None:
        if name == place and not begun:
            begun.append(asyncio.ensure_future(work()))

    failpoints.hook = hook
    return begun


async def test_everything_of_a_deleted_job_is_gone_and_its_neighbours_are_untouched(real):
    for other in neighbours():
        await fill(real, other)
    before = await all_there_is(real)
    team = doomed(agents=TEAM)
    await fill(real, team)
    assert await deleted(real, team) == before
    link = real.bus._jetstream
    for stream, kept in ((subjects.EPISODES, 3), (subjects.TASKS, 3), (subjects.GROUPS, 3)):
        names = (await link.api(f"CONSUMER.NAMES.{stream}", "list consumers"))["consumers"]
        assert not [name for name in names if name.startswith("team-a_sums_")]
        assert len(names) == kept


async def test_a_removed_key_leaves_no_trace_for_ever(real):
    await fill(real, doomed())
    await deleted(real, doomed())
    request = {"last_by_subj": "$KV.jobs.team-a.sums"}
    answer = await real.bus._jetstream.api("STREAM.MSG.GET.KV_jobs", "read a marker", request)
    assert b"Nats-TTL: 1h" in base64.b64decode(answer["message"]["hdrs"])


@pytest.mark.parametrize(
    ("agents", "level", "kept"),
    [
        ((), {"phase": Phase.SUCCEEDED, "admitted": False, "promoted": {"policy": 2}}, {"policy": 2}),
        ((), {"phase": Phase.SUCCEEDED, "admitted": False, "promoted": {"policy": 0}}, {"policy": 0}),
        ((), {"phase": Phase.RUNNING}, {"policy": 3}),
        ((), {"phase": Phase.RUNNING, "versions": {"policy": 0}}, {}),
        (TEAM, {"phase": Phase.SUCCEEDED, "promoted": {"policy": 2, "critic": 1}}, {"policy": 2, "critic": 1}),
        (TEAM, {"phase": Phase.RUNNING, "versions": {"policy": 0, "critic": 3}}, {"critic": 3}),
    ],
)
async def test_a_kept_adapter_is_the_published_one_and_nothing_else(fake, agents, level, kept):
    job = doomed("keep", agents)
    await fill(fake, job, level)
    left = await deleted(fake, job)
    folders = [f"blob team-a/sums/uid-sums/{agent}/v{version}/" for agent, version in kept.items()]
    assert sorted(name.split("-", 3)[-1] for name in left) == sorted([*PUBLISHED] * len(kept))
    assert [sum(name.startswith(folder) for name in left) for folder in folders] == [len(PUBLISHED)] * len(kept)
    contents = list(fake.blobs.contents.values())
    assert all(f"adapter_model.safetensors {version}".encode() in contents for version in kept.values())


@pytest.mark.parametrize("retention", ["keep", "delete"])
@pytest.mark.parametrize("seam", SEAMS)
async def test_killed_between_any_two_effects_the_end_is_the_same(fake, seam, retention):
    job = doomed(retention)
    await fill(fake, job, {"phase": Phase.SUCCEEDED, "promoted": {"policy": 1}})
    kill_at(place := f"orchestrator.delete.{seam}")
    left = await deleted(fake, job)
    assert fake.deaths == [place]
    assert len(left) == (3 if retention == "keep" else 0)
    assert all("policy/v1/" in name for name in left)


@pytest.mark.parametrize("num_deleted", range(1, 13))
async def test_killed_while_blobs_go_the_published_adapter_stays(fake, num_deleted):
    job = doomed("keep")
    await fill(fake, job, {"phase": Phase.SUCCEEDED, "promoted": {"policy": 1}})
    delete, count = fake.blobs.delete, 0

    async def dying(name: str) -> None:
        nonlocal count
        count += 1
        if count == num_deleted:
            raise Killed(name)
        await delete(name)

    fake.blobs.delete = dying
    left = await deleted(fake, job)
    assert len(fake.deaths) == 1
    assert sorted(name.split("-", 3)[-1] for name in left) == sorted(PUBLISHED)
    assert b"adapter_model.safetensors 1" in fake.blobs.contents.values()


async def test_a_job_that_only_waited_is_gone_at_once(fake, document):
    await fake.submit(document())
    async with fake.orchestrating():
        await fake.progress(document(), lambda progress: True)
        await fake.submit(doomed())
        await is_forgotten(fake, document())
    assert await all_there_is(fake) == set()


async def test_what_a_trainer_writes_too_late_goes_as_well(fake):
    await fill(fake, job := doomed())

    async def write() -> None:
        await fake.put_policy(await commit(fake, job, PolicyRecord(uid=job.uid, version=3)), job)

    late = once("orchestrator.delete.after_policy", write)
    assert await deleted(fake, job) == set()
    assert late


async def test_a_trainer_that_still_has_the_job_in_hand_is_waited_for(fake):
    await fill(fake, job := doomed())
    await fake.put_report("trainer", "t0", bound=("team-a.sums.uid-sums.policy@v3",))
    async with fake.orchestrating():
        holds = asyncio.create_task(is_forgotten(fake, job))
        await asyncio.sleep(0)
        assert not holds.done()
        assert await document_of(fake, job) is not None
        replicas = await fake.bus.bucket(subjects.REPLICAS)
        await replicas.delete(subjects.replica_key("trainer", "tiny", "t0"))
        await holds
    assert await all_there_is(fake) == set()


async def test_a_new_job_of_the_name_begins_only_when_nothing_of_the_old_one_is_left_but_its_adapter(fake, document):
    await fill(fake, document(agents=TEAM))
    await fake.submit(new := document(suspend=True).model_copy(update={"uid": "uid-new"}))
    async with fake.orchestrating():
        await fake.progress(new, lambda progress: True)
    left = await all_there_is(fake)
    assert {name for name in left if not name.startswith("blob")} == {"jobs team-a.sums", "progress team-a.sums"}
    assert await document_of(fake, new) == new
    assert {name.split("-", 3)[-1] for name in left if name.startswith("blob")} == set(PUBLISHED)


async def test_a_document_that_took_the_place_of_the_deleted_one_stays(fake, document):
    await fill(fake, doomed())
    new = document(suspend=True).model_copy(update={"uid": "uid-new"})
    once("orchestrator.delete.after_level", lambda: fake.submit(new))
    async with fake.orchestrating():
        await fake.progress(new, lambda progress: True)
    assert await document_of(fake, new) == new
    assert not [name for name in await all_there_is(fake) if name.startswith("blob")]


async def test_a_job_that_was_found_unable_to_go_on_fails_with_those_words(fake, document):
    verdict = {"reason": "BackoffLimitExceeded", "message": "sandbox sums-sandbox crashed 7 times: exit code 1"}
    job = document()
    await fill(fake, job)
    await fake.submit(JobDocument.model_validate({**job.model_dump(), "verdict": verdict}))
    async with fake.orchestrating():
        level = await fake.progress(job, lambda progress: progress.phase is Phase.FAILED)
    assert (level.reason, level.message, level.admitted) == (verdict["reason"], verdict["message"], False)
    assert level.versions == {"policy": 3}, "what it had reached stays"
    assert level.finished_at is not None
