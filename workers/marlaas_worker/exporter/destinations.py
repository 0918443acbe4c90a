"""Delivers a job's rows and messages to its trackers and webhooks, each in a thread of its own, with backoff after failures.

A tracker gets every row once: before the first row, and again after every failure, it is opened and asked which rows it has.
"""

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from marlaas.notifications import JobNews, Message, Post, due, post, url_of
from marlaas.trackers.seam import End, MetricRow, Open, Tracker, open_tracker
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import DestinationReport, JobDocument, Progress

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
_LONGEST_ERROR, _LONGEST_URL, _LEAST_SECRET = 500, 1024, 8
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_NAME = re.compile(r"KEY|TOKEN|PASS|SECRET|AUTH|CREDENTIAL|WEBHOOK", re.IGNORECASE)
_NEEDED = {"mlflow": "MLFLOW_TRACKING_URI", "wandb": "WANDB_API_KEY", "trackio": "TRACKIO_SERVER_URL"}


@dataclass(frozen=True, slots=True)
class JobView:
    """A job's state at one moment, from which each destination computes what to deliver.

    Attributes:
        document: the job's document.
        rows: one row of metrics for each step and evaluation of the job, in the order of the stream of records.
        progress: the job's last published progress; None before the first.
        active_at: unix seconds of its creation, last record, last admission, or the start of this exporter, whichever is last.
        links: URLs of the job's runs in trackers.
        now: time of this view, in unix seconds.
    """

    document: JobDocument
    rows: tuple[MetricRow, ...]
    progress: Progress | None
    active_at: float
    links: tuple[str, ...]
    now: float

    @property
    def end_mark(self) -> str:
        """Name of the job's end, such as `Succeeded 40/40`; empty while it goes on."""
        return self.progress.end_mark if self.progress is not None else ""


class Destination(Protocol):
    """One tracker, webhook or target of uploads. `deliver` and `close` block, and raise whatever the library raises."""

    @property
    def name(self) -> str:
        """Name in the status and in logs, such as `webhook 1`; unique in the job."""
        ...

    @property
    def url(self) -> str:
        """Address at which people see what was delivered; empty if unknown."""
        ...

    def lacks(self, view: JobView) -> bool:
        """Return whether something is to be delivered now."""
        ...

    def deliver(self, view: JobView) -> None:
        """Deliver everything that is due in this view."""
        ...

    def close(self, end: End | None) -> None:
        """Close connections before the process ends. end: DELETED if the job is deleted; None if it may go on under another exporter."""
        ...


@dataclass(slots=True)
class TrackerDestination:
    """`Destination` that sends a job's rows to its run in one tracker, each row once, and then the job's end.

    Attributes:
        name: of the tracker.
        folder: for the tracker's own files.
        ended: the last `JobView.end_mark` that was delivered, also by an earlier process; empty if none.
        open: opens or resumes the job's run in the tracker.
        url: where to view the run, as text for people; empty if unknown.
    """

    name: Literal["wandb", "mlflow", "trackio"]
    folder: Path
    ended: str = ""
    open: Open = open_tracker
    url: str = ""
    _tracker: Tracker | None = None
    _delivered: set[str] = field(default_factory=set)

    def lacks(self, view: JobView) -> bool:
        if view.end_mark:
            return self.ended != view.end_mark
        return len(view.rows) > len(self._delivered)

    def deliver(self, view: JobView) -> None:
        try:
            self._deliver(view)
        except Exception:
            self._tracker, self._delivered = None, set()  # it may have taken the row: ask
            raise

    def _deliver(self, view: JobView) -> None:
        if self._tracker is None:
            if (needed := _NEEDED.get(self.name)) and not os.environ.get(needed):
                raise InvalidInput(f"{self.name} needs {needed} from a Secret of export.secretRefs")
            self._tracker = self.open(self.name, view.document, self.folder)
            self.url = self._tracker.where
        for number, row in enumerate(view.rows):
            if row.key not in self._delivered:
                if not self._tracker.has(number, row):
                    self._tracker.log(number, row)
                self._delivered.add(row.key)
        if view.progress is not None and view.end_mark:
            self._tracker.close(End.of(view.progress))
            self._tracker, self.ended = None, view.end_mark

    def close(self, end: End | None) -> None:
        if self._tracker is not None:
            self._tracker.close(end)


@dataclass(slots=True)
class WebhookDestination:
    """`Destination` that posts a job's messages to the webhook of one entry of `export.notify`, each message once.

    Attributes:
        entry: index of the entry in `export.notify`, from 0.
        told: marks of the messages that were posted. All webhooks of the job share the list; a mark begins with the number of its entry.
        post: posts a text to a URL.
        url: always empty; a webhook has no page to show.
    """

    entry: int
    told: list[str]
    post: Post = post
    url: str = ""

    @property
    def name(self) -> str:
        return f"webhook {self.entry + 1}"

    def lacks(self, view: JobView) -> bool:
        return next(self._due(view), None) is not None

    def deliver(self, view: JobView) -> None:
        for message in self._due(view):
            self.post(url_of(self.entry), message.text)
            self.told.append(message.mark)

    def close(self, end: End | None) -> None:
        return None

    def _due(self, view: JobView) -> Iterator[Message]:
        news = JobNews(view.document, view.progress, view.active_at, view.links)
        return due(news, self.entry, self.told, view.now)


@dataclass(slots=True)
class Courier:
    """Delivers to one destination until cancelled, and records for the report whether deliveries succeed.

    Attributes:
        destination: the tracker, webhook or upload target.
        view: returns the newest view of the job; None before the first read, and once the job is deleted.
        changed: called after each delivery and each failure.
        since: unix seconds of the first failure since the last success; None while deliveries succeed.
        error: text of the last failure; empty while deliveries succeed.
    """

    destination: Destination
    view: Callable[[], JobView | None]
    changed: Callable[[], None]
    since: float | None = None
    error: str = ""

    async def run(self, tick_s: float) -> None:
        """Send missing rows, messages or files to the destination every `tick_s` seconds, until cancelled. After a failure, retry with backoff."""
        pause_s = FIRST_PAUSE_S
        while True:
            view = self.view()
            if view is not None and self.destination.lacks(view):
                try:
                    await in_thread(lambda view=view: self.destination.deliver(view), self.destination.name)  # type: ignore[misc]
                except Exception as error:  # whatever a library raises: the job and the other destinations go on
                    self.since, self.error = self.since or view.now, safe_text(error)
                    self.changed()
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                    continue
                self._works()
                pause_s = FIRST_PAUSE_S
            elif self.since is not None:  # what failed is not due any more
                self._works()
            await asyncio.sleep(tick_s)

    def _works(self) -> None:
        self.since, self.error = None, ""
        self.changed()

    def report(self) -> DestinationReport:
        """Return the destination's state for the operator."""
        url = self.destination.url
        shown = url if url.startswith(("https://", "http://")) and len(url) <= _LONGEST_URL else ""
        return DestinationReport(name=self.destination.name, url=shown, since=self.since, error=self.error)


async def in_thread(call: Callable[[], None], name: str) -> None:
    """Run a blocking call in a daemon thread, so that a call that hangs does not keep the process from ending. Raises the call's exception.

    name: of the thread.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        raised = None
        try:
            call()
        except Exception as error:
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(settle, raised)

    threading.Thread(target=run, daemon=True, name=name).start()
    await done


def safe_text(error: Exception) -> str:
    """Return an error as one line without credentials: its text goes into the job's status, which more people may read than its Secrets."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _LEAST_SECRET]
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "…")
    return _LOGIN.sub("…@", text)[:_LONGEST_ERROR]
