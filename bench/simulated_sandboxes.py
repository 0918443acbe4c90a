"""Jobs of a measurement and their sandboxes, played with the product's messages instead of environment processes."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import Episode, JobDocument, TaskMessage
from marlaas_api.names import episode_id
from marlaas_api.wire import decode_as, encode

POOL, TENANTS = "tiny", 4
_POLL_S = 10.0


@dataclass(kw_only=True)
class Sandboxes:
    """Sandboxes of all jobs. Subclasses say how a task is played.

    spec: the spec of every job. playing: the tasks in progress. errors: of tasks that failed.
    """

    bus: Bus
    spec: Mapping[str, Any]
    playing: set[asyncio.Task[None]] = field(default_factory=set)
    errors: list[BaseException] = field(default_factory=list)

    async def submit(self, number: int) -> JobDocument:
        """Write a job's document."""
        namespace, name = place(number)
        spec = job_spec(RLJobSpec.model_validate(self.spec))
        job = JobDocument(namespace=namespace, job=name, uid=f"u{number}", pool=POOL, tenant=namespace, spec=spec)
        await (await self.bus.bucket(subjects.JOBS)).put(job.ref.key, encode(job))
        return job

    async def take_tasks(self, number: int) -> None:
        """Take the tasks of a job until cancelled."""
        namespace, name = place(number)
        subject = subjects.task(namespace, name)
        consumer = await self.bus.consumer(subjects.TASKS, subjects.consumer(namespace, name, "sandbox"), subject)
        while True:
            for delivery in await consumer.fetch(8, _POLL_S):
                task = decode_as(TaskMessage, delivery.stored.data)
                await delivery.ack()
                playing = asyncio.create_task(self.play(task))
                self.playing.add(playing)
                playing.add_done_callback(self._played)

    async def play(self, task: TaskMessage) -> None:
        """Play all members of a task."""
        raise NotImplementedError

    async def end(self, task: TaskMessage, member: int) -> None:
        """Publish the end of a member's episode of one turn. The rewards differ, so that every group has signal."""
        ended = Episode(
            **identity(task),
            group=task.group,
            split=task.split,
            index=task.index,
            member=member,
            episode=episode_id(task.group, member, 1),
            num_turns=1,
            rewards={"policy": float(member)},
            leaves={"policy": (0,)},
        )
        await self.bus.publish(subjects.episode(task.namespace, task.job), encode(ended))

    def check(self) -> None:
        """Raise the error of a task that has failed."""
        if self.errors:
            raise self.errors[0]

    def _played(self, playing: asyncio.Task[None]) -> None:
        self.playing.discard(playing)
        if not playing.cancelled() and (error := playing.exception()) is not None:
            self.errors.append(error)


def place(number: int) -> tuple[str, str]:
    """Return the namespace and the name of a job."""
    return f"team-{number % TENANTS}", f"job-{number:04}"


def identity(task: TaskMessage) -> dict[str, str]:
    """Return the identity of a task's job."""
    return {"namespace": task.namespace, "job": task.job, "uid": task.uid}
