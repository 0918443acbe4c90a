"""The supervisor: claims tasks of its job, plays their groups, publishes the episodes, then acks the task.

Invariant: a task is acked only after each of its members has an Episode in the stream. After a crash before the ack,
the task is redelivered and played again. The message id of an episode is its group and member, and the stream keeps the
first message of each id, so the second play adds nothing.

`EpisodePlaces` limits how many episodes run at once. A sandbox begins with few: 32 jobs that begin together would otherwise fork 2,000
processes before an engine on the same machine has generated a token.
"""

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from marlaas.envs import suite_args
from marlaas_api import names, subjects
from marlaas_api.background import background
from marlaas_api.bus import Bus, BusUnavailable, Consumer, Delivery
from marlaas_api.errors import InvalidInput, Unreadable
from marlaas_api.failpoints import failpoint
from marlaas_api.messages import Episode, FaultClass, JobDocument, JobSpec, TaskMessage
from marlaas_api.numeric import quantity
from marlaas_api.retries import patiently
from marlaas_api.wire import decode_as, encode
from marlaas_worker.metrics import Sample, of_job
from marlaas_worker.process_setup import home_variables
from marlaas_worker.role import RoleContext, wait_for
from marlaas_worker.sandbox import kernel
from marlaas_worker.sandbox.attempt import MAX_DELIVERIES, Attempt, AttemptDependencies, given_up
from marlaas_worker.sandbox.comparison import Withheld, compare
from marlaas_worker.sandbox.seclusion import clean_variables, given_variables, secluded
from marlaas_worker.sandbox.server import Children
from marlaas_worker.sandbox.server_start import ChildrenConfig, connect_server, start_server
from marlaas_worker.sandbox.turns import TURN_TIMEOUTS, TurnClient, TurnTimeouts

BEAT_S = 3.0
DRAIN_S = 5.0
FIRST_EPISODES, FIRST_S = 8, 5.0
"""Number of places at first, and seconds after the environment's load at which all others open. They open earlier if an episode ends."""
_FETCH_S = 5.0
"""Longest time of one fetch of a task. Each fetch costs this process and the NATS server 1 ms of CPU time, and 32 jobs mostly wait."""
_PAUSE_S = 1.0
_NEWER_S = 300.0
"""Time without claims after a task that only a newer release can parse. Sandboxes of that release usually replace this one meanwhile."""
_MOST_PRIOR_FAULTS = 50
"""Most prior faults that an Episode lists: the last ones. The orchestrator rejects an Episode with more than `episodes.MAX_PRIOR_FAULTS`."""

log = logging.getLogger(__name__)


async def serve(
    context: RoleContext,
    document: JobDocument,
    timeouts: TurnTimeouts = TURN_TIMEOUTS,
    environment_socket: Path | None = None,
    modules: Path | None = None,
) -> None:
    """Play the job's tasks until `context.stop`, then finish those that end within `DRAIN_S` and nak the others.

    Args:
        timeouts: timeouts and retry intervals of turns.
        environment_socket: socket of the environment's own container; None: this process starts the fork server itself.
        modules: folder that the fork server searches first for the environment's modules; None: only PYTHONPATH.

    Raises:
        InvalidInput: the job's environment cannot be loaded by this sandbox.
    """
    kernel.hide_from_siblings()
    kernel.open_many_files()
    config = replace(_children_config(context, document, environment_socket), modules=modules)
    children = Children(
        partial(start_server, config)
        if environment_socket is None
        else partial(connect_server, config, environment_socket)
    )
    try:
        async with TurnClient(context.bus, timeouts) as turns:
            await _Supervisor(context, AttemptDependencies(document, children, turns)).run()
    finally:
        await children.close()


