"""The orchestrator's harness: a hand-written sandbox and trainer that do just what the messages say, and a bus that may refuse calls."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Sequence
from pathlib import Path
from typing import Any

from tests.harness import WITHIN_S, Harness, a_manifest, a_turn, an_episode, identity, job_document, working

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusUnavailable, RevisionConflict
from marlaas_api.bus_memory import MemoryBus
from marlaas_api.messages import (
    AgentClosed,
    FaultClass,
    GroupDecided,
    GroupReady,
    JobAgent,
    JobDocument,
    Meter,
    PolicyRecord,
    Progress,
    StepClosed,
    TaskMessage,
    agents_on,
)
from marlaas_api.names import PREEMPTION_STRIDE, Split, episode_id
from marlaas_api.wire import decode, decode_as, encode
from marlaas_worker.orchestrator import service
from tests import virtual_time

ADMITTED = "orchestrator.admit.after_progress"
"""Passed once in a job's life; the other seams again and again."""
_SEAMS = "issue.after_log issue.after_task assign.after_log record.after_step purge.after_log purge.after_turns"
SEAMS = (ADMITTED, *(f"orchestrator.{seam}" for seam in _SEAMS.split()))
TRAIN_S = 0.2
"""Virtual seconds of an optimizer step: while something is always ready, virtual time stands still, and no timer fires."""

Rewards = Callable[[TaskMessage, int], float | None]


class FlakyBus(MemoryBus):
    """A connection that refuses every so many calls, if its harness says so."""

    harness: "OrchestratorHarness"

    async def check(self, subject: str = "x", data: bytes = b"") -> None:
        await super().check(subject, data)
        self.harness.calls += 1
        if self.harness.refuse_every and self.harness.calls % self.harness.refuse_every == 0:
            self.harness.refused += 1
            raise BusUnavailable("not now")


