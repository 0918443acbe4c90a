"""Cache of the bus's job documents and progress, and the only writer of documents.

The cache follows a watch and is also read whole every minute. While the bus is unavailable it keeps its
content, and `state` says so. No reconcile waits for the bus.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeVar

from marlaas_api import subjects
from marlaas_api.bus import Bucket, Bus, BusRefused, BusUnavailable, Entry, RevisionConflict
from marlaas_api.errors import MarlaasError, Permanent, Retryable
from marlaas_api.messages import BusMessage, JobDocument, Progress
from marlaas_api.wire import decode_as, encode
from marlaas_operator.plan import WriteDocument
from marlaas_operator.snapshot import BusState

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
REREAD_S = 60.0
_RETRY_S = 1.0
M = TypeVar("M", bound=BusMessage)
LEADER = subjects.replica_key("orchestrator", "all", "leader")
_MIRRORED = (subjects.JOBS, subjects.PROGRESS)


class Stale(Retryable):
    """The document on the bus is not the one that the plan was made from: observe and plan again."""


class BusView:
    """Cache of the buckets `jobs` and `progress`; keys are `<namespace>.<job>`.

    Attributes:
        state: availability of the bus, and of an orchestrator that holds the leader lease.
        usable: set once the bus has answered and both buckets were read whole.

    Args:
        open_bus: connects; retried until it succeeds.
        changed: called with every key whose entry changed.
        changed_state: called when `state` changed.
        now: unix seconds.
    """

    def __init__(
        self,
        open_bus: Callable[[], Awaitable[Bus]],
        changed: Callable[[str], None],
        changed_state: Callable[[], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._open_bus = open_bus
        self._changed = changed
        self._changed_state = changed_state
        self._now = now
        self._bus: Bus | None = None
        self._buckets: dict[str, Bucket] = {}
        self._entries: dict[str, dict[str, Entry]] = {name: {} for name in _MIRRORED}
        self._doubted: dict[str, dict[str, tuple[Entry | None, Entry | None]]] = {name: {} for name in _MIRRORED}
        self._read: set[str] = set()
        self.state = BusState(available=False, since=now(), synced=False)
        self.usable = asyncio.Event()

    async def run(self) -> None:
        """Keep the cache current until cancelled."""
        try:
            await self._connect()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat())
                for name in _MIRRORED:
                    tasks.create_task(self._follow(name))
                    tasks.create_task(self._reread(name))
        finally:
            if self._bus is not None:
                await self._bus.close()

    def document(self, key: str) -> JobDocument | None:
        """Return the job's document, whatever its uid; None if absent or not decodable."""
        return _decoded(JobDocument, self._entries[subjects.JOBS].get(key))

    def progress(self, key: str) -> Progress | None:
        """Return the job's progress, whatever its uid; None if absent or not decodable."""
        return _decoded(Progress, self._entries[subjects.PROGRESS].get(key))

    def has_progress(self, key: str) -> bool:
        """Return whether the key exists, even if its value cannot be decoded."""
        return key in self._entries[subjects.PROGRESS]

    def revisions(self, key: str) -> tuple[int, int]:
        """Return the revisions of the job's document and progress, 0 where there is none."""
        found = (self._entries[name].get(key) for name in _MIRRORED)
        document, progress = (entry.revision if entry is not None else 0 for entry in found)
        return document, progress

    def keys(self) -> list[str]:
        """Return the keys that have a document."""
        return list(self._entries[subjects.JOBS])

    async def write(self, action: WriteDocument) -> None:
        """Write a document if `action.replaces` is still the current one.

        A failed write does not change `state`: a full store refuses writes but still answers the heartbeat.

        Raises:
            Stale: another document is there by now.
            BusRefused: the bus refuses the write.
            BusUnavailable: the bus does not answer; raised at once while it is known to be unavailable.
        """
        document = action.document
        key = subjects.job_key(document.namespace, document.job)
        if not self.state.available:
            raise BusUnavailable("the bus does not answer at present")
        if self.document(key) != action.replaces:
            raise Stale(f"the document of {key} changed meanwhile")
        entry = self._entries[subjects.JOBS].get(key)
        bucket, data = self._buckets[subjects.JOBS], encode(document)
        try:
            revision = await (bucket.create(key, data) if entry is None else bucket.update(key, data, entry.revision))
        except RevisionConflict as error:
            await self._look_at(key)
            raise Stale(f"the document of {key} was changed by somebody else") from error
        self._note(subjects.JOBS, Entry(key, data, revision))

    async def _look_at(self, key: str) -> None:
        entry = await self._buckets[subjects.JOBS].get(key)
        self._take(subjects.JOBS, entry or Entry(key, None, 0))

    async def _connect(self) -> None:
        while not self._buckets:
            try:
                self._bus = self._bus or await self._open_bus()
                self._buckets = {name: await self._bus.bucket(name) for name in (*_MIRRORED, subjects.REPLICAS)}
            except MarlaasError as error:
                log.warning("no bus yet: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _beat(self) -> None:
        """Check every two seconds whether the bus answers and whether an orchestrator holds the leader lease."""
        while True:
            try:
                leader = await self._buckets[subjects.REPLICAS].get(LEADER)
            except (BusUnavailable, BusRefused) as error:
                log.debug("the bus does not answer: %s", error)
                self._set_available(False)
            else:
                self._set_available(True)
                self._set_leader(leader is not None)
            await asyncio.sleep(HEARTBEAT_S)

    async def _follow(self, name: str) -> None:
        while True:
            try:
                watch: AbstractAsyncContextManager[AsyncIterator[Entry]] = self._buckets[name].watch()
                async with watch as entries:
                    async for entry in entries:
                        self._note(name, entry)
            except MarlaasError as error:
                log.warning("watching %s: %s", name, error)
            await asyncio.sleep(_RETRY_S)

    async def _reread(self, name: str) -> None:
        """Read the bucket whole every `REREAD_S`, sooner while a result is unconfirmed or after an error."""
        while True:
            sure = False
            try:
                sure = await self._read_whole(name)
                self._set_read(name)
            except MarlaasError as error:
                log.warning("reading %s: %s", name, error)
            await asyncio.sleep(REREAD_S if sure else _RETRY_S)

    async def _read_whole(self, name: str) -> bool:
        """Read a bucket whole and update the cache; return False if the read must be repeated soon.

        The read finds deletions that the watch missed, and a bus that was emptied and counts revisions from 1
        again. Any replica of the bus may answer, and may lag: so a missing key or an older revision counts only
        if two reads in a row agree.
        """
        before = dict(self._entries[name])
        entries = {entry.key: entry for entry in await self._buckets[name].entries()}
        doubted, self._doubted[name] = self._doubted[name], {}
        for key in {*before, *entries}:
            known, found = before.get(key), entries.get(key)
            if self._entries[name].get(key) != known:  # changed by the watch during the read
                continue
            if _is_step_back(known, found) and doubted.get(key) != (known, found):
                self._doubted[name][key] = known, found
            else:
                self._take(name, found or Entry(key, None, 0))
        return not self._doubted[name]

    def _note(self, name: str, entry: Entry) -> None:
        """Store the entry if its revision is newer than the cached one."""
        known = self._entries[name].get(entry.key)
        if known is None or entry.revision > known.revision:
            self._take(name, entry)

    def _take(self, name: str, entry: Entry) -> None:
        known = self._entries[name].pop(entry.key, None)
        if entry.data is not None:
            self._entries[name][entry.key] = entry
        if known != self._entries[name].get(entry.key):
            self._changed(entry.key)

    def _set_read(self, name: str) -> None:
        self._read.add(name)
        if self._read == set(_MIRRORED) and not self.state.synced:
            self._set(replace(self.state, synced=True))

    def _set_available(self, available: bool) -> None:
        if available != self.state.available:
            log.info("the bus %s", "answers" if available else "does not answer any more")
            self._set(replace(self.state, available=available, since=self._now(), leaderless_since=None))

    def _set_leader(self, there: bool) -> None:
        if there != (self.state.leaderless_since is None):
            log.info("%s holds the lease", "an orchestrator" if there else "no orchestrator")
            self._set(replace(self.state, leaderless_since=None if there else self._now()))

    def _set(self, state: BusState) -> None:
        self.state = state
        if state.available and state.synced:
            self.usable.set()
        self._changed_state()


def _is_step_back(known: Entry | None, found: Entry | None) -> bool:
    return known is not None and (found is None or found.revision < known.revision)


def _decoded(kind: type[M], entry: Entry | None) -> M | None:
    if entry is None or entry.data is None:
        return None
    try:
        return decode_as(kind, entry.data)
    except Permanent as error:  # written by a newer version, or foreign: treat as absent, but log it
        log.error("%s: %s", entry.key, error)
        return None
