"""`marlaas run`: validate, prepare, start everything, watch until every job is settled, write what came of it, leave nothing behind.

The shell around `documents`, `plan`, `restarts`, `table` and `results`, which decide. Nothing is started before everything that a
person can get wrong has been looked at.
"""

import asyncio
import shlex
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus import Bus
from marlaas_api.errors import Retryable
from marlaas_api.messages import JobDocument, PoolDocument, Progress

from marlaas.local import documents, plan
from marlaas.local.collection import Collector, read_results, write_summary
from marlaas.local.display import Display
from marlaas.local.eta import Mark, advanced, eta_s
from marlaas.local.folder import OutFolder, RunRecord, hold
from marlaas.local.interrupts import Interrupted, Interrupts
from marlaas.local.models import prepare
from marlaas.local.observation import Observation, announce, observe
from marlaas.local.processes import ROLE_COMMAND, Launcher, warden
from marlaas.local.report import Report
from marlaas.local.results import Failure, JobResult, all_succeeded
from marlaas.local.server import message_server
from marlaas.local.status import status_line
from marlaas.local.supervisor import Supervisor
from marlaas.local.table import JobView
from marlaas.local.wanted import Wanted, read

TICK_S = 0.5
EXIT_SUCCEEDED, EXIT_FAILED, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What was asked for. out: the output folder; seed: instead of the manifests' own; nats: a server that is there already.

    again: the command line that goes on where this one stops; role_command: how a role is run.
    """

    files: tuple[Path, ...]
    out: Path
    seed: int | None = None
    nats: str | None = None
    again: tuple[str, ...] = ()
    role_command: tuple[str, ...] = ROLE_COMMAND


def run(request: RunRequest, display: Display) -> int:
    """Run to the end and return the exit code: 0 only if every job succeeded.

    Raises:
        Permanent: what a person must change first (InvalidInput, ServerFailed, …); nothing is running.
        Retryable: a server that was named does not answer.
    """
    try:
        return asyncio.run(_run(request, display))
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _first(error: BaseException) -> BaseException:
    """What a task group's error is about."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run(request: RunRequest, display: Display) -> int:
    interrupts = Interrupts()
    with interrupts.listening():
        try:
            return await interrupts.unless(interrupts.second, _Run(request, display, interrupts).run())
        except Interrupted:
            display.note(f"stopped; to go on: {shlex.join(request.again)}")
            return EXIT_INTERRUPTED
        finally:
            display.close()


class _Run:
    """One run, from the manifests to the exit code."""

    def __init__(self, request: RunRequest, display: Display, interrupts: Interrupts) -> None:
        self._request = request
        self._display = display
        self._interrupts = interrupts

    async def run(self) -> int:
        wanted = read(self._request.files, self._request.seed)
        with hold(self._request.out) as folder:
            record = folder.read_record()
            jobs = documents.merge(record.jobs, wanted.jobs)
            if record.finished and jobs == record.jobs:
                return self._finished_before(folder, record)
            pools = await self._interrupts.unless(self._interrupts.first, self._prepare(wanted))
            documents.refuse_other_models(record.pools, pools)
            folder.write_record(RunRecord(jobs=jobs, pools=pools))
            results = await self._serve(folder, jobs, pools)
            return self._end(folder, pools, results)

    def _finished_before(self, folder: OutFolder, record: RunRecord) -> int:
        results = read_results(folder, record)
        self._display.note(f"these jobs have finished in {folder.root}; to run them anew, choose another --out")
        self._display.result(Report(results, folder.root))
        return EXIT_SUCCEEDED if all_succeeded(results) else EXIT_FAILED

    async def _prepare(self, wanted: Wanted) -> tuple[PoolDocument, ...]:
        """Documents of the pools that jobs use, their models prepared."""
        pools = []
        for pool in wanted.pools:
            path = await prepare(pool.spec.model, self._display.waiting)
            pools.append(PoolDocument(name=pool.metadata.name, model_path=str(path), spec=pool.spec))
        return tuple(pools)

    async def _serve(
        self, folder: OutFolder, jobs: Sequence[JobDocument], pools: Sequence[PoolDocument]
    ) -> list[JobResult]:
        """Run the jobs until all are settled or the person asks to stop; return what is known of them then."""
        async with AsyncExitStack() as stack:
            self._display.waiting("starting the message server")
            guard = await stack.enter_async_context(warden())
            server = await stack.enter_async_context(message_server(folder, self._request.nats, guard))
            await announce(server.bus, jobs)
            launcher = Launcher(
                folder,
                server.url,
                str(folder.blobs),
                guard,
                {pool.name: pool for pool in pools},
                {job.ref.key: job for job in jobs},
                self._request.role_command,
            )
            collector = Collector(folder, server.bus, open_blobs(folder.blobs))
            watch = _Watch(server.bus, collector, self._display, jobs, pools)
            await self._supervise(watch, launcher)
            return await watch.results()

    async def _supervise(self, watch: "_Watch", launcher: Launcher) -> None:
        async with asyncio.TaskGroup() as tasks:
            supervisor = Supervisor(launcher, tasks)
            try:
                while not self._interrupts.first.is_set() and await watch.look(supervisor):
                    await _first_of(self._interrupts.first, supervisor.changed, TICK_S)
                self._say_why(bool(self._interrupts.first.is_set()))
                await supervisor.drain()
            finally:
                supervisor.kill()

    def _say_why(self, interrupted: bool) -> None:
        if interrupted:
            self._display.note(f"stopping; run the same command again to go on: {shlex.join(self._request.again)}")
        self._display.waiting("ending the roles; Ctrl-C again ends them at once" if interrupted else "ending the roles")

    def _end(self, folder: OutFolder, pools: tuple[PoolDocument, ...], results: Sequence[JobResult]) -> int:
        """Write what came of it, tell it, and turn it into an exit code."""
        write_summary(folder, results)
        finished = all(plan.settled(one.document, one.progress) for one in results)
        levels = tuple(one.progress for one in results if one.progress is not None)
        folder.write_record(
            RunRecord(jobs=tuple(one.document for one in results), pools=pools, progress=levels, finished=finished)
        )
        self._display.result(Report(results, folder.root))
        if self._interrupts.first.is_set() and not finished:
            self._display.note(f"to go on: {shlex.join(self._request.again)}")
            return EXIT_INTERRUPTED
        return EXIT_SUCCEEDED if all_succeeded(results) else EXIT_FAILED


