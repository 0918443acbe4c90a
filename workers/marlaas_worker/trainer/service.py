"""The trainer role: selection of the agents to train, reports, and shutdown.

Changes of cached buckets wake the reconcile loop, and `_reconcile` decides on a view of the caches. Each bound
agent has its own task; an error in one agent's task ends only that agent's training.
"""

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass
from functools import partial

from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable, Entry
from marlaas_api.errors import MarlaasError, Retryable
from marlaas_api.messages import PolicyRecord, PoolDocument, ReplicaReport
from marlaas_api.numeric import quantity
from marlaas_worker.adapters import DTYPES
from marlaas_worker.device_errors import DeviceLost, OutOfMemory
from marlaas_worker.metrics import Sample, of_job, of_report
from marlaas_worker.reporter import Reporter, resident_bytes
from marlaas_worker.role import RoleContext, wait_for
from marlaas_worker.trainer import agent_memory
from marlaas_worker.trainer.agent import AgentTraining
from marlaas_worker.trainer.agent_memory import AgentMemory
from marlaas_worker.trainer.assignment import Absences, Assignment, may_bind
from marlaas_worker.trainer.calibration import calibrate, engine_dtype, publish
from marlaas_worker.trainer.commit import LeaseLost, PolicyKey, patiently
from marlaas_worker.trainer.compute import Compute
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.shared import Timing, TrainerDependencies
from marlaas_worker.trainer.view import PolicyEntry, TrainerCaches, View

log = logging.getLogger(__name__)


async def serve(context: RoleContext, pool: PoolDocument, timing: Timing | None = None) -> None:
    """Train the pool's agents until asked to stop.

    Raises:
        ModelUnusable: the pool's base model cannot be loaded.
        CalibrationFailed: the model is too coarse in the engines' dtype to distinguish a wrong adapter from rounding.
        DeviceLost: the device failed, and only a new process can continue.
    """
    compute = Compute(pool.spec.trainer.threads or default_threads(len(os.sched_getaffinity(0))))
    context.metrics.alive = lambda: not compute.lost
    try:
        activation_bytes = int(quantity(pool.spec.trainer.activation_bytes))
        dtype = DTYPES[engine_dtype(pool)]
        model = await compute.run(lambda: BaseModel(pool.model_path, activation_bytes=activation_bytes, dtype=dtype))
        log.info("loaded base model %s as %s", pool.model_path, engine_dtype(pool))
        calibration = await compute.run(lambda: calibrate(model, pool))
        timing = timing or Timing()
        await patiently(lambda: publish(context, calibration), "calibration", timing.retry_s)
        memory = await compute.run(lambda: agent_memory.measure(model, activation_bytes))
        await Trainer(TrainerDependencies(context, model, compute, timing, calibration), pool.name, memory).run()
    finally:
        compute.close()


