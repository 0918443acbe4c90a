"""Follows the jobs' progress, reconciles the processes with `plan`, and displays and writes the jobs' state."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from marlaas.local import plan
from marlaas.local.collection import Collector
from marlaas.local.display import Display
from marlaas.local.eta import ProgressMark, advanced, eta_s
from marlaas.local.results import Failure, JobResult
from marlaas.local.supervisor import Supervisor
from marlaas.local.table import JobView, status_line
from marlaas.local.tenants import ShareMeter
from marlaas_api import subjects
from marlaas_api.blobs import BlobUnavailable
from marlaas_api.bucket_cache import REREAD_S, BucketCache
from marlaas_api.bus import Bus
from marlaas_api.errors import InvalidInput, Permanent, Retryable, Unreadable
from marlaas_api.messages import JobDocument, Phase, PoolDocument, Progress, ReplicaReport

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Observation:
    """Progress by job key, and the reports of the live replicas."""

    progress: Mapping[str, Progress] = field(default_factory=dict)
    reports: tuple[ReplicaReport, ...] = ()


ANSWER_S = 2.0
"""Timeout of a poll's calls of the bus, so that Ctrl-C does not wait for a server that restarts."""


@dataclass(slots=True)
class JobWatch:
    """All jobs of a run.

    seen: last observation of the bus. failures: by job key, jobs that the runner gave up. marks: by uid. shares: of
    tenants, since this runner began. moved: set when a job is admitted, stopped or has ended.
    """

    bus: Bus
    collector: Collector
    display: Display
    jobs: tuple[JobDocument, ...]
    pools: Sequence[PoolDocument]
    seen: Observation = field(default_factory=Observation)
    failures: dict[str, Failure] = field(default_factory=dict)
    marks: dict[str, tuple[ProgressMark, ...]] = field(default_factory=dict)
    shares: ShareMeter = field(default_factory=ShareMeter)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    _phases: dict[str, tuple[Phase, bool]] = field(default_factory=dict)
    _warned: set[tuple[str, str]] = field(default_factory=set)
    _all_progress: BucketCache[Progress] = field(init=False)
    _reports: BucketCache[ReplicaReport] = field(init=False)

    def __post_init__(self) -> None:
        self._all_progress = BucketCache(lambda: self.bus.bucket(subjects.PROGRESS), Progress, self._note_phase)
        self._reports = BucketCache(lambda: self.bus.bucket(subjects.REPLICAS), ReplicaReport, lambda _: None)

    def replace(self, jobs: tuple[JobDocument, ...]) -> None:
        """Watch these jobs from now on, and forget all others."""
        self.jobs = jobs
        keys, uids = {job.ref.key for job in jobs}, {job.uid for job in jobs}
        self.failures = {key: failure for key, failure in self.failures.items() if key in keys}
        self._phases = {key: phase for key, phase in self._phases.items() if key in keys}
        self._warned = {(key, reason) for key, reason in self._warned if key in keys or "." not in key}
        self.marks = {uid: marks for uid, marks in self.marks.items() if uid in uids}
        self.collector.keep(uids)

    async def follow(self) -> None:
        """Keep up with the bus, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for cache in (self._all_progress, self._reports):
                group.create_task(cache.follow())

    async def poll(self, supervisor: Supervisor) -> bool:
        """Run one round; return False once nothing is left to run, and the results are written. Raises InvalidInput if the output folder cannot be written.

        Processes are reconciled first, so that an admitted job does not wait for the files of the others.
        """
        await self._first_answer()
        self._observe()
        self._give_up(supervisor)
        live = [job for job in self.jobs if job.ref.key not in self.failures]
        desired = plan.desired(self.pools, live, self.seen.progress)
        if desired:
            await supervisor.reconcile(desired, self.seen.reports)
        for text in (*supervisor.news(), *self._new_warnings()):
            self.display.note(text)
        failing = None
        try:
            answered = await self._collect()
        except BlobUnavailable as error:
            answered, failing = True, f"waiting for the blob store, to write the results: {error}"
        self._show(supervisor, answered, failing)
        return bool(desired) or failing is not None

    def latest_progress(self) -> tuple[Progress, ...]:
        """Return the last progress of the jobs, with the failure of those that the runner gave up."""
        views = [self._view(job, time.time()) for job in self.jobs]
        return tuple(view.progress for view in views if view.progress is not None)

    async def results(self) -> list[JobResult]:
        """Return the results of all jobs, with their files written."""
        with suppress(Retryable, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await asyncio.gather(self._all_progress.refresh(), self._reports.refresh())
        self._observe()
        await self._collect()
        return [await self._result(job) for job in self.jobs]

    async def _result(self, job: JobDocument) -> JobResult:
        with self._blamed_on(job):
            return await self.collector.result(job, self._progress(job), self.failures.get(job.ref.key))
        return JobResult(job, self._progress(job), failure=self.failures[job.ref.key])

    async def _first_answer(self) -> None:
        """Wait until the bus was read once, or for `ANSWER_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await asyncio.gather(self._all_progress.synced.wait(), self._reports.synced.wait())

    def _observe(self) -> None:
        """Set `seen` to what is known of the bus."""
        progress = {job.ref.key: self._all_progress.get(job.ref.key) for job in self.jobs}
        known = {key: found for key, found in progress.items() if found is not None}
        self.seen = Observation(known, tuple(report for _, report, _ in self._reports.items()))

    async def _collect(self) -> bool:
        """Write the jobs' new records; return False if the server does not answer now. Raises BlobUnavailable."""
        try:
            for job in self.jobs:
                with self._blamed_on(job):
                    await self.collector.follow(job, self._progress(job))
        except BlobUnavailable:
            raise
        except (Retryable, TimeoutError):
            return False
        read_at = self._all_progress.read_at
        return read_at is not None and asyncio.get_running_loop().time() - read_at < ANSWER_S + REREAD_S

    def _new_warnings(self) -> Iterator[str]:
        """Yield the warnings about each job and each pool's model, each reason once."""
        jobs = [(key, key.replace(".", "/"), found.warnings) for key, found in self.seen.progress.items()]
        pools = [(report.pool, f"pool {report.pool}", report.notices) for report in self.seen.reports]
        for key, name, warnings in (*jobs, *pools):
            for reason, text in warnings.items():
                if (key, reason) not in self._warned:
                    self._warned.add((key, reason))
                    yield f"{name}: {reason}: {text}"

    def _note_phase(self, key: str) -> None:
        progress = self._all_progress.get(key) if any(job.ref.key == key for job in self.jobs) else None
        if progress is not None and self._phases.get(key) != (progress.phase, progress.admitted):
            self._phases[key] = progress.phase, progress.admitted
            self.moved.set()

    @contextmanager
    def _blamed_on(self, job: JobDocument) -> Iterator[None]:
        """Turn a Permanent error (a corrupt blob, a record of a newer version) into a failure of this job alone."""
        try:
            yield
        except InvalidInput:
            raise
        except (Permanent, Unreadable) as error:  # all roles of a local run are of this release
            self.failures.setdefault(job.ref.key, Failure("ResultUnreadable", str(error)))

    def _progress(self, job: JobDocument) -> Progress | None:
        progress = self.seen.progress.get(job.ref.key)
        return progress if progress is not None and progress.uid == job.uid else None

    def _give_up(self, supervisor: Supervisor) -> None:
        for spec, text in supervisor.given_up():
            for job in plan.affected(spec, self.jobs):
                if not plan.settled(job, self._progress(job)):
                    self.failures.setdefault(job.ref.key, Failure("RoleFailed", text))

    def _show(self, supervisor: Supervisor, answered: bool, failing: str | None) -> None:
        """Display the jobs. failing: what the results wait for; None: nothing."""
        now = time.time()
        views = [self._view(job, now) for job in self.jobs]
        waiting = status_line(supervisor.states(), views, now) if answered else "the NATS server does not answer"
        self.display.waiting(failing or waiting)
        self.shares.see(views)
        self.display.jobs(views)

    def _view(self, job: JobDocument, now: float) -> JobView:
        progress = self._progress(job)
        if progress is None:
            return JobView(job)
        failure = self.failures.get(job.ref.key)
        if failure is not None:
            update = {"phase": Phase.FAILED, "reason": failure.reason, "message": failure.message}
            return JobView(job, progress.model_copy(update=update))
        if progress.phase is Phase.RUNNING:
            self.marks[job.uid] = advanced(self.marks.get(job.uid, ()), progress.step, now)
        return JobView(job, progress, eta_s(self.marks.get(job.uid, ()), progress.steps, now))
