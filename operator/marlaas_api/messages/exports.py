"""What the exporter of a job reports to the operator. A pod in the tenant's namespace writes it, so readers bound and escape it."""

from marlaas_api.messages.base import BusMessage, JobMessage


class DestinationReport(BusMessage):
    """A tracker or a webhook of a job.

    name: the tracker's, or `webhook 1`. url: where people look at the tracker's run; empty if it has no address. since: unix
    seconds since which it takes nothing; None while it works. error: why.
    """

    name: str
    url: str = ""
    since: float | None = None
    error: str = ""


class ExportReport(JobMessage):
    """State of a job's exporter; KV `exports`. The exporter writes it; the operator reads it, and the next exporter.

    told: marks of the messages that were posted, oldest first. ended: the mark of the job's end or rest (`Progress.rest_mark`) up to
    which every destination has everything; empty while the job goes on. at: unix seconds.
    """

    destinations: tuple[DestinationReport, ...] = ()
    told: tuple[str, ...] = ()
    ended: str = ""
    at: float = 0.0