def default_threads(num_cpus: int) -> int:
    """Return half of the CPUs: without a GPU, the engine on the same machine needs the other half."""
    return max(1, num_cpus // 2)


@dataclass(slots=True, eq=False)
class _Running:
    assignment: Assignment
    task: asyncio.Task[None]
    training: AgentTraining | None = None
    over: bool = False

    @property
    def version(self) -> int:
        """The committed version, -1 before the first."""
        return -1 if self.training is None else self.training.lease.record.version

    def end(self) -> None:
        """Cancel the task, unless it is already releasing adapter, lease and consumer, which must not be interrupted.

        May be repeated.
        """
        if self.training is None or not self.training.over:
            self.task.cancel()

    def lost_to(self, known: PolicyEntry | None) -> bool:
        """Return whether the policy key was deleted, or written by another trainer or for another job, after this trainer's last write.

        The cache may lag behind this trainer's own writes, so only a newer revision counts.
        """
        if self.training is None or known is None or known.entry.revision <= self.training.lease.revision:
            return False
        ours, record = self.training.lease.record, known.record
        return record is None or record.uid != ours.uid or record.epoch > ours.epoch


@dataclass(frozen=True, slots=True)
class _Fault:
    assignment: Assignment
    until: float
    text: str
    is_the_jobs: bool = True


class Trainer:
    """A trainer of a pool: reconciles the agents' tasks with the jobs, and reports."""

    def __init__(self, dependencies: TrainerDependencies, pool: str, memory: AgentMemory | None = None) -> None:
        self._dependencies, self._pool, self._memory = dependencies, pool, memory or AgentMemory()
        self._context, self._timing = dependencies.context, dependencies.timing
        self._reporter = Reporter(self._context, ("trainer", pool), self._report, self._timing.report_s)
        self._running: dict[str, _Running] = {}
        self._faults: dict[str, _Fault] = {}
        self._absences = Absences()
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
            for running in self._running.values():
                running.end()
        await self._reporter.withdraw()

    def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        current, self._is_current = self._is_current, self._caches.current()
        if not self._is_current:
            if current:
                log.warning("the bus does not answer; until it does, no agent is bound or released")
            self._absences.forget()
            return
        view = self._caches.view()
        self._absences.observe(view.holders, view.live, self._context.now())
        self._drop(view)
        self._faults = {
            key: fault for key, fault in self._faults.items() if fault.assignment.is_as(view.wanted.get(key))
        }
        for key, assignment in view.wanted.items():
            known = view.known.get(key)
            if key not in self._running and self._may_train(assignment, known.record if known else None):
                task = tasks.create_task(self._train(assignment, known), name=f"train {key}")
                task.add_done_callback(partial(self._ended, key))
                self._running[key] = _Running(assignment, task)

    def _drop(self, view: View) -> None:
        """End the tasks of agents that this trainer no longer has to train, whose job changed, or whose lease is lost."""
        for key, running in self._running.items():
            known = view.known.get(key)
            running.over = key not in view.wanted
            same = running.assignment.is_as(view.wanted.get(key))
            if not same or running.lost_to(known):
                running.end()

    def _may_train(self, assignment: Assignment, record: PolicyRecord | None) -> bool:
        now = self._context.now()
        fault = self._faults.get(assignment.policy_key)
        if assignment.is_complete(record) or (fault is not None and now < fault.until):
            return False
        gone = record is not None and self._absences.gone(record.holder, now)
        return may_bind(record, assignment.ref.uid, self._context.name, gone)

    def _ended(self, key: str, _: asyncio.Task[None]) -> None:
        del self._running[key]
        self._wake.set()

    async def _train(self, assignment: Assignment, known: PolicyEntry | None) -> None:
        """Run one agent's task and record its error. Raises DeviceLost only: it affects all agents and ends the role."""
        self._faults.pop(assignment.policy_key, None)
        try:
            current = await self._caches.read_policy(assignment.policy_key)
            if current == known:  # else the decision to bind was made on an outdated record, and is made again
                await self._bind_and_train(assignment, current.entry if current is not None else None)
        except DeviceLost:
            raise
        except LeaseLost as error:
            log.warning("%s", error)
            if self._running[assignment.policy_key].training is not None:
                await self._dependencies.emit(assignment, "LeaseLost", str(error))
        except OutOfMemory as error:
            await self._lack_memory(assignment, error)
        except Retryable as error:
            log.warning("%s: %s; binding it again", assignment.policy_key, error)
            await asyncio.sleep(self._timing.retry_s)
        except Exception as error:
            log.exception("training of %s failed", assignment.policy_key)
            await self._give_up(assignment, error)

    async def _bind_and_train(self, assignment: Assignment, current: Entry | None) -> None:
        bucket = await self._context.bus.bucket(subjects.POLICY)
        policy = PolicyKey(self._context, bucket, assignment, self._timing.retry_s)
        training = AgentTraining(self._dependencies, assignment, policy, await policy.bind(current))
        self._running[assignment.policy_key].training = training
        try:
            await training.run()
        except (Exception, asyncio.CancelledError):
            await policy.release(training.lease)
            await self._clean_up(assignment)
            raise

    async def _clean_up(self, assignment: Assignment) -> None:
        """Delete the consumer of a job that is over; if the job comes back, the next bind replays its groups."""
        if self._running[assignment.policy_key].over:
            with contextlib.suppress(BusUnavailable):
                await self._context.bus.delete_consumer(subjects.GROUPS, assignment.consumer)

    async def _lack_memory(self, assignment: Assignment, error: OutOfMemory) -> None:
        """Record that an agent's adapter, optimizer moments or probes do not fit the device's memory.

        With other agents on this trainer, the trainer is full, and this is not a fault of the job.
        """
        num_others = len(self._running) - 1
        advice = "lower its adapter's rank in a new job, or give the pool's trainer more memory"
        if num_others:
            advice = f"the trainer is full (other agents on it: {num_others}); this one is tried again after {self._timing.fault_s:g} s, here or on another trainer"
        text = f"no memory for the agent's adapter, optimizer or probes: {error}; {advice}"
        await self._suspend(_Fault(assignment, self._until(), text, is_the_jobs=not num_others))

    async def _give_up(self, assignment: Assignment, error: Exception) -> None:
        text = str(error) if isinstance(error, MarlaasError) else f"{type(error).__name__}: {error}"
        await self._suspend(_Fault(assignment, self._until(), text))

    async def _suspend(self, fault: _Fault) -> None:
        """Suspend an agent for a while. The report carries a fault of its job; once all trainers report it, the job fails."""
        log.warning("%s is suspended for %g s: %s", fault.assignment.policy_key, self._timing.fault_s, fault.text)
        self._faults[fault.assignment.policy_key] = fault
        await self._dependencies.emit(
            fault.assignment, "TrainingFailed" if fault.is_the_jobs else "OutOfMemory", fault.text
        )
        await self._reporter.write()

    def _until(self) -> float:
        return self._context.now() + self._timing.fault_s

    async def _wake_to_stop(self) -> None:
        await self._context.stop.wait()
        self._wake.set()

    def _samples(self) -> list[Sample]:
        running = [running.assignment for running in self._running.values()]
        found = of_report(
            self._report(resident_bytes()), {assignment.ref.uid: assignment.ref for assignment in running}
        )
        counters = (
            ("marlaas_trainer_commits_total", "Versions committed.", self._dependencies.commits),
            (
                "marlaas_trainer_out_of_memory_total",
                "Steps restarted with a lower token budget.",
                self._dependencies.out_of_memory,
            ),
            (
                "marlaas_trainer_skipped_updates_total",
                "Versions without a finite gradient.",
                self._dependencies.skipped,
            ),
        )
        for one in running:
            labels = {**of_job(one.ref), "agent": one.agent.name}
            found += [Sample(name, "counter", text, counts[one.policy_key], labels) for name, text, counts in counters]
        return found

    def _report(self, rss_bytes: int) -> ReplicaReport:
        versions = [(running, running.version) for running in self._running.values()]
        bound = [running.assignment.adapter(version).engine_name for running, version in versions if version >= 0]
        return ReplicaReport(
            role="trainer",
            pool=self._pool,
            replica=self._context.name,
            bound=tuple(sorted(bound)),
            num_running=len(bound),
            agent_room_bytes=self._memory.room_bytes,
            bytes_per_rank=self._memory.bytes_per_rank,
            job_engine_s=self._dependencies.compute.busy_s_by_account,
            busy_s=self._dependencies.compute.busy_s,
            wall_s=time.perf_counter() - self._started,
            rss_bytes=rss_bytes,
            broken={fault.assignment.ref.uid: fault.text for fault in self._faults.values() if fault.is_the_jobs},
            at=self._context.now(),
        )
