"""Delivers new rows to trackers on a separate thread, so that a slow or broken tracker delays neither training nor Ctrl-C.

A tracker that fails is reported once and gets no more rows in this run. The job continues. A ledger has a line for each row, written
*before* the row is delivered, so no row is delivered twice, whenever a process is killed. A kill between the two loses one point of a
curve, which the run's own files still have.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marlaas.trackers.seam import End, Open, Tracker, open_tracker, rows
from marlaas_api.kinds.export import Tracker as Name
from marlaas_api.messages import EvalRecord, JobDocument, StepRecord


@dataclass(slots=True)
class DeliveryLedger:
    """Ledger of one job. A line that a kill cut off matches no row."""

    path: Path
    _delivered: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_text() if self.path.exists() else ""
        if content and not content.endswith("\n"):
            with self.path.open("a") as file:
                file.write("\n")
        for line in content.splitlines():
            tracker, _, key = line.partition(" ")
            self._delivered.setdefault(tracker, set()).add(key)

    def delivered(self, tracker: str) -> set[str]:
        """Return the keys of the rows that were delivered to this tracker."""
        return self._delivered.setdefault(tracker, set())

    def mark(self, tracker: str, key: str) -> None:
        """Record that a row is about to be delivered."""
        with self.path.open("a") as file:
            file.write(f"{tracker} {key}\n")
        self.delivered(tracker).add(key)


log = logging.getLogger(__name__)

CLOSE_S = 60.0
"""Longest wait at the end of a run for undelivered rows, in seconds."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A job's records to deliver, or the end of the run: `is_last`, with the end of the job if it has ended."""

    document: JobDocument
    steps: Sequence[StepRecord] = ()
    evals: Sequence[EvalRecord] = ()
    is_last: bool = False
    end: End | None = None


@dataclass(slots=True)
class TrackerPaths:
    """Folders. `state` holds the ledgers; `job` returns a job's own folder for its document."""

    state: Path
    job: Callable[[JobDocument], Path]


@dataclass(slots=True)
class TrackerFeed:
    """Delivers the records of all jobs to their trackers. `note` gets the place of each tracker's metrics, and its failures."""

    place: TrackerPaths
    note: Callable[[str], None]
    open_tracker: Open = open_tracker
    _batches: "queue.SimpleQueue[_Batch | None]" = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None
    _ledgers: dict[str, DeliveryLedger] = field(default_factory=dict)
    _trackers: dict[tuple[str, Name], Tracker | None] = field(default_factory=dict)

    def add(self, document: JobDocument, steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> None:
        """Queue a job's records; new ones are delivered soon. Returns at once."""
        if document.spec.export.trackers:
            self._put(_Batch(document, steps, evals))

    async def close(self, jobs: Sequence[JobDocument], ends: Mapping[str, End | None]) -> None:
        """Deliver the rest and close the trackers. Gives up after `CLOSE_S`.

        `ends` has the end of each job that has ended, by uid.
        """
        if self._thread is None:
            return
        for job in jobs:
            self._put(_Batch(job, is_last=True, end=ends.get(job.uid)))
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        thread = self._thread
        self._batches.put(None)

        def wait() -> None:
            thread.join()
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for this
                loop.call_soon_threadsafe(over.set)

        threading.Thread(target=wait, daemon=True, name="trackers' end").start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await over.wait()
        except TimeoutError:
            self.note(f"the trackers have not accepted all rows within {CLOSE_S:.0f} s; steps.jsonl has all of them")

    def _put(self, batch: _Batch) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="trackers")
            self._thread.start()
        self._batches.put(batch)

    def _work(self) -> None:
        while (batch := self._batches.get()) is not None:
            for name in batch.document.spec.export.trackers:
                self._serve(name, batch)

    def _serve(self, name: Name, batch: _Batch) -> None:
        """Deliver one batch. Any exception of a library is caught here, because it must not affect the job."""
        key = (batch.document.uid, name)
        try:
            if not batch.is_last:
                self._deliver(name, batch)
            elif (tracker := self._trackers.get(key)) is not None:
                tracker.close(batch.end)
        except Exception as error:
            log.debug("%s", name, exc_info=error)
            self._trackers[key] = None
            self.note(
                f"{batch.document.ref}: tracker {name} failed and gets no more rows in this run: {type(error).__name__}: {error}"
            )

    def _deliver(self, name: Name, batch: _Batch) -> None:
        ledger = self._ledger(batch.document)
        delivered = ledger.delivered(name)
        fresh = [row for row in rows(batch.steps, batch.evals) if row.key not in delivered]
        tracker = self._tracker(name, batch.document) if fresh else None
        if tracker is None:
            return
        for row in fresh:
            number = len(delivered)
            ledger.mark(name, row.key)
            tracker.log(number, row)

    def _ledger(self, document: JobDocument) -> DeliveryLedger:
        if document.uid not in self._ledgers:
            self._ledgers[document.uid] = DeliveryLedger(self.place.state / "trackers" / f"{document.uid}.told")
        return self._ledgers[document.uid]

    def _tracker(self, name: Name, document: JobDocument) -> Tracker | None:
        key = (document.uid, name)
        if key not in self._trackers:
            opened = self.open_tracker(name, document, self.place.job(document))
            self._trackers[key] = opened
            self.note(f"{document.ref}: {opened.where}")
        return self._trackers[key]
