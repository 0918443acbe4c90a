"""The trainer role: selection of the agents to train, reports, and shutdown.

Changes of cached buckets wake the reconcile loop, and `_reconcile` decides on a view of the caches. All trainers of the
pool compute the same placement from it (`placement`), and each binds only its own agents. Each bound agent has its own
task; an error in one agent's task ends only that agent's training.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Collection
from functools import partial

import torch

from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable
from marlaas_api.errors import MarlaasError, Retryable, Unreadable
from marlaas_api.fenced import Overtaken
from marlaas_api.messages import PolicyRecord, PoolDocument, ReplicaReport
from marlaas_api.retries import patiently
from marlaas_worker.adapters import DTYPES
from marlaas_worker.device_errors import DeviceLost, OutOfMemory
from marlaas_worker.devices import check_gpus, uses_gpu
from marlaas_worker.metrics import Sample
from marlaas_worker.reporter import Reporter, resident_bytes
from marlaas_worker.role import RoleContext, wait_for
from marlaas_worker.trainer import agent_memory
from marlaas_worker.trainer.agent import AgentTrainer
from marlaas_worker.trainer.assignment import Absences, Assignment, Recent, may_bind
from marlaas_worker.trainer.calibration import calibrate, engine_dtype, publish
from marlaas_worker.trainer.commit import AgentLease, PolicyKey
from marlaas_worker.trainer.compute import Compute
from marlaas_worker.trainer.faults import Faults
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.recent_work import RecentWork
from marlaas_worker.trainer.room import AgentRoom
from marlaas_worker.trainer.running import Running, bound_names, samples
from marlaas_worker.trainer.shared import Timing, TrainerDependencies
from marlaas_worker.trainer.version_cache import VersionCache
from marlaas_worker.trainer.view import PolicyEntry, TrainerCaches, View

log = logging.getLogger(__name__)


async def serve(context: RoleContext, pool: PoolDocument, timing: Timing | None = None) -> None:
    """Train the pool's agents until asked to stop.

    Raises:
        ModelUnusable: the pool's base model cannot be loaded.
        InvalidInput: the card is too small for the least plan of a trainer.
        CalibrationFailed: the model is too coarse in the engines' dtype to distinguish a wrong adapter from rounding.
        DeviceLost: the device failed, and only a new process can continue.
        InvalidInput: the pool wants a GPU, and it cannot be used.
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
        memory = await compute.run(lambda: agent_memory.measure(model, pool))
        model.limit_activations(memory.activation_bytes)
        room, versions = AgentRoom(memory.room_bytes), VersionCache(memory.host_bytes)
        dependencies = TrainerDependencies(context, model, compute, timing, calibration, memory, room, versions)
        await Trainer(dependencies, pool.name).run()
    finally:
        compute.close()


def _load(pool: PoolDocument, dtype: torch.dtype) -> BaseModel:
    if uses_gpu():
        agent_memory.refuse_small_card(pool)
    return BaseModel(pool.model_path, dtype=dtype, hub=pool.spec.model.hub)


