"""`marlaas run`: validate, prepare, start all processes, watch until every job is settled, write the results, clean up.

Runs the decisions of the pure modules `documents`, `plan`, `table` and `report`. Nothing is started
before everything that users can get wrong has been checked.
"""

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from marlaas.episodes.files import DEFAULT_BYTES
from marlaas.local import changes, documents, estimates, plan
from marlaas.local.announcements import announce, withdraw, write_change
from marlaas.local.collection import Collector, read_results, with_last_fault, write_summary
from marlaas.local.curves import CurveDrawer
from marlaas.local.display import Display
from marlaas.local.documents import DesiredState, read
from marlaas.local.evaluation import Adapters, only_evaluating
from marlaas.local.folder import ModuleFile, OutFolder, RunRecord, hold, write
from marlaas.local.interrupts import EXIT_INTERRUPTED, Interrupted, Interrupts, first_of
from marlaas.local.messages import RunNotifier
from marlaas.local.modules import changed_data, changed_modules, data_files, module_files
from marlaas.local.preparation import is_unseen, prepare
from marlaas.local.processes import ROLE_COMMAND, Launcher, Watchdog, watchdog
from marlaas.local.pushing import Uploader, require_targets
from marlaas.local.recorder import Recorder
from marlaas.local.records import OpenedJob
from marlaas.local.report import Report
from marlaas.local.results import JobResult, all_succeeded
from marlaas.local.server import Existing, message_server
from marlaas.local.supervisor import GRACE_S, IDLE_GRACE_S, Supervisor
from marlaas.local.table import duration
from marlaas.local.tenants import SharesSoFar
from marlaas.local.watch import JobWatch
from marlaas.manifest.objects import STDIN, piped
from marlaas.models.cards import cards
from marlaas.models.memory import has_gpu, machine
from marlaas.notifications import require_urls
from marlaas.trackers.feed import TrackerFeed, TrackerPaths
from marlaas.trackers.seam import End, require
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus import Bus
from marlaas_api.errors import InvalidInput, first_cause
from marlaas_api.messages import JobDocument, PoolDocument
from marlaas_api.messages.pool_spec import PoolSpec

TICK_S = 0.5
EXIT_SUCCEEDED, EXIT_FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Arguments of a run.

    out: output folder.
    seed: replaces the manifests' seeds; None keeps them.
    nats, creds: URL of an existing NATS server, and its credentials file; None starts an embedded server.
    again: command line that continues this run.
    role_command: command line that runs a role.
    episodes_bytes: disk for each job's episodes; 0 keeps none.
    replicas, trainers: numbers of engines and trainers of each pool; None keeps the pools' own.
    adapters: the jobs only evaluate these; None trains.
    """

    files: tuple[str, ...]
    out: Path
    seed: int | None = None
    nats: str | None = None
    creds: Path | None = None
    again: tuple[str, ...] = ()
    role_command: tuple[str, ...] = ROLE_COMMAND
    episodes_bytes: int = DEFAULT_BYTES
    replicas: int | None = None
    trainers: int | None = None
    adapters: Adapters | None = None


def run(request: RunRequest, display: Display) -> int:
    """Run to the end and return the exit code: 0 only if every job succeeded.

    Raises:
        Permanent: the user must change something first (InvalidInput, ServerFailed, …); nothing is running.
        Retryable: the server of `nats` does not answer.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(request, display))
    except BaseExceptionGroup as group:
        raise first_cause(group) from group


async def _run(request: RunRequest, display: Display) -> int:
    interrupts = Interrupts()
    current = _Run(request, display, interrupts)
    with interrupts.listening():
        try:
            return await interrupts.unless(interrupts.second, current.run())
        except Interrupted:
            display.note(f"stopped; to continue: {current.continuing}")
            return EXIT_INTERRUPTED
        finally:
            display.close()


@dataclass(frozen=True, slots=True)
class _Content:
    """Jobs, pools, and the folders of the jobs' manifests by key."""

    jobs: tuple[JobDocument, ...]
    pools: tuple[PoolDocument, ...]
    modules: dict[str, Path]


