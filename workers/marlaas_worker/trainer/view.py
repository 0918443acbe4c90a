"""A trainer's inputs, read at one moment: jobs, progress, policy keys, and live trainers."""

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
    """An agent's policy key: its entry, for a compare-and-set, and the parsed record."""

    entry: Entry
    record: PolicyRecord


@dataclass(frozen=True, slots=True)
class View:
    """The state on which a trainer decides.

    wanted, known: by policy key. live: names of this pool's trainers with a live report.
    """

    wanted: dict[str, Assignment]
    known: dict[str, PolicyEntry]
    live: frozenset[str]

    @property
    def holders(self) -> set[str]:
        """Trainers that hold the lease of a wanted agent."""
        return {known.record.holder for key, known in self.known.items() if key in self.wanted and known.record.holder}


class Memory:
    """Cache of parsed messages by bucket, key and revision.

    Thousands of waiting jobs are thus parsed once, not at every look.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, tuple[int, BusMessage | None]]] = {}

    def read(self, bucket: str, entries: list[Entry]) -> dict[str, BusMessage | None]:
        """Return the parsed messages of the given entries by key (None: unreadable); cached keys that are not given are dropped."""
        before, now = self._known.get(bucket, {}), {}
        for entry in entries:
            known = before.get(entry.key)
            now[entry.key] = (
                known if known is not None and known[0] == entry.revision else (entry.revision, _read(entry))
            )
        self._known[bucket] = now
        return {key: message for key, (_, message) in now.items()}


async def look(bus: Bus, pool: str, memory: Memory) -> View:
    """Read all keys. An agent whose policy key cannot be parsed is not wanted, and an error is logged. Raises BusUnavailable."""
    jobs = memory.read(subjects.JOBS, await _entries(bus, subjects.JOBS)).values()
    found = memory.read(subjects.PROGRESS, await _entries(bus, subjects.PROGRESS))
    records = await _entries(bus, subjects.POLICY)
    parsed = memory.read(subjects.POLICY, records)
    policy = {entry.key: (entry, parsed[entry.key]) for entry in records}
    prefix = subjects.replica_key("trainer", pool, "")
    reports = await _entries(bus, subjects.REPLICAS, prefix)
    documents = [job for job in jobs if isinstance(job, JobDocument)]
    progress = {key: one for key, one in found.items() if isinstance(one, Progress)}
    known = {
        key: PolicyEntry(entry, record) for key, (entry, record) in policy.items() if isinstance(record, PolicyRecord)
    }
    wanted = assignments(documents, progress, pool)
    readable = {key: assignment for key, assignment in wanted.items() if key in known or key not in policy}
    return View(readable, known, frozenset(entry.key.removeprefix(prefix) for entry in reports))


def what_decides(entry: Entry) -> Hashable:
    """Return a value that changes whenever the entry changes in a way that affects a trainer.

    Progress is written far more often than the fields that matter here.
    """
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
        log.error("cannot parse key %s: %s", entry.key, error)
        return None
