"""One look at everything that decides what a trainer does: jobs, progress, policy keys, and which trainers are alive."""

import logging
from collections.abc import Hashable
from dataclasses import dataclass

from marlaas_api import subjects, wire
from marlaas_api.bus import Bus, Entry
from marlaas_api.errors import UnsupportedSchema
from marlaas_api.messages import BusMessage, JobDocument, PolicyRecord, Progress
from marlaas_api.wire import BadMessage
from marlaas_worker.trainer.assignment import Assignment, assignments

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """An agent's policy key: its entry, for a compare-and-set, and what it says."""

    entry: Entry
    record: PolicyRecord


@dataclass(frozen=True, slots=True)
class View:
    """wanted, known: by policy key. live: names of trainers of this pool with a live report."""

    wanted: dict[str, Assignment]
    known: dict[str, PolicyEntry]
    live: frozenset[str]

    @property
    def holders(self) -> set[str]:
        """Trainers that hold a lease of a wanted agent."""
        return {known.record.holder for key, known in self.known.items() if key in self.wanted and known.record.holder}


class Memory:
    """Messages by bucket and key as they were last read: thousands of jobs that wait are decoded once, not at every look."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, tuple[int, BusMessage | None]]] = {}

    def read(self, bucket: str, entries: list[Entry]) -> dict[str, BusMessage | None]:
        """What present entries say, by key; what is not among them is forgotten."""
        before, now = self._known.get(bucket, {}), {}
        for entry in entries:
            known = before.get(entry.key)
            now[entry.key] = (
                known if known is not None and known[0] == entry.revision else (entry.revision, _read(entry))
            )
        self._known[bucket] = now
        return {key: message for key, (_, message) in now.items()}


async def look(bus: Bus, pool: str, memory: Memory) -> View:
    """Read all keys. An agent whose keys cannot be read is not wanted, and the log says so. Raises BusUnavailable."""
    jobs = memory.read(subjects.JOBS, await _entries(bus, subjects.JOBS)).values()
    levels = memory.read(subjects.PROGRESS, await _entries(bus, subjects.PROGRESS))
    records = await _entries(bus, subjects.POLICY)
    said_by = memory.read(subjects.POLICY, records)
    policy = {entry.key: (entry, said_by[entry.key]) for entry in records}
    prefix = subjects.replica_key("trainer", pool, "")
    reports = await _entries(bus, subjects.REPLICAS, prefix)
    documents = [job for job in jobs if isinstance(job, JobDocument)]
    progress = {key: level for key, level in levels.items() if isinstance(level, Progress)}
    known = {key: PolicyEntry(entry, said) for key, (entry, said) in policy.items() if isinstance(said, PolicyRecord)}
    wanted = assignments(documents, progress, pool)
    readable = {key: assignment for key, assignment in wanted.items() if key in known or key not in policy}
    return View(readable, known, frozenset(entry.key.removeprefix(prefix) for entry in reports))


def what_decides(entry: Entry) -> Hashable:
    """Changes whenever an entry's change may change what a trainer does; progress is written far more often than that."""
    message = _read(entry)
    if isinstance(message, Progress):
        return message.uid, message.admitted, message.phase.final
    return entry.data


async def _entries(bus: Bus, bucket: str, prefix: str = "") -> list[Entry]:
    entries = await (await bus.bucket(bucket)).entries(prefix)
    return [entry for entry in entries if entry.data is not None]


def _read(entry: Entry) -> BusMessage | None:
    try:
        return None if entry.data is None else wire.decode(entry.data)
    except (BadMessage, UnsupportedSchema) as error:
        log.error("key %s cannot be read: %s", entry.key, error)
        return None