@dataclass(slots=True)
class _Watch:
    """Looks at the bus, decides through `plan`, and shows and writes what it sees."""

    bus: Bus
    collector: Collector
    display: Display
    jobs: Sequence[JobDocument]
    pools: Sequence[PoolDocument]
    seen: Observation = field(default_factory=Observation)
    failures: dict[str, Failure] = field(default_factory=dict)
    marks: dict[str, tuple[Mark, ...]] = field(default_factory=dict)

    async def look(self, supervisor: Supervisor) -> bool:
        """One round; False once nothing is left to run. Raises InvalidInput when the output folder takes no more."""
        answered = await self._observe()
        self._give_up(supervisor)
        live = [job for job in self.jobs if job.ref.key not in self.failures]
        desired = plan.desired(self.pools, live, self.seen.progress)
        if not desired:
            return False
        await supervisor.reconcile(desired, self.seen.reports)
        for text in supervisor.news():
            self.display.note(text)
        self._show(supervisor, answered)
        return True

    async def results(self) -> list[JobResult]:
        """Everything that is known of the jobs, files written."""
        await self._observe()
        return [await self.collector.result(job, self._level(job), self.failures.get(job.ref.key)) for job in self.jobs]

    async def _observe(self) -> bool:
        """False when the server does not answer now: it is being restarted, and what was seen last still counts."""
        try:
            self.seen = await observe(self.bus)
            for job in self.jobs:
                await self.collector.follow(job, self._level(job))
        except Retryable:
            return False
        return True

    def _level(self, job: JobDocument) -> Progress | None:
        level = self.seen.progress.get(job.ref.key)
        return level if level is not None and level.uid == job.uid else None

    def _give_up(self, supervisor: Supervisor) -> None:
        for spec, text in supervisor.given_up():
            for job in plan.affected(spec, self.jobs):
                if not plan.settled(job, self._level(job)):
                    self.failures.setdefault(job.ref.key, Failure("RoleFailed", text))

    def _show(self, supervisor: Supervisor, answered: bool) -> None:
        now = time.time()
        views = [self._view(job, now) for job in self.jobs]
        waiting = status_line(supervisor.states(), views, now) if answered else "the message server does not answer yet"
        self.display.waiting(waiting)
        self.display.jobs(views)

    def _view(self, job: JobDocument, now: float) -> JobView:
        level = self._level(job)
        if level is None:
            return JobView(job)
        if level.phase == "Running":
            self.marks[job.uid] = advanced(self.marks.get(job.uid, ()), level.step, now)
        return JobView(job, level, eta_s(self.marks.get(job.uid, ()), level.steps, now))


async def _first_of(first: asyncio.Event, second: asyncio.Event, timeout_s: float) -> None:
    """Sleep until one of the events or the timeout; the second is cleared."""
    waits = [asyncio.ensure_future(event.wait()) for event in (first, second)]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    second.clear()
