"""Three runs in one process: jobs that nothing happens to, the same jobs with roles killed at every effect, and a crowd of jobs."""

import asyncio
import gc
import random
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from tests.harness import WITHIN_S, Harness, changed
from tests.loop import jobs
from tests.loop.harness import Ended, Loop, kill_at_each
from tests.tables import rows

from marlaas_api import subjects, wire
from marlaas_api.blobs import BlobFull, BlobRefused, BlobUnavailable
from marlaas_api.messages import JobEvent, Pin, Progress, ReplicaReport, TenantUsage
from marlaas_api.messages.usage import total
from marlaas_api.names import train_group
from marlaas_api.reasons import Reason
from marlaas_worker.orchestrator import preemption, tenants
from marlaas_worker.trainer.versions import PolicyKey

KILLS = dict(rows(__file__, "kills"))
"""Failpoints, and the passes at which a role is killed. The first passes of a commit are versions 0, the next ones are steps."""


def late_job():
    """An asynchronous team whose first steps are committed late (`commits_late`)."""
    return jobs.named("late", jobs.team("teams:once", steps=3, maxStaleness=1))


def strict_jobs(judge, twin, environment):
    """The jobs that are compared, bit for bit. twin, environment: of two jobs that may be written in two ways."""
    half = {"pool": "half"}
    return [
        jobs.team(environment),
        jobs.document("solo").model_copy(update=half),
        jobs.on_two_pools("other"),
        jobs.self_play(),
        jobs.taught(),
        jobs.candidates(),
        jobs.judged(judge),
        jobs.distilled(judge, "half"),
        jobs.again(),
        jobs.document("twin", environment=f"twins:{twin}"),
    ]


def exact_team(pool):
    """A strict team with enough steps for the kills of `tour`, which compares it with one to which nothing happened."""
    return jobs.named("exact", jobs.team("teams:once", steps=9)).model_copy(update={"pool": pool})


def loop_of(models, folder):
    """A loop with three pools: `tiny`, `other` with another base model, and `half`, which is `tiny` in bfloat16."""
    return Loop({**models, "half": models["tiny"]}, folder, half=("half",))


async def undisturbed(models, folder, judge):
    """Play a team and a job of the crowd, each alone, and then all other jobs at the same time; return them by name."""
    first, *strict = strict_jobs(judge, "native", "teams:at_once")
    rest = [*(jobs.alone(name) for name in jobs.TEAM), *jobs.examples()]
    rest += [jobs.unruly("unruly", 1.0), jobs.unruly("too-unruly", 0.2), exact_team("tiny")]
    async with loop_of(models, folder) as loop:
        alone = await loop.play([first]) | await loop.play([other(SINGLE)])
        return alone | await loop.play([*strict, *rest])


@dataclass(frozen=True)
class Killed:
    """The jobs' ends by name, the failpoints at which roles were killed, and how the blob store failed the roles' calls."""

    jobs: dict[str, Ended]
    places: list[str]
    faults: Counter[str]


