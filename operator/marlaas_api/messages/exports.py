"""Messages of a job's exporter: its report to the operator, and its requests to the orchestrator for files of adapters.

The exporter runs in the tenant's namespace, so readers bound and check what it writes.
"""

from pydantic import Field

from marlaas_api.messages.base import BusMessage, Integer, JobMessage


class DestinationReport(BusMessage):
    """A tracker, a webhook, or a target of uploads of a job.

    name: the tracker's, `webhook 1`, `hub`, `s3` or `volume`. url: where people look at the tracker's run or the repository; empty if it has no address. since: unix
    seconds since which it takes nothing; None while it works. error: why.
    """

    name: str
    url: str = ""
    since: float | None = None
    error: str = ""


class ExportReport(JobMessage):
    """State of a job's exporter; KV `exports`. The exporter writes it; the operator reads it, and the next exporter.

    Attributes:
        destinations: state of each destination: trackers, webhooks and upload targets.
        told: marks of the messages that were posted to webhooks (`notifications.Message.mark`), oldest first.
        uploaded: marks of the adapter versions that were uploaded (`TARGET AGENT@vVERSION`), oldest first.
        ended: `Progress.rest_mark` of the end or suspension whose records every destination has; empty if a destination lacks
            records, or the job is neither final nor suspended.
        at: time of the report, in unix seconds.
    """

    destinations: tuple[DestinationReport, ...] = ()
    told: tuple[str, ...] = ()
    uploaded: tuple[str, ...] = ()
    ended: str = ""
    at: float = 0.0


class AdapterRequest(JobMessage):
    """A request for a part of a published adapter; core subject `export.<ns>.<job>`. The exporter sends it to the orchestrator.

    file: name of the file to read from `offset` on; empty asks which files there are.
    """

    agent: str
    version: Integer
    file: str = ""
    offset: Integer = 0


class AdapterFile(BusMessage):
    """A file of an adapter, as its manifest lists it. sha256: in hex, of the whole file."""

    sha256: str
    size_bytes: int


class AdapterPart(JobMessage):
    """The answer to an `AdapterRequest`, whose fields it repeats.

    files: by name, if the request names no file. data: bytes of the file from `offset` on, at most `PART_BYTES`; empty at its end.
    error: why there is no answer, for people.
    """

    agent: str
    version: int
    file: str = ""
    offset: int = 0
    files: dict[str, AdapterFile] = Field(default_factory=dict)
    data: bytes = b""
    error: str = ""


PART_BYTES = 1 << 19
"""Half of the smallest `max_payload` of a NATS server in its default configuration."""