class OrchestratorHarness(Harness):
    """One bus, and the roles around the orchestrator."""

    calls = refuse_every = refused = 0
    pause_after = 0
    """Steps after which the trainer waits for `may_train`; 0: it never waits by itself."""
    meter = Meter(prompt_tokens=0, output_tokens=0)
    """Of every turn."""
    kv_tokens = 0
    """Of every pool's replica; 1: a pool has room for one job."""
    turn_bytes = 0
    """Of the one turn that each episode has; 0: there are no turns."""
    withheld: Container[int] = ()
    """Indices of training groups that the sandbox does not play yet."""

    def __init__(self, scratch: Path, **fields: Any) -> None:
        super().__init__(scratch, **({} if "dial" in fields else {"clock": virtual_time.now}) | fields)
        self.trained: list[tuple[int, tuple[str, ...]]] = []
        self.generated: Counter[str] = Counter()
        self.may_train = asyncio.Event()
        self.may_train.set()
        self.step_metrics = {"loss": 0.5}
        self.fault: dict[str, Any] = {"fault_text": "ZeroDivisionError: in play"}
        self.load_notes: tuple[str, ...] = ()
        self.data_digest = ""

    @property
    def trained_groups(self) -> list[str]:
        return [name for _, groups in self.trained for name in groups]

    async def connect(self, name: str) -> Bus:
        if self.dial is not None:
            return await self.dial(name)
        bus = FlakyBus(self.server, name)
        bus.harness = self
        return bus

    def orchestrating(self, name: str = "orchestrator") -> contextlib.AbstractAsyncContextManager[asyncio.Task[None]]:
        return self.role(name, service.serve)

    async def report(self, document: JobDocument, version: int) -> None:
        """Report the job's versions up to this one as verified, in each of its pools."""
        for pool in document.pools:
            await self.report_pool(pool, document, version)

    async def report_pool(self, pool: str, document: JobDocument, version: int) -> None:
        served = [one.adapter(number) for one in agents_on(pool, document) for number in range(version + 1)]
        names = tuple(one.engine_name for one in served)
        await self.put_report(pool=pool, slots=8, max_rank=16, kv_tokens=self.kv_tokens, verified=names)

    async def play(self, document: JobDocument, rewards: Rewards) -> None:
        bus = self.server.connect("sandbox")
        name = subjects.consumer("team-a", document.job, "sandbox")
        consumer = await bus.consumer(subjects.TASKS, name, subjects.task("team-a", document.job))
        while True:
            for delivery in await consumer.fetch(8, 1.0):
                task = decode_as(TaskMessage, delivery.stored.data)
                if task.split is Split.TRAIN and task.index in self.withheld:
                    await delivery.nak(0.05)
                    continue
                for member in sorted({*range(task.group_size)} - {*task.ended}):
                    await self.play_member(document, task, member, rewards)
                await delivery.ack()

    async def play_member(self, document: JobDocument, task: TaskMessage, member: int, rewards: Rewards) -> None:
        reward = rewards(task, member)
        names = [agent.name for agent in document.spec.agents]
        are_turns = self.turn_bytes or len(names) > 1
        leaves = {name: (at,) for at, name in enumerate(names)} if are_turns else {}
        for name, (at,) in leaves.items():
            await self.record_turn(task, member, turn=at, agent=name)
        place = task.model_dump(include={"group", "split", "index"})
        ended = {"rewards": dict.fromkeys(names, reward), "leaves": leaves, "load_notes": self.load_notes}
        ended |= {"data_digest": self.data_digest}
        if reward is None:
            ended = {"fault": FaultClass.ENV, **self.fault}
        episode = an_episode(document, **place, member=member, episode=_play_of(task, member), **ended)
        await self.bus.publish(subjects.episode("team-a", task.job), encode(episode))

    async def record_turn(self, task: TaskMessage, member: int, attempt: int = 1, **fields: Any) -> None:
        """As the rollout role does: the first record counts, and a full stream is waited for."""
        episode = _play_of(task, member, attempt)
        place = {"group": task.group, "member": member, "episode": episode, "num_preemptions": task.num_preemptions}
        content = {"prompt_ids": bytes(self.turn_bytes), "meter": self.meter}
        turn = a_turn(**{**identity(task), **place, **content, **fields})
        with contextlib.suppress(RevisionConflict):
            while True:
                try:
                    subject = subjects.turn("team-a", task.job, episode, turn.turn)
                    await self.bus.publish(subject, encode(turn), expect_last=0)
                except BusUnavailable:
                    await asyncio.sleep(0.01)
                else:
                    self.generated[task.uid] += turn.meter.output_tokens
                    return

    async def decision(self, document: JobDocument, reader: str) -> GroupDecided:
        """The first decision about a group that a new reader of the job's log finds."""
        consumer = await self.bus.consumer(subjects.GROUPS, reader, subjects.job_log("team-a", document.job))
        while True:
            for delivery in await consumer.fetch(1, WITHIN_S):
                entry = decode(delivery.stored.data)
                if isinstance(entry, GroupDecided):
                    return entry

    async def read_turns(self, group: GroupReady) -> None:
        for trajectory in group.trajectories:
            for leaf in trajectory.leaves:
                subject = subjects.turn("team-a", group.job, trajectory.episode, leaf)
                assert await self.bus.last(subjects.TURNS, subject) is not None, f"{subject} is lost"

    async def commit(
        self, trained: JobAgent, record: PolicyRecord, closed: AgentClosed | None, names: tuple[str, ...]
    ) -> PolicyRecord:
        await asyncio.sleep(TRAIN_S)
        document = trained.document
        version, step = record.version + 1, closed.step if closed else -1
        made = {
            "step": step,
            "parent": record.manifest,
            "consumed": names,
            "metrics": self.step_metrics,
            "train_s": 1.5,
        }
        manifest = a_manifest(document, version, agent=trained.agent.name, **made)
        ref = await self.blobs.put("team-a/manifests", "manifest", encode(manifest))
        held = {"epoch": 1, "holder": "t"}
        fresh = PolicyRecord(uid=document.uid, version=version, manifest=ref, step=step, **held)
        await self.put(subjects.POLICY, trained.policy_key, fresh)
        await self.report(document, version)
        await self._renew(subjects.replica_key("trainer", document.pool_of(trained.agent), "t0"))
        return fresh

    async def _renew(self, report: str) -> None:
        """Put a report again as it is, if it is there: reports expire after ten seconds."""
        bucket = await self.bus.bucket(subjects.REPLICAS)
        entry = await bucket.get(report)
        if entry is not None and entry.data:
            await bucket.put(report, entry.data)

    async def train(self, document: JobDocument, may_train: asyncio.Event | None = None) -> None:
        agents = (JobAgent(document, agent) for agent in document.spec.agents)
        async with asyncio.TaskGroup() as group:
            for one in agents:
                group.create_task(self.train_agent(one, may_train))

    async def train_agent(self, trained: JobAgent, may_train: asyncio.Event | None = None) -> None:
        document = trained.document
        await self.put_report("trainer", "t0", pool=document.pool_of(trained.agent))
        record = await self.commit(trained, PolicyRecord(uid=document.uid), None, ())
        bus = self.server.connect("trainer")
        name = f"trainer-{document.job}-{trained.agent.name}"
        consumer = await bus.consumer(subjects.GROUPS, name, trained.log)
        ready: dict[int, list[GroupReady]] = {}
        while True:
            for delivery in await consumer.fetch(8, 1.0):
                entry = decode(delivery.stored.data)
                await delivery.ack()
                parts = entry.parts if isinstance(entry, GroupDecided | StepClosed) else ()
                message = next((part for part in parts if part.agent == trained.agent.name), None)
                if isinstance(message, GroupReady):
                    groups = ready.setdefault(message.step, [])
                    assert message.position == len(groups), "positions are dense and in order"
                    groups.append(message)
                elif isinstance(message, AgentClosed) and message.num_groups:
                    await (may_train or self.may_train).wait()
                    groups = ready.pop(message.step)
                    assert message.num_groups == len(groups)
                    assert message.base_version == record.version
                    for group in groups:
                        await self.read_turns(group)
                    names = tuple(group.group for group in groups)
                    self.trained.append((message.step, names))
                    if len(self.trained) == self.pause_after:
                        self.may_train.clear()
                    record = await self.commit(trained, record, message, names)