class FailingBlobs:
    """A blob store of which every 25th call fails: refused, full or unanswered, in turn. faults: by kind."""

    KINDS = (BlobRefused, BlobFull, BlobUnavailable)

    def __init__(self, blobs):
        self._blobs, self._num_calls, self.faults = blobs, 0, Counter[str]()

    def __getattr__(self, name):
        return partial(self._call, name)

    async def _call(self, name, *arguments: Any):
        self._num_calls += 1
        if self._num_calls % 25 == 0:
            kind = self.KINDS[self._num_calls // 25 % 3]
            self.faults[kind.__name__] += 1
            raise kind(f"the store fails call {self._num_calls}")
        return await getattr(self._blobs, name)(*arguments)


async def killed(models, folder, judge):
    """Play the strict jobs and an asynchronous team, while roles are killed at every failpoint and their blob store fails."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # begun in the moment of a kill
        async with loop_of(models, folder) as loop:
            commits_late(loop, late_job(), patch)
            blobs = FailingBlobs(loop.blobs)
            patch.setattr(loop, "context", partial(loop.context, blobs=blobs))
            places = kill_at_each(KILLS)
            found = await loop.play([*strict_jobs(judge, "chat", "teams:in_tasks"), late_job()])
        gc.collect()
    return Killed(found, places, blobs.faults)


def commits_late(loop, job, patch):
    """Let each agent of a job commit its first step once a group of the second one plays the version before it."""
    commit = PolicyKey.commit

    async def late(policy, lease, contents):
        place = policy._assignment
        if place.ref.uid == job.uid and contents.result.step == 0:
            key = subjects.pin_key(job.namespace, job.job, place.agent.name, train_group(job.ref, 2))
            await loop.wait_for(Pin, subjects.PINS, key, lambda pin: pin.version == 0)
        return await commit(policy, lease, contents)

    patch.setattr(PolicyKey, "commit", late)


# the crowd -----------------------------------------------------------------------------------------------------------

NUM_OTHERS, SLOTS, EARLY = 20, 7, 5
SINGLE = 2
"""A strict job among the early ones."""
LEFT = (10, 16)
FAILS = (5, 11, 17)
KEPT_STATES = 2
"""Training states that a policy keeps."""


def other(number):
    """A small job, the early ones of the same tenant as the team; some have an environment that always fails."""
    environment = "rogues:raises" if number in FAILS else "reverse"
    steps = 4 if number < EARLY else 1 + number % 2
    training = {"steps": steps, "groupsPerStep": 1, "maxStaleness": number % 2, "maxRefill": 0}
    made = jobs.document(f"other-{number}", seed=number, environment=environment, **training)
    small = {"rollout": made.spec.rollout.model_copy(update={"group_size": 2, "max_turns": 1})}
    tenant = "team-a" if number < EARLY else f"team-{'bcd'[number % 3]}"
    return changed(made, **small).model_copy(update={"namespace": tenant, "tenant": tenant})


@dataclass
class Crowd:
    """A team among jobs that join, leave, fail and are preempted.

    jobs: ends by name, without jobs that left. reasons: of the other jobs' ends. reports: of the workers, without work.
    blobs: sizes by name. keys: of the buckets, messages and consumers: of the streams.
    """

    jobs: dict[str, Ended] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    preempted: set[str] = field(default_factory=set)
    reports: list[ReplicaReport] = field(default_factory=list)
    tenants: dict[str, TenantUsage] = field(default_factory=dict)
    blobs: dict[str, int] = field(default_factory=dict)
    keys: dict[str, set[str]] = field(default_factory=dict)
    messages: dict[str, list[str]] = field(default_factory=dict)
    consumers: set[str] = field(default_factory=set)


async def crowd(model, folder):
    """Play the team among the others, with too few slots for all of them."""
    ours = jobs.team(steps=3).model_copy(update={"created_at": 1.0})  # the youngest of its tenant yields first
    made, draw = Crowd(), random.Random(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "MIN_RUN_S", 0.0)
        patch.setattr(tenants, "TOTALS_S", 0.2)
        async with Loop({"tiny": model}, folder, slots=SLOTS, agentsPerSlot=1) as loop:
            going = {asyncio.create_task(_join(loop, made, number)) for number in range(EARLY)}
            for number in range(EARLY):
                await loop.progress(other(number), lambda progress: progress.admitted)
            await loop.submit(ours)
            await loop.progress(ours, lambda progress: progress.admitted)
            for number in draw.sample(range(EARLY, NUM_OTHERS), NUM_OTHERS - EARLY):
                going.add(asyncio.create_task(_join(loop, made, number)))
                if len(going) > draw.randrange(2, 12):
                    done, going = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
                    assert not [task.result() for task in done if task.result()]
            await asyncio.gather(*going)
            made.jobs[ours.job] = await loop.ended(ours)
            await _read(loop, made)
    return made


async def _join(loop, crowd, number):
    """Play one of the others, which may leave once it is admitted."""
    job = other(number)
    await loop.submit(job)
    if number in LEFT:
        await loop.progress(job, lambda progress: progress.admitted or progress.phase.final)
        await Harness.submit(loop, job.model_copy(update={"deleted": True, "generation": 3}))
        crowd.reasons["left"] += 1
        return
    ended = crowd.jobs[job.job] = await loop.ended(job)
    crowd.reasons[ended.progress.reason] += 1


async def _read(loop, crowd):
    """Wait until the workers have nothing left to do and all use is counted; then read everything."""
    ended_at = time.time()
    for role, replica in (("rollout", "rollout-0"), ("trainer", "trainer-0")):
        idle = await loop.reported(lambda one: one.at > ended_at and not (one.bound or one.num_running), role, replica)
        crowd.reports.append(idle)
    async with asyncio.timeout(WITHIN_S):
        while not await _is_accounted(loop, crowd):
            await loop.server.change(0.2, None)
    streams = {spec.name: loop.server.stream(spec.name) for spec in subjects.STREAMS}
    events = [wire.decode_as(JobEvent, one.data) for one in await loop.bus.replay(subjects.EVENTS, "event.>")]
    crowd.preempted = {event.job for event in events if event.reason == Reason.PREEMPTED}
    crowd.blobs = {name: len(data) for name, data in loop.blobs.contents.items()}
    crowd.keys = {
        one.name: {e.key for e in await (await loop.bus.bucket(one.name)).entries()} for one in subjects.BUCKETS
    }
    crowd.messages = {name: [one.stored.subject for one in stream.kept.values()] for name, stream in streams.items()}
    crowd.consumers = {name for stream in streams.values() for name in stream.consumers}


async def _is_accounted(loop, crowd):
    """Read the jobs' progress again, which counts use that replicas report after a job's end, and the tenants' totals."""
    for name, one in crowd.jobs.items():
        progress = await loop.get(Progress, subjects.PROGRESS, one.document.ref.key)
        crowd.jobs[name] = replace(one, progress=progress)
    entries = await (await loop.bus.bucket(subjects.TENANTS)).entries(subjects.TENANT_USAGE)
    found = [wire.decode_as(TenantUsage, entry.data) for entry in entries if entry.data is not None]
    crowd.tenants = {one.tenant: one for one in found}
    present = total(one.progress.amounts for one in crowd.jobs.values())
    counted = total(one.total for one in found)
    expected = present + total(one.removed for one in found)
    is_purged = not await loop.bus.replay(subjects.TURNS, ">")
    return is_purged and counted.model_dump() == pytest.approx(expected.model_dump())
