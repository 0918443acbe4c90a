"""Processes that should run, computed from job documents and progress, and the backoff of processes that exit. Pure.

A run of a process is good if the process stayed ready for 30 s. Bad runs in a row are counted. Exits before being
ready hint at a wrong setting, so 3 of them are the limit. A process that is killed by a signal before being ready
counts as a short run, with a limit of 8. A role that exits with EXIT_INVALID is given up at once, whether ready or
not: a role without reports counts as ready after a while, and on a slow machine it has not read its settings by
then. Only after a good run it is restarted once more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from marlaas_api.messages import JobDocument, Phase, PoolDocument, Progress, ReplicaReport

START_S = 3.0
"""The orchestrator and sandboxes send no reports; a process of theirs counts as ready after this time."""


@dataclass(frozen=True, slots=True, order=True)
class ProcessSpec:
    """One role process. `name` is the replica's name and stays the same after a restart; `pool` or `job` (its key) is the owner."""

    role: str
    name: str
    pool: str = ""
    job: str = ""

    @property
    def key(self) -> str:
        """Key that is unique among the runner's processes; also the name of its log."""
        return ".".join(part for part in (self.name, self.pool or self.job) if part)

    def __str__(self) -> str:
        owner = self.pool or self.job.replace(".", "/")
        return f"{self.name} ({owner})" if owner else self.name


def settled(document: JobDocument, progress: Progress | None) -> bool:
    """Return whether the job stays as it is until its document changes."""
    if progress is None or progress.uid != document.uid:
        return False
    if progress.phase.final:
        return not _goes_on(document, progress)
    return progress.phase is Phase.SUSPENDED and progress.generation >= document.generation


def _goes_on(document: JobDocument, progress: Progress) -> bool:
    """Return whether a succeeded job has been given more steps since."""
    newer = document.generation > progress.generation
    return newer and progress.phase is Phase.SUCCEEDED and document.spec.training.steps > progress.step


def desired(
    pools: Sequence[PoolDocument], documents: Sequence[JobDocument], progress: Mapping[str, Progress]
) -> tuple[ProcessSpec, ...]:
    """Return the processes that should run now for these jobs; none once every job is settled."""
    live = [document for document in documents if not settled(document, progress.get(document.ref.key))]
    if not live:
        return ()
    used = [pool for pool in pools if any(pool.name in document.pools for document in live)]
    sandboxes = [spec for document in live for spec in _sandboxes(document, progress.get(document.ref.key))]
    return (ProcessSpec("orchestrator", "orchestrator"), *_pool_workers(used), *sandboxes)


def affected(spec: ProcessSpec, documents: Sequence[JobDocument]) -> list[JobDocument]:
    """Return the jobs that need this process."""
    return [
        document
        for document in documents
        if (not spec.pool or spec.pool in document.pools) and spec.job in ("", document.ref.key)
    ]


def is_ready(spec: ProcessSpec, started_at: float, reports: Sequence[ReplicaReport], now: float) -> bool:
    """Return whether the process that started at `started_at` reports that it is ready. Times are unix seconds."""
    if not spec.pool:
        return now - started_at >= START_S
    return any(
        report.role == spec.role
        and report.replica == spec.name
        and report.pool == spec.pool
        and report.ready
        and report.at >= started_at
        for report in reports
    )


def cards_by_worker(pools: Sequence[PoolDocument], cards: Sequence[str]) -> dict[str, str]:
    """Return the GPU of each engine and trainer by the process's key, in turn; empty on a machine with fewer than two."""
    keys = [spec.key for spec in _pool_workers(pools)] if len(cards) > 1 else []
    return {key: cards[number % len(cards)] for number, key in enumerate(keys)}


def _pool_workers(pools: Sequence[PoolDocument]) -> Iterator[ProcessSpec]:
    for pool in pools:
        for role, workers in (("rollout", pool.spec.rollout), ("trainer", pool.spec.trainer)):
            for index in range(workers.replicas):
                yield ProcessSpec(role, f"{role}-{index}", pool=pool.name)


def _sandboxes(document: JobDocument, progress: Progress | None) -> Iterator[ProcessSpec]:
    if progress is None or progress.uid != document.uid or not progress.admitted or progress.phase.final:
        return
    for index in range(document.spec.environment.replicas):
        yield ProcessSpec("sandbox", f"sandbox-{index}", job=document.ref.key)


MAX_START_S = 1800.0
"""Longest start of a pool's worker, as in a cluster (its startup probe): loading a large model takes minutes."""
MIN_READY_S = 30.0
MAX_NEVER_READY = 3
MAX_SHORT = 8
MAX_DELAY_S = 30.0
EXIT_INVALID = 2
"""Exit code of a role that only a user can fix (`InvalidInput`)."""


@dataclass(frozen=True, slots=True)
class ProcessRun:
    """One run of a process. Times are seconds; `ready_at` None: it was never ready.

    `exit_code` is as in `subprocess` (negative: the signal).
    """

    ended_at: float
    ready_at: float | None
    exit_code: int

    @property
    def good(self) -> bool:
        """Whether the process stayed ready for MIN_READY_S."""
        return self.ready_at is not None and self.ended_at - self.ready_at >= MIN_READY_S

    @property
    def never_ready(self) -> bool:
        """Whether the process exited by itself before it was ready."""
        return self.ready_at is None and self.exit_code >= 0


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """Counts of consecutive bad runs of one process."""

    never_ready: int = 0
    short: int = 0
    invalid: bool = False

    @property
    def in_a_row(self) -> int:
        """Number of consecutive bad runs."""
        return self.never_ready + self.short

    @property
    def gives_up(self) -> bool:
        """Whether the process is not to be started again."""
        return self.invalid or self.never_ready >= MAX_NEVER_READY or self.short >= MAX_SHORT

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the next start: 0 after a good run, then 1, 2, 4, … up to 30."""
        return min(MAX_DELAY_S, 2.0 ** (self.in_a_row - 1)) if self.in_a_row else 0.0


def after(backoff: RestartBackoff, life: ProcessRun) -> RestartBackoff:
    """Return the backoff after one more run."""
    if life.exit_code == EXIT_INVALID and not life.good:
        return replace(backoff, never_ready=backoff.never_ready + 1, invalid=True)
    if life.good:
        return RestartBackoff()
    if life.never_ready:
        return replace(backoff, never_ready=backoff.never_ready + 1)
    return replace(backoff, short=backoff.short + 1)