def _children_config(context: RoleContext, document: JobDocument, environment_socket: Path | None) -> ChildrenConfig:
    environment = document.spec.environment
    if environment.name is None and environment_socket is None:
        raise InvalidInput(
            "environment.image runs in a container of its own, which this sandbox does not have; run the job on a cluster"
        )
    return ChildrenConfig(
        name=environment.name or "",
        args=environment.args.value,
        agents=document.spec.called_agents,
        demonstrations=_demonstrations(document.spec),
        suites=_suites(document.spec),
        memory_bytes=int(quantity(environment.memory)),
        load_timeout_s=environment.episode_timeout_seconds,
        scratch=context.scratch / "episodes",
        variables=clean_variables({**os.environ, **home_variables(context.scratch)}),
        given=given_variables(os.environ),
        secluded=secluded(context.creds) if context.creds is not None else None,
    )


def _demonstrations(spec: JobSpec) -> dict[str, Any] | None:
    """Return, by agent, the arguments of the data set of demonstrations (`initFrom.sft.data`); None if the job names no data set."""
    return None if spec.learner is None or spec.sft is None else {spec.learner.name: spec.sft.data.value}


def _suites(spec: JobSpec) -> dict[str, Any]:
    """Return, by suite, `name` and `args` of the suite's own environment. Suites that the job's environment plays are left out."""
    given = {suite.name: suite.environment for suite in spec.evaluation.suites if suite.environment is not None}
    return {name: {"name": one.name, "args": suite_args(one.name, one.args.value)} for name, one in given.items()}


