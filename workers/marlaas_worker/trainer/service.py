"""The trainer role: selection of the agents to train, reports, and shutdown.

Changes of cached buckets wake the reconcile loop. `_reconcile` then decides, from a view of the caches, which agents to
bind, to release and to clean up after. All trainers of the pool compute the same placement of agents from their views
(`placement`), and each binds only the agents that are placed on it. Each bound agent has its own task; an error in one
agent's task ends only that agent's training.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Collection
from functools import partial

import torch

from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable
from marlaas_api.errors import MarlaasError, Retryable, Unreadable
from marlaas_api.fenced import Overtaken
from marlaas_api.messages import PolicyRecord, PoolDocument, ReplicaReport
from marlaas_api.names import AgentRef
from marlaas_api.retries import patiently
from marlaas_worker.adapters import DTYPES
from marlaas_worker.devices import DeviceLost, OutOfMemory, check_gpus, uses_gpu
from marlaas_worker.metrics import Sample, of_report
from marlaas_worker.reporter import Reporter, resident_bytes
from marlaas_worker.role import RoleContext, wait_for
from marlaas_worker.trainer import room
from marlaas_worker.trainer.agent import AgentTrainer
from marlaas_worker.trainer.assignment import Absences, Assignment, RecentWork, may_bind
from marlaas_worker.trainer.calibration import calibrate, engine_dtype, publish
from marlaas_worker.trainer.compute import Compute
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.room import AgentRoom
from marlaas_worker.trainer.trained_agent import (
    KEPT_S,
    AgentFault,
    Binding,
    Timing,
    TrainedAgent,
    TrainerDependencies,
    reason_of,
)
from marlaas_worker.trainer.versions import AgentLease, PolicyKey, VersionCache
from marlaas_worker.trainer.view import PolicyEntry, TrainerCaches, View

log = logging.getLogger(__name__)


async def serve(context: RoleContext, pool: PoolDocument, timing: Timing | None = None) -> None:
    """Train the pool's agents until asked to stop.

    Raises:
        ModelUnusable: the pool's base model cannot be loaded.
        InvalidInput: the pool wants a GPU that cannot be used, or the GPU has less memory than a trainer needs at least.
        CalibrationFailed: the model is too coarse in the engines' dtype to distinguish a wrong adapter from rounding.
        DeviceLost: the device failed, and only a new process can continue.
    """
    check_gpus(pool.spec.trainer.gpus)
    compute = Compute(pool.spec.trainer.threads or default_threads(len(os.sched_getaffinity(0))))
    context.metrics.alive = lambda: not compute.lost
    try:
        dtype = DTYPES[engine_dtype(pool)]
        model = await compute.run(lambda: _load(pool, dtype))
        log.info("loaded base model %s as %s", pool.model_path, engine_dtype(pool))
        calibration = await compute.run(lambda: calibrate(model, pool))
        timing = timing or Timing()
        await patiently(lambda: publish(context, calibration), "calibration", timing.retry_s)
        memory = await compute.run(lambda: room.measure(model, pool))
        model.limit_activations(memory.activation_bytes)
        dependencies = TrainerDependencies(
            context,
            model,
            compute,
            timing,
            calibration,
            memory,
            room=AgentRoom(memory.room_bytes),
            versions=VersionCache(memory.host_bytes),
        )
        await Trainer(dependencies, pool.name).run()
    finally:
        compute.close()


def _load(pool: PoolDocument, dtype: torch.dtype) -> BaseModel:
    if uses_gpu():
        room.refuse_small_card(pool)
    return BaseModel(pool.model_path, dtype=dtype, hub=pool.spec.model.hub)


def default_threads(num_cpus: int) -> int:
    """Return the number of torch threads: half of the CPUs, because the engine on the same machine needs the other half without a GPU."""
    return max(1, num_cpus // 2)


class Trainer:
    """A trainer of a pool: starts and ends the agents' tasks as the jobs require, cleans up after ended jobs, and reports.

    pool: name of the pool.
    """

    def __init__(self, dependencies: TrainerDependencies, pool: str) -> None:
        self._shared = dependencies
        self._pool = pool
        self._context = dependencies.context
        self._timing = dependencies.timing
        self._reporter = Reporter(self._context, ("trainer", pool), self._report, self._timing.report_s)
        self._agents: dict[AgentRef, TrainedAgent] = {}
        self._absences = Absences()
        self._cleanups = asyncio.Semaphore(8)
        self._wake = asyncio.Event()
        self._is_current = True
        self._caches = TrainerCaches(self._context.bus, pool, self._wake.set)
        self._started = time.perf_counter()
        self._context.metrics.ready = lambda: not self._context.stop.is_set()
        self._context.metrics.samples = self._samples

    async def run(self) -> None:
        """Reconcile until asked to stop; every agent then stays at its last committed version."""
        await patiently(self._reporter.publish, "report", self._timing.retry_s)
        await patiently(self._caches.load, "read of jobs and policies", self._timing.retry_s)
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(self._reporter.run(), name="report"),
                tasks.create_task(self._caches.follow(), name="follow buckets"),
                tasks.create_task(self._wake_to_stop(), name="stop"),
            ]
            while not self._context.stop.is_set():
                self._wake.clear()
                self._reconcile(tasks)
                await wait_for(self._wake, self._timing.reconcile_s)
            for task in beside:
                task.cancel()
            await self._reporter.withdraw()  # first, so that the agents are placed elsewhere once they are released
            for agent in self._running.values():
                agent.end()

    async def _wake_to_stop(self) -> None:
        await self._context.stop.wait()
        self._wake.set()

    @property
    def _running(self) -> dict[str, TrainedAgent]:
        """Agents that have a task, by policy key. A job's agent waits until the task of an earlier job of its name has ended."""
        return {agent.assignment.policy_key: agent for agent in self._agents.values() if agent.task is not None}

    @property
    def _refused(self) -> frozenset[str]:
        """Policy keys of agents that this trainer does not train at present, because their training failed."""
        now = self._context.now()
        faulty = (agent for agent in self._agents.values() if agent.fault is not None and now < agent.fault.until)
        return frozenset(agent.assignment.policy_key for agent in faulty)

    def _agent(self, assignment: Assignment) -> TrainedAgent:
        """Return this trainer's state of an agent; create it for a new agent."""
        ref = assignment.agent_ref
        if ref not in self._agents:
            work = RecentWork(time.perf_counter())
            self._agents[ref] = TrainedAgent(self._shared, assignment, work, seen_at=self._context.now())
        return self._agents[ref]

    def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        was_current = self._is_current
        self._is_current = self._caches.current()
        if not self._is_current:
            if was_current:
                log.warning("the bus does not answer; until it does, no agent is bound or released")
            self._absences = Absences()  # an outage shows nothing about other trainers
            return
        view, now = self._caches.view(), self._context.now()
        self._absences.observe(view.holders, view.live, now)
        self._drop_gone(view, now)
        documents = [assignment.document for assignment in view.wanted.values()]
        self._shared.compute.queue.set_weights({one.tenant: one.tenant_weight for one in documents})
        # Measured costs change from report to report, and so does the choice among agents of about the same cost. Agents that are
        # leaving already count as gone, because otherwise more agents than necessary would leave.
        leaving = {key for key, agent in self._running.items() if agent.is_leaving}
        mine = view.placed_on(self._context.name, self._refused | leaving)
        self._apply(view, mine)
        for key in mine - self._running.keys():
            assignment, known = view.wanted[key], view.known.get(key)
            if self._may_train(assignment, known.record if known else None):
                agent = self._agent(assignment)
                task = tasks.create_task(self._train(agent, known), name=f"train {key}")
                task.add_done_callback(partial(self._ended, agent))
                agent.begin(assignment, task)
        self._clean_up(view, mine, tasks)

    def _drop_gone(self, view: View, now: float) -> None:
        """Drop the state of idle agents whose jobs have had no document for more than KEPT_S."""
        for ref, agent in list(self._agents.items()):
            if ref.job in view.jobs:
                agent.seen_at = now
            elif agent.is_idle and now - agent.seen_at > KEPT_S:
                del self._agents[ref]

    def _apply(self, view: View, mine: Collection[str]) -> None:
        """Apply a view: end the tasks of agents that are no longer wanted, whose job changed, or whose lease is lost.

        Agents that are placed on another trainer leave at their next step boundary. mine: policy keys placed on this trainer.
        """
        ended = {assignment.agent_ref for assignment in view.ended.values()}
        for ref, agent in self._agents.items():
            key = agent.assignment.policy_key
            same = agent.assignment.is_as(view.wanted.get(key))
            agent.is_unwanted = key not in view.wanted
            agent.is_cleaned &= ref in ended
            if not same:
                agent.fault = None
            if not same or agent.lost_to(view.known.get(key)):
                agent.end()
            elif key not in mine and agent.binding is not None:
                agent.binding.leave()

    def _clean_up(self, view: View, mine: Collection[str], tasks: asyncio.TaskGroup) -> None:
        """Start a task (`_let_go`) for each agent of an ended job that needs cleaning up, and for each unused lease."""
        now, name, running = self._context.now(), self._context.name, self._running
        cleaned = {ref for ref, agent in self._agents.items() if agent.is_cleaned}
        ended = view.left_behind(name, running, lambda holder: self._absences.gone(holder, now), cleaned)
        for assignment in [*ended, *view.unused_leases(name, running, mine)]:
            key, agent = assignment.policy_key, self._agent(assignment)
            if not agent.is_cleaning:
                agent.is_cleaning = True
                let_go = self._let_go(agent, assignment, view.known[key], key in view.ended)
                tasks.create_task(let_go, name=f"clean up {key}")

    async def _let_go(self, agent: TrainedAgent, assignment: Assignment, known: PolicyEntry, is_over: bool) -> None:
        """Release an agent's lease. If the job has ended (is_over), first delete the consumer and unreferenced blobs."""
        key, record = assignment.policy_key, known.record
        try:
            if record is None:
                return
            policy = await self._policy(assignment)
            if is_over:
                async with self._cleanups:
                    await policy.tidy(record)
                    await self._context.bus.delete_consumer(subjects.GROUPS, assignment.consumer)
                agent.is_cleaned = True
            if record.holder:
                await policy.release(AgentLease(record, known.entry.revision))
        except MarlaasError as error:
            pause_s = self._timing.fault_s if is_over else 0.0
            log.warning("%s: cleaning up failed, retry in %g s: %s", key, pause_s, error)
            await wait_for(self._context.stop, pause_s)
        finally:
            agent.is_cleaning = False

    async def _policy(self, assignment: Assignment) -> PolicyKey:
        bucket = await self._context.bus.bucket(subjects.POLICY)
        return PolicyKey(self._context, bucket, assignment, self._timing.retry_s)

    def _may_train(self, assignment: Assignment, record: PolicyRecord | None) -> bool:
        if assignment.is_complete(record):
            return False
        gone = record is not None and self._absences.gone(record.holder, self._context.now())
        return may_bind(record, assignment.ref.uid, self._context.name, gone)

    def _ended(self, agent: TrainedAgent, _: asyncio.Task[None]) -> None:
        agent.task = None
        agent.binding = None
        self._wake.set()

    async def _train(self, agent: TrainedAgent, known: PolicyEntry | None) -> None:
        """Bind and train one agent, and record an error. known: the policy entry on which the decision to bind was made.

        Raises DeviceLost only: it affects all agents and ends the role.
        """
        key = agent.assignment.policy_key
        try:
            current = await self._caches.read_policy(key)
            if current == known:  # else the decision to bind was made on an outdated record, and is made again
                await self._bind_and_train(agent, current)
        except DeviceLost:
            raise
        except Overtaken as error:
            why = f"another trainer has taken the agent: {error}"
            log.warning("%s", why)
            if agent.binding is not None:
                await agent.emit("LeaseLost", why)
        except (OutOfMemory, Unreadable) as error:  # another trainer may have more memory, or be of a newer release
            await self._give_up(agent, error)
        except Retryable as error:
            log.warning("%s: %s; binding it again", key, error)
            await asyncio.sleep(self._timing.retry_s)
        except Exception as error:
            log.exception("training of %s failed", key)
            await self._give_up(agent, error)

    async def _bind_and_train(self, agent: TrainedAgent, current: PolicyEntry | None) -> None:
        key = agent.assignment.policy_key
        policy = await self._policy(agent.assignment)
        agent.binding = binding = Binding(await policy.bind(current))
        try:
            await AgentTrainer(agent, binding, policy).run()
        except (Exception, asyncio.CancelledError):
            if await self._delete_consumer(agent):
                await policy.release(binding.lease)
            raise
        if binding.is_leaving:
            log.info("%s is released for another trainer", key)
            await policy.release(binding.lease)
            with contextlib.suppress(BusUnavailable):  # it counts as leaving until the cache has the release
                await self._caches.read_policy(key)

    async def _delete_consumer(self, agent: TrainedAgent) -> bool:
        """Delete the agent's consumer if the job no longer wants the agent. If the job comes back, the next bind replays the groups.

        Returns:
            False if the consumer may still exist. Keep the lease in that case, so that `_clean_up` retries.
        """
        if not agent.is_unwanted:
            return True
        try:
            await self._context.bus.delete_consumer(subjects.GROUPS, agent.assignment.consumer)
        except BusUnavailable as error:
            text = "%s: deleting the consumer failed, trying again later: %s"
            log.warning(text, agent.assignment.policy_key, error)
            return False
        return True

    async def _give_up(self, agent: TrainedAgent, error: Exception) -> None:
        """Record a fault, so that this trainer does not train the agent for `fault_s`, and emit it.

        If it is a fault of the job, the trainer's report carries it. Once all trainers report one, the job fails.
        """
        assignment, pause_s = agent.assignment, self._timing.fault_s
        if isinstance(error, Unreadable):
            self._context.waits.note(assignment.ref.uid, assignment.policy_key, error)
        version = max(agent.version, self._caches.version(assignment))
        reason, text = reason_of(error, num_others=len(self._running) - 1)
        agent.fault = AgentFault(version, self._context.now() + pause_s, reason, text)
        log.warning("%s is suspended for %g s: %s", assignment.policy_key, pause_s, text)
        await agent.emit(reason, text)
        await self._reporter.write()

    def _samples(self) -> list[Sample]:
        running = self._running.values()
        jobs = {agent.assignment.ref.uid: agent.assignment.ref for agent in running}
        found = of_report(self._report(resident_bytes()), jobs)
        return [*found, *(sample for agent in running for sample in agent.samples())]

    def _report(self, rss_bytes: int) -> ReplicaReport:
        now, agents = time.perf_counter(), self._agents.values()
        bound = sorted(agent.assignment.adapter(agent.version).engine_name for agent in agents if agent.version >= 0)
        job_engine_s: defaultdict[str, float] = defaultdict(float)
        work: dict[str, tuple[float, float]] = {}
        for agent in agents:
            job_engine_s[agent.account.job] += agent.account.busy_s
            work[agent.assignment.policy_key] = agent.advance(now)
        return ReplicaReport(
            role="trainer",
            pool=self._pool,
            replica=self._context.name,
            bound=tuple(bound),
            num_running=len(bound),
            agent_room_bytes=self._shared.memory.room_bytes,
            bytes_per_rank=self._shared.memory.bytes_per_rank,
            job_engine_s={uid: seconds for uid, seconds in job_engine_s.items() if seconds},
            busy_s=self._shared.compute.busy_s,
            agent_work={key: (computed_s, bound_s) for key, (computed_s, bound_s) in work.items() if bound_s},
            wall_s=now - self._started,
            rss_bytes=rss_bytes,
            broken=self._broken(),
            refused=tuple(sorted(self._refused)),
            at=self._context.now(),
        )

    def _broken(self) -> dict[str, str]:
        """Return the texts of the jobs' own faults, by `JobAgent.fault_key`.

        A fault is left out once its agent has a newer version than at the fault: another trainer has trained the agent further.
        """
        return {
            agent.assignment.fault_key: agent.fault.text
            for agent in self._agents.values()
            if agent.fault is not None
            and agent.fault.is_the_jobs
            and self._caches.version(agent.assignment) <= agent.fault.version
        }