def _play_of(task: TaskMessage, member: int, attempt: int = 1) -> str:
    return episode_id(task.group, member, task.num_preemptions * PREEMPTION_STRIDE + attempt)


@contextlib.asynccontextmanager
async def running(harness: OrchestratorHarness, document: JobDocument, rewards: Rewards) -> AsyncIterator[None]:
    await harness.report(document, -1)
    await harness.submit(document)
    roles = harness.keep("orchestrator", service.serve), harness.play(document, rewards), harness.train(document)
    async with working(*roles):
        yield


async def run_to_end(harness: OrchestratorHarness, document: JobDocument, rewards: Rewards | None = None) -> Progress:
    async with running(harness, document, rewards or mixed):
        return await harness.progress(document, final)


def a_job(
    name: str = "sums",
    *,
    rank: int = 8,
    suspend: bool = False,
    priority: int = 0,
    created_at: float = 0.0,
    agents: Sequence[dict[str, Any]] = (),
    **training: Any,
) -> JobDocument:
    """A strict job of three steps with two groups of two."""
    spec = {
        "agents": agents or [{"name": "policy", "adapter": {"rank": rank}}],
        "rollout": {"groupSize": 2},
        "training": {"steps": 3, "groupsPerStep": 2, "maxStaleness": 0, "maxRefill": 1} | training,
        "evaluation": {"tasks": 2, "every": 2},
        "suspend": suspend,
        "priority": priority,
    }
    return job_document(name, created_at=created_at, spec=spec)


def final(progress: Progress) -> bool:
    return progress.phase.final


def mixed(task: TaskMessage, member: int) -> float:
    return float(member == 0)