class EpisodePlaces:
    """Limits how many episodes run at once: at first `FIRST_EPISODES`, or `concurrency` if that is less; later `concurrency`.

    concurrency: `environment.concurrency` of the job.
    """

    def __init__(self, concurrency: int) -> None:
        self._num_withheld = max(0, concurrency - FIRST_EPISODES)
        self._free = asyncio.Semaphore(concurrency - self._num_withheld)

    async def wait(self, stop: asyncio.Event) -> bool:
        """Wait until a place is free, without taking it; return False if `stop` is set first."""
        stopping = asyncio.create_task(stop.wait())
        acquiring = asyncio.create_task(self._free.acquire())
        await asyncio.wait({stopping, acquiring}, return_when=asyncio.FIRST_COMPLETED)
        if acquiring.done():
            self._free.release()
        acquiring.cancel()
        stopping.cancel()
        return not stop.is_set()

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it for an episode while the context is open."""
        async with self._free:
            yield
        self._open()

    async def open_after(self, loaded: asyncio.Event) -> None:
        """Wait until `FIRST_S` after `loaded` is set, then open all places. loaded: set once the environment is loaded."""
        await loaded.wait()
        await asyncio.sleep(FIRST_S)
        self._open()

    def _open(self) -> None:
        for _ in range(self._num_withheld):
            self._free.release()
        self._num_withheld = 0


class _Supervisor:
    def __init__(self, context: RoleContext, dependencies: AttemptDependencies) -> None:
        self._context = context
        self._bus: Bus = context.bus
        self._dependencies = dependencies
        self._document = dependencies.document
        self._places = EpisodePlaces(self._document.spec.environment.concurrency)
        self._running: set[asyncio.Task[None]] = set()
        self._outcomes: Counter[str] = Counter()
        self._claims = False
        context.metrics.ready = lambda: self._claims and dependencies.children.are_ready
        context.metrics.samples = self._samples

    async def run(self) -> None:
        children, stop = self._dependencies.children, self._context.stop
        opening = self._places.open_after(children.loaded)
        async with asyncio.TaskGroup() as group, background(children.warm_up()), background(opening):
            name = subjects.consumer(self._document.namespace, self._document.job, "sandbox")
            consumer = await self._bus.claims(subjects.TASKS, name, ack_wait_s=subjects.TASK_ACK_WAIT_S)
            self._claims = True
            # A task is claimed only when an episode may start, so that other sandboxes get the others.
            while await self._places.wait(stop):
                if self._claims:
                    await self._claim(consumer, group)
                else:
                    await wait_for(stop, _NEWER_S)
                    self._claims = True
            self._claims = False
            await self._drain()

    async def _claim(self, consumer: Consumer, group: asyncio.TaskGroup) -> None:
        """Claim one task and start to play it as a task of `group`; return once its members wait for places (`EpisodePlaces`).

        If there is no task within `_FETCH_S`, return. If the bus is unavailable, pause for `_PAUSE_S`.
        """
        try:
            deliveries = await self._fetched(consumer)
        except BusUnavailable as error:
            log.warning("cannot claim tasks: %s", error)
            await wait_for(self._context.stop, _PAUSE_S)
            return
        for delivery in deliveries:
            queued = asyncio.Event()
            running = group.create_task(self._handle(delivery, queued), name=f"sandbox task {delivery.stored.sequence}")
            self._running.add(running)
            running.add_done_callback(self._running.discard)
            await queued.wait()

    async def _fetched(self, consumer: Consumer) -> list[Delivery]:
        """Fetch at most one task; return an empty list if none arrives within `_FETCH_S`, or the sandbox is asked to stop."""
        fetching = asyncio.create_task(consumer.fetch(1, _FETCH_S))
        stopping = asyncio.create_task(self._context.stop.wait())
        try:
            await asyncio.wait({fetching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return fetching.result() if fetching.done() else []
        finally:
            stopping.cancel()
            fetching.cancel()
            await asyncio.wait({fetching})

    async def _drain(self) -> None:
        """Wait up to `DRAIN_S` for the running tasks, then cancel the rest, so that `_handle` naks them."""
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=DRAIN_S)
            for running in late:
                running.cancel()

    async def _handle(self, delivery: Delivery, queued: asyncio.Event) -> None:
        """Play one claimed task and settle it (ack, nak or term). After a BusUnavailable, it stays unsettled and is redelivered.

        A task that this release cannot parse is nakked, for sandboxes of a newer release. Then no task is claimed for `_NEWER_S`:
        each claim counts as a delivery, and after `MAX_DELIVERIES` the task would be given up.

        queued: set once the task's members wait for places, or there is nothing to play.
        """
        try:
            async with background(_beat(delivery)):
                await self._settle(delivery, queued)
        except BusUnavailable as error:
            log.warning("task %d is not settled and will be redelivered: %s", delivery.stored.sequence, error)
        except Unreadable as error:
            log.error("task %d is given back, and none is claimed for a while: %s", delivery.stored.sequence, error)
            self._claims = False
            await _give_back(delivery)
        except asyncio.CancelledError:
            await _give_back(delivery)
            raise
        finally:
            queued.set()

    async def _settle(self, delivery: Delivery, queued: asyncio.Event) -> None:
        """Play a task of this job and ack it, or decline a task of another job. Raises BusUnavailable, Unreadable."""
        task = decode_as(TaskMessage, delivery.stored.data)
        if task.uid != self._document.uid:
            await self._decline(delivery)
            return
        await self._play_group(task, delivery.num_delivered, queued)
        failpoint("sandbox.task.before_ack")
        await delivery.ack()

    async def _decline(self, delivery: Delivery) -> None:
        """Settle a task of another job of this name.

        Term the task if this sandbox's job is the current one of its name, or no job has the name now. Else nak the task, for the
        current job's sandboxes.
        """
        jobs = await self._bus.bucket(subjects.JOBS, inspected=False)
        entry = await jobs.get(subjects.job_key(self._document.namespace, self._document.job))
        current = decode_as(JobDocument, entry.data).uid if entry is not None and entry.data is not None else None
        if current in (None, self._document.uid):
            await delivery.term()
        else:
            await delivery.nak(subjects.TASK_ACK_WAIT_S)

    async def _play_group(self, task: TaskMessage, num_delivered: int, queued: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            members = [
                group.create_task(self._play_member(task, member, num_delivered), name=f"sandbox {task.group}-{member}")
                for member in sorted({*range(task.group_size)} - {*task.ended})
            ]
            queued.set()
        withheld = [one for member in members if (one := member.result()) is not None]
        if withheld:
            async with self._places.place():
                compared = await compare(self._dependencies, task, withheld)
            for episode in compared:
                await self._end_member(episode)

    async def _play_member(self, task: TaskMessage, member: int, num_delivered: int) -> Withheld | None:
        """Play a member of a group and publish its Episode.

        Returns: None; or the unpublished Episode, if the environment must compare it with those of the group first.
        """
        async with self._places.place():
            episode, data = await self._played(task, member, num_delivered)
        if data is not None:
            return Withheld(episode, data)
        await self._end_member(episode)
        return None

    async def _end_member(self, episode: Episode) -> None:
        children = self._dependencies.children
        known = {"load_notes": children.take_told(), "data_digest": children.data_digest}
        await self._publish(episode.model_copy(update={name: value for name, value in known.items() if value}))
        self._outcomes[episode.fault or episode.ending] += 1
        failpoint("sandbox.episode.after_publish")

    async def _played(self, task: TaskMessage, member: int, num_delivered: int) -> tuple[Episode, str | None]:
        """Play until an attempt counts, `max_attempts` have failed, or another attempt cannot help.

        A play that was abandoned because a turn waited too long is not an attempt. In strict mode (maxStaleness 0) every attempt
        samples the same replies. So an ENV fault that comes twice in a row with the same text would come at every attempt.

        Args:
            num_delivered: deliveries of the task, this one included. Above `MAX_DELIVERIES`, the member is given up unplayed.

        Returns: the Episode of the last attempt, and its `Attempt.data`.
        """
        max_attempts = self._document.spec.environment.max_attempts
        attempt = task.num_preemptions * names.PREEMPTION_STRIDE + (num_delivered - 1) * max_attempts + 1
        if num_delivered > MAX_DELIVERIES:
            return given_up(task, member, attempt), None
        is_strict = self._document.spec.training.max_staleness == 0
        num_faults, num_waits, last_text = 0, 0, ""
        prior: tuple[FaultClass, ...] = ()
        while True:
            number = attempt + num_faults + num_waits * (MAX_DELIVERIES + 1) * max_attempts
            played = Attempt(self._dependencies, task, member, number)
            episode = await played.play(prior)
            if episode.fault is FaultClass.WAITED:
                num_waits += played.has_asked  # Without a turn the name is free for the next play.
            elif (
                episode.fault is None
                or not played.is_retryable
                or num_faults + 1 == max_attempts
                or (is_strict and episode.fault is FaultClass.ENV and episode.fault_text == last_text)
            ):
                return episode, played.data
            else:
                num_faults += 1
                last_text = episode.fault_text
            log.info(
                "episode %s has a fault of class %s and is played again: %s",
                episode.episode,
                episode.fault,
                episode.fault_text,
            )
            prior = (*prior, episode.fault)[-_MOST_PRIOR_FAULTS:]
            if episode.fault is not FaultClass.ENV:
                await asyncio.sleep(_PAUSE_S)  # a fault of the platform may pass quickly

    def _samples(self) -> list[Sample]:
        labels = of_job(self._document.ref)
        text = "Episodes published, by how they ended: an ending that counts, or the class of a fault."
        name = "marlaas_sandbox_episodes_total"
        return [
            Sample("marlaas_sandbox_running_tasks", "gauge", "Tasks claimed.", len(self._running), labels),
            *(
                Sample(name, "counter", text, number, {**labels, "outcome": outcome})
                for outcome, number in sorted(self._outcomes.items())
            ),
        ]

    async def _publish(self, episode: Episode) -> None:
        """Publish the episode; retry while the bus is unavailable, until cancelled by a drain."""
        subject, name = subjects.episode(episode.namespace, episode.job), f"{episode.group}-{episode.member}"
        publish = lambda: self._bus.publish(subject, encode(episode), message_id=name)  # noqa: E731
        await patiently(publish, f"publishing episode {episode.episode}", _PAUSE_S)


async def _give_back(delivery: Delivery) -> None:
    """Nak a task. If the bus is unavailable, nothing is sent, and the task is redelivered after the ack wait."""
    with contextlib.suppress(BusUnavailable):
        await delivery.nak()


async def _beat(delivery: Delivery) -> None:
    """Extend the claim of a task every `BEAT_S`, until cancelled."""
    while True:
        await asyncio.sleep(BEAT_S)
        await patiently(delivery.in_progress, "extending the claim of a task", BEAT_S)
