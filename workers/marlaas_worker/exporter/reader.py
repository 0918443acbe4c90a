"""Reads a job's document, progress and records by single keys and subjects: all that an exporter's bus user may read.

A tenant's credential may not list a stream. So step records are read by number, up to the progress. Evaluation records are read by
version: for each step that is due for an evaluation, the first record of its version or a later one.
"""

from bisect import insort
from dataclasses import dataclass, field
from typing import TypeVar

from marlaas.trackers.seam import MetricRow, row_of
from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.messages import EvalRecord, JobDocument, Progress, StepRecord
from marlaas_api.wire import decode_as

R = TypeVar("R", StepRecord, EvalRecord)
V = TypeVar("V", JobDocument, Progress)


@dataclass(slots=True)
class JobReader:
    """Reads one job's document, progress and records from the bus, and keeps them. Each `read` adds the new records.

    Attributes:
        first: the document with which the exporter started; it names the job.
        document: the current one; None before the first `read`, once the job is deleted, or once another job has its name.
        progress: the job's last published progress; None before the first.
        kept: all records, in the order in which they were read. With None, the reader keeps only their rows.
        active_at: unix seconds of the job's creation, last record or last admission, whichever is last.
    """

    bus: Bus
    first: JobDocument
    document: JobDocument | None = None
    progress: Progress | None = None
    kept: list[StepRecord | EvalRecord] | None = None
    _rows: list[tuple[int, MetricRow]] = field(default_factory=list)
    _versions: list[int] = field(default_factory=lambda: [0])
    _next_due: int = 0
    _next_version: int = 0

    @property
    def rows(self) -> list[MetricRow]:
        """One row of metrics for each record read, in the order of the records in the stream. It is the same for every exporter of the job."""
        return [row for _, row in self._rows]

    @property
    def active_at(self) -> float:
        admitted_at = self.progress.admitted_at if self.progress is not None else None
        return max(self.first.created_at, admitted_at or 0.0, *(row.at for _, row in self._rows[-1:]))

    async def read(self) -> None:
        """Read the document, the progress, and the records that are new. Raises the errors of `Bus`, and Unreadable."""
        self.document = await self._value(subjects.JOBS, JobDocument)
        progress = await self._value(subjects.PROGRESS, Progress)
        if progress is not None:
            await self._read_steps(progress.step)
            await self._read_evals(progress)
        self.progress = progress  # last: with an end, all records are there

    async def _value(self, bucket: str, kind: type[V]) -> V | None:
        """Return this job's value in a KV bucket; None if there is none, or it belongs to another job of the same name."""
        entry = await (await self.bus.bucket(bucket, inspected=False)).get(subjects.job_key(*self._name))
        found = decode_as(kind, entry.data) if entry is not None and entry.data is not None else None
        return found if found is not None and found.uid == self.first.uid else None

    async def _read_steps(self, num: int) -> None:
        while (number := len(self._versions) - 1) < num:
            record = await self._record(StepRecord, subjects.step(*self._name, self.first.uid, number))
            if record is None:  # a replica that lags
                return
            self._versions.append(record.version)

    async def _read_evals(self, progress: Progress) -> None:
        """Read new evaluation records in rising order of versions. Stop at the first step that is due for an evaluation and has no record yet."""
        newest = max(sum(progress.versions.values()), self._versions[-1])
        while self._next_due < len(self._versions):
            is_due = self.first.spec.evaluates(self._next_due, progress.steps)
            if is_due and self._versions[self._next_due] >= self._next_version and not await self._found_eval(newest):
                self._next_version = max(self._next_version, self._versions[self._next_due])
                return
            self._next_due += not is_due or self._versions[self._next_due] < self._next_version

    async def _found_eval(self, newest: int) -> bool:
        for version in range(self._next_version, newest + 1):
            if await self._record(EvalRecord, subjects.evaluation(*self._name, self.first.uid, version)) is not None:
                self._next_version = version + 1
                return True
        return False

    async def _record(self, kind: type[R], subject: str) -> R | None:
        """Read the record with this subject and keep its row; return None if there is none."""
        stored = await self.bus.last(subjects.STEPS, subject)
        if stored is None:
            return None
        record = decode_as(kind, stored.data)
        if self.kept is not None:
            self.kept.append(record)
        insort(self._rows, (stored.sequence, row_of(record)), key=lambda kept: kept[0])
        return record

    @property
    def _name(self) -> tuple[str, str]:
        return self.first.namespace, self.first.job
