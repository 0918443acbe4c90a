"""The orchestrator's own process over the bus fake, with a hand-written sandbox and trainer that do just what the messages say."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from marlaas_api import subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory import MemoryBus, MemoryServer
from marlaas_api.messages import (
    Episode,
    FaultClass,
    GroupReady,
    JobDocument,
    Manifest,
    Phase,
    PolicyRecord,
    Progress,
    ReplicaReport,
    StepClosed,
    StepOutcome,
    StepRecord,
    Task,
)
from marlaas_api.names import AdapterRef, Split, episode_id
from marlaas_api.wire import decode, decode_as, encode
from marlaas_worker import failpoints
from marlaas_worker.orchestrator import service
from marlaas_worker.role import RoleContext

Rewards = Callable[[Task, int], float | None]


class Killed(BaseException):
    """The orchestrator died at a failpoint."""


class Moody(MemoryBus):
    """A connection that refuses every so many calls, if its stage says so."""

    stage: "Stage"

    async def check(self, subject: str = "x", data: bytes = b"") -> None:
        await super().check(subject, data)
        self.stage.calls += 1
        if self.stage.refuse_every and self.stage.calls % self.stage.refuse_every == 0:
            self.stage.refused += 1
            raise BusUnavailable("not now")


class Stage:
    """One bus, and everybody around the orchestrator."""

    calls = refuse_every = refused = 0

    def __init__(self, scratch: Path) -> None:
        self.server = MemoryServer()
        self.bus = self.server.connect("stage")
        self.blobs = MemoryBlobs()
        self.scratch = scratch
        self.trained: list[tuple[int, tuple[str, ...]]] = []
        self.deaths = 0

    def context(self, name: str) -> RoleContext:
        bus = Moody(self.server, name)
        bus.stage = self
        return RoleContext(name, bus, self.blobs, self.scratch)

    async def submit(self, document: JobDocument) -> None:
        bucket = await self.bus.bucket(subjects.JOBS)
        await bucket.put(document.ref.key, encode(document))

    async def report(self, document: JobDocument, version: int) -> None:
        names = tuple(
            AdapterRef("team-a", document.job, document.uid, "policy", v).engine_name for v in range(version + 1)
        )
        report = ReplicaReport(role="rollout", pool="tiny", replica="rollout-0", slots=8, max_rank=16, verified=names)
        await (await self.bus.bucket(subjects.REPLICAS)).put(
            subjects.replica_key("rollout", "tiny", "rollout-0"), encode(report)
        )

    async def orchestrate(self) -> None:
        """Run the orchestrator; a killed one is started again under the same name."""
        while True:
            try:
                await service.serve(self.context("orchestrator"))
            except* Killed:
                self.deaths += 1

    async def play(self, document: JobDocument, rewards: Rewards) -> None:
        bus = self.server.connect("sandbox")
        consumer = await bus.consumer(subjects.TASKS, "sandbox", subjects.task("team-a", document.job))
        while True:
            for delivery in await consumer.fetch(8, 1.0):
                task = decode_as(Task, delivery.stored.data)
                for member in range(task.group_size):
                    reward = rewards(task, member)
                    episode = Episode(
                        namespace=task.namespace,
                        job=task.job,
                        uid=task.uid,
                        group=task.group,
                        split=task.split,
                        index=task.index,
                        member=member,
                        episode=episode_id(task.group, member, 1),
                        fault=FaultClass.ENV if reward is None else None,
                        fault_text="ZeroDivisionError: in play" if reward is None else "",
                        rewards={} if reward is None else {"policy": reward},
                    )
                    await bus.publish(subjects.episode("team-a", task.job), encode(episode))
                await delivery.ack()

    async def commit(
        self, document: JobDocument, record: PolicyRecord, closed: StepClosed | None, names: tuple[str, ...]
    ) -> PolicyRecord:
        version = record.version + 1
        manifest = Manifest(
            namespace="team-a",
            job=document.job,
            uid=document.uid,
            agent="policy",
            version=version,
            step=closed.step if closed else -1,
            parent=record.manifest,
            rank=8,
            files={},
            state=None,
            tensor_digests={},
            probes=(),
            consumed=names,
            metrics={"loss": 0.5},
        )
        ref = await self.blobs.put("team-a/manifests", "manifest", encode(manifest))
        fresh = PolicyRecord(uid=document.uid, version=version, manifest=ref, step=manifest.step, epoch=1, holder="t")
        await (await self.bus.bucket(subjects.POLICY)).put(
            subjects.policy_key("team-a", document.job, "policy"), encode(fresh)
        )
        await self.report(document, version)
        return fresh

    async def train(self, document: JobDocument) -> None:
        record = await self.commit(document, PolicyRecord(uid=document.uid), None, ())
        bus = self.server.connect("trainer")
        consumer = await bus.consumer(subjects.GROUPS, "trainer", subjects.group("team-a", document.job, "policy"))
        ready: dict[int, list[GroupReady]] = {}
        while True:
            for delivery in await consumer.fetch(8, 1.0):
                message = decode(delivery.stored.data)
                await delivery.ack()
                if isinstance(message, GroupReady):
                    groups = ready.setdefault(message.step, [])
                    assert message.position == len(groups), "positions are dense and in order"
                    groups.append(message)
                elif isinstance(message, StepClosed):
                    groups = ready.pop(message.step)
                    assert message.num_groups == len(groups)
                    assert message.base_version == record.version
                    names = tuple(group.group for group in groups)
                    self.trained.append((message.step, names))
                    record = await self.commit(document, record, message, names)

    async def progress(self, document: JobDocument, until: Callable[[Progress], bool]) -> Progress:
        async with asyncio.timeout(30), (await self.bus.bucket(subjects.PROGRESS)).watch() as entries:
            async for entry in entries:
                if entry.data and until(level := decode_as(Progress, entry.data)) and level.uid == document.uid:
                    return level
        raise AssertionError("the watch ended")

    async def steps(self, document: JobDocument) -> list[StepRecord]:
        stored = await self.bus.replay(subjects.STEPS, f"step.team-a.{document.job}.*")
        return [decode_as(StepRecord, one.data) for one in stored]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path)
    await made.bus.ensure()
    yield made
    failpoints.hook = None


@contextlib.asynccontextmanager
async def running(stage: Stage, document: JobDocument, rewards: Rewards) -> AsyncIterator[None]:
    await stage.report(document, -1)
    await stage.submit(document)
    tasks = [
        asyncio.create_task(one) for one in (stage.orchestrate(), stage.play(document, rewards), stage.train(document))
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


def final(level: Progress) -> bool:
    return level.phase.final


def mixed(task: Task, member: int) -> float:
    return float(member == 0)


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_a_job_runs_to_its_end_every_index_once_every_step_full(stage, document, staleness):
    job = document(maxStaleness=staleness, steps=5)
    async with running(stage, job, mixed):
        level = await stage.progress(job, final)
    assert (level.phase, level.step, level.versions) == (Phase.SUCCEEDED, 5, {"policy": 5})
    assert level.eval_before is not None
    assert level.promoted == {"policy": 5}
    assert [step for step, _ in stage.trained] == [0, 1, 2, 3, 4]
    names = [name for _, groups in stage.trained for name in groups]
    assert len(names) == len(set(names)) == 10
    records = await stage.steps(job)
    assert [record.step for record in records] == [0, 1, 2, 3, 4]
    assert all(record.staleness_max <= staleness for record in records)
    assert records[0].metrics == {"loss": 0.5}


async def test_a_solved_job_finishes_with_counted_steps_and_no_new_version(stage, document):
    job = document(steps=3)
    async with running(stage, job, lambda task, member: 1.0):
        level = await stage.progress(job, final)
    assert (level.phase, level.step, level.versions) == (Phase.SUCCEEDED, 3, {"policy": 0})
    assert [record.outcome for record in await stage.steps(job)] == [StepOutcome.NO_OP] * 3
    assert [record.num_zero_variance for record in await stage.steps(job)] == [4, 4, 4]


async def test_an_environment_that_always_fails_fails_the_job_with_its_own_words(stage, document):
    job = document()
    async with running(stage, job, lambda task, member: None):
        level = await stage.progress(job, final)
    assert (level.phase, level.reason) == (Phase.FAILED, "TooManyFaults")
    assert "ZeroDivisionError: in play" in level.message


async def test_faults_are_masked_counted_and_not_scored(stage, document):
    job = document(steps=2)

    def faulty(task: Task, member: int) -> float | None:
        if task.split is Split.TRAIN and task.index == 0:
            return None
        return float(member == 0)

    async with running(stage, job, faulty):
        level = await stage.progress(job, final)
    assert level.phase is Phase.SUCCEEDED
    assert level.faults == {"env": 2}
    assert all("t0" not in name.rsplit("-", 1)[1] for _, groups in stage.trained for name in groups)
    assert (await stage.steps(job))[0].reward_mean == 0.5


SEAMS = (
    "orchestrator.issue.after_ledger",
    "orchestrator.issue.after_task",
    "orchestrator.assign.after_log",
    "orchestrator.record.after_step",
)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("passes", [1, 2, 5])
@pytest.mark.parametrize("seam", SEAMS)
async def test_killed_between_any_two_effects_it_goes_on_without_losing_or_doubling(
    stage, document, seam, passes, staleness
):
    job = document(maxStaleness=staleness, steps=3)
    count = 0

    def hook(name: str) -> None:
        nonlocal count
        if name == seam:
            count += 1
            if count == passes:
                raise Killed(name)

    failpoints.hook = hook
    async with running(stage, job, mixed):
        level = await stage.progress(job, final)
    if count >= passes:
        assert stage.deaths >= 1
    assert (level.phase, level.step, level.versions) == (Phase.SUCCEEDED, 3, {"policy": 3})
    names = [name for _, groups in stage.trained for name in groups]
    assert len(names) == len(set(names)) == 6
    records = await stage.steps(job)
    assert [record.step for record in records] == [0, 1, 2]
    assert sorted(index for record in records for index in record.indices) == list(range(6))


async def test_a_job_that_every_trainer_has_given_up_fails_in_the_trainers_words(stage, document):
    job = document(steps=50)
    async with running(stage, job, mixed):
        await stage.progress(job, lambda level: level.step >= 1)
        bucket = await stage.bus.bucket(subjects.REPLICAS)
        for name, broken in (("t0", {job.uid: "turn 3 carries version 9"}), ("t1", {})):
            report = ReplicaReport(role="trainer", pool="tiny", replica=name, broken=broken)
            await bucket.put(subjects.replica_key("trainer", "tiny", name), encode(report))
        level = await stage.progress(job, lambda level: level.step >= 3)
        assert not level.phase.final, "another trainer may still take it"
        await bucket.delete(subjects.replica_key("trainer", "tiny", "t1"))
        level = await stage.progress(job, final)
    assert (level.phase, level.reason, level.message) == (Phase.FAILED, "TrainingFailed", "turn 3 carries version 9")


async def test_a_job_that_can_never_fit_is_refused_at_once(stage, document):
    job = document(rank=64)
    async with running(stage, job, mixed):
        level = await stage.progress(job, final)
    assert (level.phase, level.reason) == (Phase.FAILED, "RankTooLarge")


async def test_suspended_then_resumed_it_ends_as_if_nothing_had_happened(stage, document):
    job = document(steps=4)
    async with running(stage, job, mixed):
        await stage.progress(job, lambda level: level.step >= 1)
        await stage.submit(
            job.model_copy(update={"spec": job.spec.model_copy(update={"suspend": True}), "generation": 2})
        )
        await stage.progress(job, lambda level: level.phase is Phase.SUSPENDED)
        await stage.submit(job.model_copy(update={"generation": 3}))
        level = await stage.progress(job, final)
    assert (level.phase, level.step) == (Phase.SUCCEEDED, 4)
    names = [name for _, groups in stage.trained for name in groups]
    assert len(names) == len(set(names)) == 8


async def test_more_steps_reopen_a_finished_job(stage, document):
    job = document(steps=2)
    async with running(stage, job, mixed):
        await stage.progress(job, final)
        more = document(steps=3).model_copy(update={"generation": 2})
        await stage.submit(more)
        level = await stage.progress(job, lambda level: level.phase.final and level.step == 3)
    assert level.versions == {"policy": 3}


async def test_a_bus_that_answers_only_now_and_then_delays_but_changes_nothing(stage, document):
    job = document(steps=4, maxStaleness=1)
    stage.refuse_every = 31
    async with running(stage, job, mixed):
        level = await stage.progress(job, final)
    assert stage.refused > 3
    assert (level.phase, level.step, level.versions) == (Phase.SUCCEEDED, 4, {"policy": 4})
    names = [name for _, groups in stage.trained for name in groups]
    assert len(names) == len(set(names)) == 8


async def test_a_standby_waits_and_takes_over_when_the_leader_is_gone(stage, document):
    job = document(steps=3)
    first, second = stage.context("one"), stage.context("two")
    leader = asyncio.create_task(service.serve(first))
    await stage.report(job, -1)
    await stage.submit(job)
    await stage.progress(job, lambda level: level.admitted)
    standby = asyncio.create_task(service.serve(second))
    first.stop.set()
    await leader
    players = [asyncio.create_task(one) for one in (stage.play(job, mixed), stage.train(job))]
    level = await stage.progress(job, final)
    assert level.phase is Phase.SUCCEEDED
    second.stop.set()
    await standby
    for player in players:
        player.cancel()
    await asyncio.gather(*players, return_exceptions=True)