def default_threads(num_cpus: int) -> int:
    """Return half of the CPUs: without a GPU, the engine on the same machine needs the other half."""
    return max(1, num_cpus // 2)


class Trainer:
    """A trainer of a pool: reconciles the agents' tasks with the jobs, and reports."""

    def __init__(self, dependencies: TrainerDependencies, pool: str) -> None:
        self._dependencies, self._pool = dependencies, pool
        self._context, self._timing = dependencies.context, dependencies.timing
        self._reporter = Reporter(self._context, ("trainer", pool), self._report, self._timing.report_s)
        self._running: dict[str, Running] = {}
        self._faults = Faults(self._context.now, self._timing.fault_s)
        self._absences, self._recent = Absences(), Recent()
        self._collecting: set[str] = set()
        self._cleaned: set[tuple[str, str]] = set()
        self._collections = asyncio.Semaphore(8)
        self._wake = asyncio.Event()
        self._is_current = True
        self._caches = TrainerCaches(self._context.bus, pool, self._wake.set)
        self._started = time.perf_counter()
        self._work = RecentWork(self._started)
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
            for running in self._running.values():
                running.end()

    def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        current, self._is_current = self._is_current, self._caches.current()
        if not self._is_current:
            if current:
                log.warning("the bus does not answer; until it does, no agent is bound or released")
            self._absences.forget()
            return
        view, now = self._caches.view(), self._context.now()
        self._absences.observe(view.holders, view.live, now)
        self._account(view, now)
        # Measured costs change from report to report, and so does the choice among agents of about the same cost: more agents
        # than necessary would leave if those that leave already were not counted as gone.
        leaving = {key for key, running in self._running.items() if running.is_leaving}
        mine = view.placed_on(self._context.name, self._faults.refused | leaving)
        self._drop(view, mine)
        self._faults.keep(view.wanted)
        for key in mine - self._running.keys():
            assignment, known = view.wanted[key], view.known.get(key)
            if self._may_train(assignment, known.record if known else None):
                task = tasks.create_task(self._train(assignment, known), name=f"train {key}")
                task.add_done_callback(partial(self._ended, key))
                self._running[key] = Running(assignment, task)
        self._collect(view, mine, tasks)

    def _collect(self, view: View, mine: Collection[str], tasks: asyncio.TaskGroup) -> None:
        """Clean up ended jobs, and release unused leases."""
        now, name = self._context.now(), self._context.name
        self._cleaned &= {assignment.key_and_uid for assignment in view.ended.values()}
        ended = view.left_behind(name, self._running, lambda holder: self._absences.gone(holder, now), self._cleaned)
        for assignment in [*ended, *view.unused_leases(name, self._running, mine)]:
            key = assignment.policy_key
            if key not in self._collecting:
                self._collecting.add(key)
                tasks.create_task(self._let_go(assignment, view.known[key], key in view.ended), name=f"collect {key}")

    async def _let_go(self, assignment: Assignment, known: PolicyEntry, is_over: bool) -> None:
        """Release an agent's lease. If its job has ended, first delete the consumer and unreferenced blobs."""
        key, record = assignment.policy_key, known.record
        try:
            if record is None:
                return
            bucket = await self._context.bus.bucket(subjects.POLICY)
            policy = PolicyKey(self._context, bucket, assignment, self._timing.retry_s)
            if is_over:
                async with self._collections:
                    await policy.tidy(record)
                    await self._context.bus.delete_consumer(subjects.GROUPS, assignment.consumer)
                self._cleaned.add(assignment.key_and_uid)
            if record.holder:
                await policy.release(AgentLease(record, known.entry.revision))
        except MarlaasError as error:
            pause_s = self._timing.fault_s if is_over else 0.0
            log.warning("%s: cleaning up failed, retry in %g s: %s", key, pause_s, error)
            await wait_for(self._context.stop, pause_s)
        finally:
            self._collecting.discard(key)

    def _account(self, view: View, now: float) -> None:
        """Apply the tenants' present weights, and drop the figures of jobs that are gone."""
        compute = self._dependencies.compute
        for assignment in view.wanted.values():
            with contextlib.suppress(ValueError):  # not positive: the last valid weight stays
                compute.queue.set_weight(assignment.document.tenant, assignment.document.tenant_weight)
        compute.queue.keep_weights({assignment.document.tenant for assignment in view.wanted.values()})
        kept = self._recent.of(view.jobs, now)
        compute.keep_accounts(kept)
        self._dependencies.keep_counters(kept)
        self._work.keep(kept)

    def _drop(self, view: View, mine: Collection[str]) -> None:
        """End the tasks of agents that are no longer wanted, whose job changed, or whose lease is lost.

        Agents that are placed on another trainer leave at their next step boundary.
        """
        for key, running in self._running.items():
            known = view.known.get(key)
            running.is_unwanted = key not in view.wanted
            same = running.assignment.is_as(view.wanted.get(key))
            if not same or running.lost_to(known):
                running.end()
            elif key not in mine:
                running.leave()

    def _may_train(self, assignment: Assignment, record: PolicyRecord | None) -> bool:
        if assignment.is_complete(record):
            return False
        gone = record is not None and self._absences.gone(record.holder, self._context.now())
        return may_bind(record, assignment.ref.uid, self._context.name, gone)

    def _ended(self, key: str, _: asyncio.Task[None]) -> None:
        del self._running[key]
        self._wake.set()

    async def _train(self, assignment: Assignment, known: PolicyEntry | None) -> None:
        """Run one agent's task and record its error. Raises DeviceLost only: it affects all agents and ends the role."""
        self._faults.forget(assignment.policy_key)
        try:
            current = await self._caches.read_policy(assignment.policy_key)
            if current == known:  # else the decision to bind was made on an outdated record, and is made again
                await self._bind_and_train(assignment, current)
        except DeviceLost:
            raise
        except Overtaken as error:
            why = f"another trainer has taken the agent: {error}"
            log.warning("%s", why)
            if self._running[assignment.policy_key].training is not None:
                await self._dependencies.emit(assignment, "LeaseLost", why)
        except (OutOfMemory, Unreadable) as error:  # another trainer may have more memory, or be of a newer release
            await self._give_up(assignment, error)
        except Retryable as error:
            log.warning("%s: %s; binding it again", assignment.policy_key, error)
            await asyncio.sleep(self._timing.retry_s)
        except Exception as error:
            log.exception("training of %s failed", assignment.policy_key)
            await self._give_up(assignment, error)

    async def _bind_and_train(self, assignment: Assignment, current: PolicyEntry | None) -> None:
        bucket = await self._context.bus.bucket(subjects.POLICY)
        policy = PolicyKey(self._context, bucket, assignment, self._timing.retry_s)
        training = AgentTrainer(self._dependencies, assignment, policy, await policy.bind(current))
        self._running[assignment.policy_key].training = training
        try:
            await training.run()
        except (Exception, asyncio.CancelledError):
            if await self._clean_up(assignment):
                await policy.release(training.lease)
            raise
        if training.is_leaving:
            log.info("%s is released for another trainer", assignment.policy_key)
            await policy.release(training.lease)
            with contextlib.suppress(BusUnavailable):  # it counts as leaving until the cache has the release
                await self._caches.read_policy(assignment.policy_key)

    async def _clean_up(self, assignment: Assignment) -> bool:
        """Delete the consumer of a job that is over; if the job comes back, the next bind replays its groups.

        Returns:
            False if the consumer may still exist. Keep the lease in that case, so that `_collect` retries.
        """
        if not self._running[assignment.policy_key].is_unwanted:
            return True
        try:
            await self._context.bus.delete_consumer(subjects.GROUPS, assignment.consumer)
        except BusUnavailable as error:
            log.warning("%s: deleting the consumer failed, trying again later: %s", assignment.policy_key, error)
            return False
        return True

    async def _give_up(self, assignment: Assignment, error: Exception) -> None:
        """Leave an agent alone for a while. The report carries a fault of its job; once all trainers report it, the job fails."""
        version = max(self._running[assignment.policy_key].version, self._caches.version(assignment))
        if isinstance(error, Unreadable):
            self._context.waits.note(assignment.ref.uid, assignment.policy_key, error)
        fault = self._faults.add(assignment, version, error, num_others=len(self._running) - 1)
        await self._dependencies.emit(assignment, fault.reason, fault.text)
        await self._reporter.write()

    async def _wake_to_stop(self) -> None:
        await self._context.stop.wait()
        self._wake.set()

    def _samples(self) -> list[Sample]:
        return samples(self._dependencies, self._report(resident_bytes()), self._running.values())

    def _report(self, rss_bytes: int) -> ReplicaReport:
        bound, now = bound_names(self._running.values()), time.perf_counter()
        held = [key for key, running in self._running.items() if running.training is not None]
        return ReplicaReport(
            role="trainer",
            pool=self._pool,
            replica=self._context.name,
            bound=bound,
            num_running=len(bound),
            agent_room_bytes=self._dependencies.memory.room_bytes,
            bytes_per_rank=self._dependencies.memory.bytes_per_rank,
            job_engine_s=self._dependencies.compute.busy_s_by_job,
            busy_s=self._dependencies.compute.busy_s,
            agent_work=dict(self._work.advance(self._dependencies.compute.busy_s_by_agent(), held, now)),
            wall_s=now - self._started,
            rss_bytes=rss_bytes,
            broken=self._faults.broken(self._caches.version),
            refused=tuple(sorted(self._faults.refused)),
            at=self._context.now(),
        )
