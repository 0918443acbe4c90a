"""Time of a bind and a take-up that read the GROUPS log on a real nats-server, with a job's full history and with the pruned log.

Every job has the log of all of its groups, eight a step, and a record of every step but the last. bind: a trainer
reads and sorts the log before it continues. take-up: an orchestrator reads a job's state. Then the recorded steps are
deleted, as the orchestrator does step by step, and both are measured again in the same run.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from bench import options
from marlaas_api import subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import Bus
from marlaas_api.bus_nats import connect
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import (
    AgentClosed,
    GroupDecided,
    GroupReady,
    JobDocument,
    StepClosed,
    StepOutcome,
    StepRecord,
    TasksIssued,
    TrajectoryRef,
)
from marlaas_api.names import episode_id, train_group
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import decode, encode
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.records import Records
from marlaas_worker.role import RoleContext
from marlaas_worker.trainer.intake import StepInbox

GROUPS_PER_STEP, GROUP_SIZE, NUM_MEASURED = 8, 8, 5
SPEC = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 10_000_000}}


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("groups", __doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--groups", type=int, default=10_000, help="of each job")
    given = parser.parse_args(arguments)
    asyncio.run(measure(given.jobs, given.groups // GROUPS_PER_STEP))


async def measure(num_jobs: int, num_steps: int) -> None:
    jobs = [document(number) for number in range(num_jobs)]
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedNats(Path(folder) / "nats") as server:
            bus = await connect(server.url, name="bench")
            await bus.ensure()
            context = RoleContext("bench", bus, MemoryBlobs(), Path(folder))
            await asyncio.gather(*(fill(bus, job, num_steps) for job in jobs))
            before = await times(context, jobs, num_steps)
            for job in jobs:
                records = Records(context, job)
                state = JobState(job, await records.history())
                await records.compact(state.ledger(), num_steps - 2)
            after = await times(context, jobs, num_steps)
            await bus.close()
    num_groups = num_steps * GROUPS_PER_STEP
    for name in before:
        ratio = before[name] / after[name]
        print(
            f"{name} of one of {num_jobs} jobs with {num_groups:,} groups each: {before[name]:.3f} s with the whole log, "
            f"{after[name]:.3f} s with open steps only: {ratio:.0f}x"
        )


def document(number: int) -> JobDocument:
    spec = job_spec(RLJobSpec.model_validate(SPEC))
    return JobDocument(
        namespace="team-a", job=f"job-{number:03d}", uid=f"u{number:03d}", pool="tiny", tenant="team-a", spec=spec
    )


async def fill(bus: Bus, job: JobDocument, num_steps: int) -> None:
    """Write the log of all steps, the records of all but the last, and the ledger."""
    names = {"namespace": job.namespace, "job": job.job, "uid": job.uid}
    subject = subjects.job_log(job.namespace, job.job)
    for step in range(num_steps):
        indices = tuple(range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP))
        for position, index in enumerate(indices):
            issued = TasksIssued(**names, indices=(index,), next_index=index + 1, turns_from=index)
            await bus.publish(subject, encode(issued))
            part = ready(job, step, position, index)
            await bus.publish(subject, encode(GroupDecided(**names, step=step, index=index, ready=(part,))))
        end = AgentClosed(**names, agent="policy", step=step, base_version=step, num_groups=len(indices))
        await bus.publish(subject, encode(StepClosed(**names, step=step, parts=(end,))))
        if step < num_steps - 1:
            await bus.publish(subjects.step(job.namespace, job.job, job.uid, step), encode(record(job, step, indices)))


def ready(job: JobDocument, step: int, position: int, index: int) -> GroupReady:
    name = train_group(job.ref, index)
    members = range(GROUP_SIZE)
    return GroupReady(
        namespace=job.namespace,
        job=job.job,
        uid=job.uid,
        agent="policy",
        step=step,
        base_version=step,
        position=position,
        group=name,
        index=index,
        version=step,
        trajectories=tuple(
            TrajectoryRef(member=one, episode=episode_id(name, one, 1), leaves=(0,), reward=float(one))
            for one in members
        ),
    )


def record(job: JobDocument, step: int, indices: tuple[int, ...]) -> StepRecord:
    return StepRecord(
        namespace=job.namespace,
        job=job.job,
        uid=job.uid,
        step=step,
        outcome=StepOutcome.COMMITTED,
        version=step + 1,
        at=float(step),
        wall_s=1.0,
        reward_mean=0.5,
        reward_std=0.5,
        indices=indices,
        num_groups=len(indices),
        num_episodes=len(indices) * GROUP_SIZE,
    )


async def times(context: RoleContext, jobs: Sequence[JobDocument], num_steps: int) -> dict[str, float]:
    """Return the median seconds of a bind and of a take-up."""

    async def bind(job: JobDocument) -> None:
        inbox = StepInbox(num_steps - 2, num_steps - 1)
        for stored in await context.bus.replay(subjects.GROUPS, subjects.job_log(job.namespace, job.job)):
            entry = decode(stored.data)
            if isinstance(entry, GroupDecided):
                inbox.add(entry.ready[0])
            elif isinstance(entry, StepClosed):
                inbox.add(entry.parts[0])
        assert inbox.next_group() is not None

    async def take_up(job: JobDocument) -> None:
        assert len((await Records(context, job).history()).steps) == num_steps - 1

    return {"bind": await median(bind, jobs), "take-up": await median(take_up, jobs)}


async def median(work: Callable[[JobDocument], Awaitable[None]], jobs: Sequence[JobDocument]) -> float:
    seconds = []
    for job in jobs[:NUM_MEASURED]:
        began = time.perf_counter()
        await work(job)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