@dataclass(frozen=True, slots=True)
class _Services:
    """Services of a run and its output folder, used by the loop that supervises the jobs."""

    folder: OutFolder
    bus: Bus
    watch: JobWatch
    launcher: Launcher
    recorder: Recorder
    notifier: RunNotifier


class _Run:
    """One run, from the manifests to the exit code. again: command line that continues it, with the manifests of added jobs."""

    def __init__(self, request: RunRequest, display: Display, interrupts: Interrupts) -> None:
        self._request = request
        self._display = display
        self._interrupts = interrupts
        self._cancelled: tuple[JobDocument, ...] = ()
        self._modules: dict[str, ModuleFile] = {}
        self._data: dict[str, tuple[ModuleFile, ...]] = {}
        self._shares: Mapping[str, SharesSoFar] = {}
        self._estimates: list[estimates.Estimate] = []
        self.again = request.again

    async def run(self) -> int:
        wanted = self._read()
        for note in wanted.notes:
            self._display.note(note)
        require(wanted.jobs)
        for job in wanted.jobs:
            require_urls(job)
        with hold(self._request.out) as folder:
            if manifest := piped(self._request.files):
                write(folder.piped, manifest)
            record = folder.read_record()
            jobs = documents.merge(record.jobs, wanted.jobs)
            changes.refuse_leftovers(folder, record.jobs, jobs)
            changes.forget(folder)
            self._cancelled = record.cancelled
            documents.refuse_other_models(record.pools, wanted.pools)
            if record.finished and jobs == record.jobs:
                return await self._finished_before(folder, record)
            ended = {progress.uid: progress for progress in record.progress if progress.phase.final}
            playing = [job for job in jobs if job.uid not in ended or not plan.settled(job, ended[job.uid])]
            for job in playing:
                require_targets(job)
            self._modules = {**record.modules, **module_files(playing, wanted.folders)}
            self._data = {**record.data, **data_files(playing)}
            for note in (*changed_modules(record.modules, self._modules), *changed_data(record.data, self._data)):
                self._display.note(note)
            async with watchdog() as guard:
                pools = await self._interrupts.unless(self._interrupts.first, self._prepare(wanted, jobs, guard))
                folder.write_record(self._record(jobs, pools))
                if not record.jobs:
                    self._estimate(jobs, pools)
                results = await self._serve(folder, _Content(jobs, pools, wanted.folders), guard)
            code = self._end(folder, pools, results)
            return code if await self._push(folder, pools, results) else max(code, EXIT_FAILED)

    @property
    def continuing(self) -> str:
        """The command line that continues this run, also if its manifest came from a pipe."""
        kept = OutFolder(self._request.out).piped
        return shlex.join(self.again) + (f" < {shlex.quote(str(kept))}" if STDIN in self.again else "")

    def _read(self) -> DesiredState:
        """Read the manifests. Raises InvalidInput."""
        wanted = read(self._request.files, self._request.seed)
        return wanted if self._request.adapters is None else only_evaluating(wanted, self._request.adapters)

    def _estimate(self, jobs: Sequence[JobDocument], pools: Sequence[PoolDocument]) -> None:
        """Say what the jobs of a new run will take."""
        known = estimates.read()
        self._estimates = [estimates.estimate(job, _pool_of(job, pools), known) for job in jobs]
        for line in estimates.lines(self._estimates):
            self._display.note(line)

    def _compare(self, pools: Sequence[PoolDocument], results: Sequence[JobResult]) -> None:
        """Say how a new run's estimate compares with what came, and keep the measured rates."""
        is_as_begun = {str(one.document.ref) for one in results} == {one.job for one in self._estimates}
        if not is_as_begun or not all_succeeded(results):
            return
        ends = [one.progress for one in results if one.progress is not None]
        began = min((one.started_at for one in ends if one.started_at is not None), default=0.0)
        ended = max((one.finished_at for one in ends if one.finished_at is not None), default=began)
        if (expected := estimates.total_s(self._estimates)) is not None:
            self._display.note(f"estimated {duration(expected)}, took {duration(ended - began)}")
        found = [estimates.measured(one, _pool_of(one.document, pools), len(results), ended) for one in results]
        estimates.add(one for one in found if one is not None)

    async def _finished_before(self, folder: OutFolder, record: RunRecord) -> int:
        results = read_results(folder, record)
        self._display.note(f"no job in {folder.root} is left to run; to run them again, choose another --out")
        self._display.result(Report(results, folder.root))
        has_pushed = await self._push(folder, record.pools, results)
        return EXIT_SUCCEEDED if has_pushed and all_succeeded(results) else EXIT_FAILED

    async def _prepare(
        self, wanted: DesiredState, jobs: Sequence[JobDocument], guard: Watchdog
    ) -> tuple[PoolDocument, ...]:
        """Prepare the models and return the documents of the pools that jobs use.

        The manifests are read again if a model was fetched or built, because it can be inspected only then. Raises
        InvalidInput.
        """
        has_unseen = any(is_unseen(pool.spec.model) for pool in wanted.pools)
        pools = documents.scaled(wanted.pools, self._request.replicas, self._request.trainers)
        paths = [await prepare(pool.spec.model, self._display.waiting, guard) for pool in pools]
        if has_unseen:
            await asyncio.to_thread(self._read)
        here = None if has_gpu() else machine()
        found = await asyncio.to_thread(cards) if has_gpu() else ()
        resources = documents.Resources(None if here is None else here.free, found)
        return await asyncio.to_thread(documents.pool_documents, pools, paths, jobs, resources)

    async def _serve(self, folder: OutFolder, content: "_Content", guard: Watchdog) -> list[JobResult]:
        """Run the jobs until all are settled or the user asks to stop, and return their results so far."""
        self._display.waiting("starting the NATS server")
        async with message_server(folder, self._existing(), guard) as server:
            self._cancelled = await withdraw(server.bus, self._cancelled)
            await announce(server.bus, content.jobs)
            pools = {pool.name: pool for pool in content.pools}
            launcher = Launcher(
                folder,
                server.url,
                server.credentials,
                guard,
                pools,
                {job.ref.key: job for job in content.jobs},
                content.modules,
                self._request.role_command,
            )
            blobs = open_blobs(folder.blobs)
            notifier = RunNotifier(folder.state / "told", self._display.note)
            recorder = Recorder(folder, server.bus, blobs, content.jobs, self._request.episodes_bytes)
            feed = TrackerFeed(TrackerPaths(folder.state, lambda job: folder.job(job.ref)), self._display.note)
            curves = CurveDrawer(guard)
            collector = Collector(folder, server.bus, blobs, feed.add, curves.add, pools)
            watch = JobWatch(server.bus, collector, self._display, content.jobs, content.pools)
            async with curves:
                async with launcher.with_host() as hosting:
                    await self._supervise(_Services(folder, server.bus, watch, hosting, recorder, notifier))
                results, self._shares = await watch.results(), watch.shares.sums
                self._display.waiting("drawing the jobs' curves")
                await curves.drain()
            finished = [one.document for one in results if one.phase.final]
            await recorder.forget([document.ref for document in finished])
            ends = {one.document.uid: End.of(one.progress) for one in results if one.progress is not None}
            await feed.close(watch.jobs, ends)
            await notifier.tell(watch.jobs, {one.document.ref.key: one.progress for one in results if one.progress})
            return results

    async def _push(self, folder: OutFolder, pools: Sequence[PoolDocument], results: Sequence[JobResult]) -> bool:
        """Upload the adapters of jobs that ask for it, and return whether all are where they belong."""
        uploader, named = Uploader(folder.state / "pushed", self._display.note), {pool.name: pool for pool in pools}
        ended = [one for one in results if one.failure is None and one.document.spec.uploads]
        jobs = [OpenedJob(one.document, named, folder.job(one.document.ref), one.progress) for one in ended]
        if jobs:
            self._display.waiting("uploading adapters")
        pushed = [await asyncio.to_thread(uploader.push, job) for job in jobs]
        return all(pushed)

    def _existing(self) -> Existing | None:
        return None if self._request.nats is None else Existing(self._request.nats, self._request.creds)

    async def _supervise(self, parts: "_Services") -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(parts.recorder.run(), name="episodes")
            following = tasks.create_task(parts.watch.follow(), name="progress")
            watch = parts.watch
            telling = tasks.create_task(parts.notifier.run(lambda: (watch.jobs, watch.seen.progress)), name="messages")
            supervisor = Supervisor(parts.launcher, tasks)
            try:
                while not self._interrupts.first.is_set() and await parts.watch.poll(supervisor):
                    await first_of((self._interrupts.first, supervisor.changed, parts.watch.moved), TICK_S)
                    supervisor.changed.clear()
                    parts.watch.moved.clear()
                    await self._change(parts)
                self._note_stopping()
                await supervisor.drain(GRACE_S if self._interrupts.first.is_set() else IDLE_GRACE_S)
            finally:
                supervisor.kill()
                parts.recorder.stop(at_once=self._interrupts.first.is_set())
                following.cancel()
                telling.cancel()

    async def _change(self, parts: "_Services") -> None:
        """Apply the changes that commands ask for, and answer them."""
        for question in changes.take(parts.folder, parts.watch.latest_progress):
            try:
                lines = await self._apply(parts, question.change)
            except InvalidInput as error:
                question.answer(changes.ChangeAnswer(error=str(error)))
                continue
            for line in lines:
                self._display.note(line)
            question.answer(changes.ChangeAnswer(lines=lines))

    async def _apply(self, parts: "_Services", change: changes.RunChange) -> tuple[str, ...]:
        """Apply one change. The record is written first: a run that is killed here continues with the changed jobs."""
        watch, before = parts.watch, self._record(parts.watch.jobs, tuple(parts.watch.pools))
        names = [pool.name for pool in before.pools]
        found = changes.changed(before.jobs, change, watch.seen.progress, names, self._request.seed)
        changes.refuse_leftovers(parts.folder, before.jobs, found.jobs)
        for job in found.written:
            require_urls(job)
            require_targets(job)
        cancelled = (*self._cancelled, *found.cancelled)
        modules = {**self._modules, **module_files(found.written, change.folders)}
        data = {**self._data, **data_files(found.written)}
        parts.folder.write_record(
            before.model_copy(update={"jobs": found.jobs, "cancelled": cancelled, "modules": modules, "data": data})
        )
        try:
            stopping = self._interrupts.first
            self._cancelled = await write_change(parts.bus, found.written, cancelled, stopping)
        except InvalidInput:
            parts.folder.write_record(before)
            raise
        self._modules, self._data = modules, data
        for job in found.written:
            parts.launcher.add(job, change.folders.get(job.ref.key))
        watch.replace(found.jobs)
        parts.recorder.replace(found.jobs)
        await parts.recorder.forget([job.ref for job in found.cancelled])
        self.again += tuple(file for file in change.files if file not in self.again)
        return found.lines

    def _record(self, jobs: tuple[JobDocument, ...], pools: tuple[PoolDocument, ...]) -> RunRecord:
        return RunRecord(jobs=jobs, pools=pools, cancelled=self._cancelled, modules=self._modules, data=self._data)

    def _note_stopping(self) -> None:
        if self._interrupts.first.is_set():
            self._display.note(f"stopping; to continue later, run: {self.continuing}")
        self._display.waiting("stopping the roles; Ctrl-C stops them at once")

    def _end(self, folder: OutFolder, pools: tuple[PoolDocument, ...], results: Sequence[JobResult]) -> int:
        """Write the summary and the record, display the report, and return the exit code."""
        results = [with_last_fault(folder, one) for one in results]
        write_summary(folder, results, self._modules, self._data)
        finished = all(plan.settled(one.document, one.progress) for one in results)
        all_progress = tuple(one.progress for one in results if one.progress is not None)
        record = self._record(tuple(one.document for one in results), pools)
        folder.write_record(record.model_copy(update={"progress": all_progress, "finished": finished}))
        self._display.result(Report(results, folder.root, self._shares))
        self._compare(pools, results)
        if self._interrupts.first.is_set() and not finished:
            self._display.note(f"to continue: {self.continuing}")
            return EXIT_INTERRUPTED
        return EXIT_SUCCEEDED if all_succeeded(results) else EXIT_FAILED


def _pool_of(job: JobDocument, pools: Sequence[PoolDocument]) -> PoolSpec:
    """Return the pool of a job's first policy."""
    name = job.pool_of(job.spec.policies[0])
    return next(pool.spec for pool in pools if pool.name == name)
