"""A job's rows on their way to a tracker whose answers are lost and whose exporter is killed."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from marlaas.trackers.seam import MetricRow
from marlaas_api.kinds.export import Tracker
from marlaas_api.messages import JobDocument, Progress
from marlaas_worker.exporter.destinations import JobView, TrackerDestination, safe_text


def delivered(
    name: Tracker, document: JobDocument, rows: Sequence[MetricRow], end: Progress, folder: Path,
    looks: Iterable[tuple[int, bool]], prepare: Callable[[], None] = lambda: None,
) -> tuple[TrackerDestination, list[str]]:  # fmt: skip
    """Have exporters look at the job; return the last one's destination, and the failures as they are reported.

    Args:
        looks: for each look, the number of rows by then, and whether the exporter is killed after it. With all rows, the job has ended.
        prepare: called before each look.
    """
    destination, failures = TrackerDestination(name, folder), []
    for num, killed in looks:
        prepare()
        view = JobView(document, tuple(rows[:num]), end if num == len(rows) else None, 0.0, (), 0.0)
        if destination.lacks(view):
            try:
                destination.deliver(view)
            except Exception as error:
                failures.append(safe_text(error))
        destination = TrackerDestination(name, folder, destination.ended) if killed else destination
    return destination, failures
