"""Records turns in the turns stream. The first record of a turn counts, whichever replica wrote it."""

import asyncio
import logging
from collections import Counter

from marlaas_api import subjects, wire
from marlaas_api.blobs import Blobs, BlobUnavailable
from marlaas_api.bus import Bus, BusUnavailable, RevisionConflict, StreamFull
from marlaas_api.errors import Permanent
from marlaas_api.failpoints import failpoint
from marlaas_api.messages import Turn
from marlaas_api.names import request_id

_HEADROOM_BYTES = 4096
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 1.0
_MESSAGE_BYTES = 256
"""Stream bytes per message besides its data: subject, headers, and the stream's own record."""
_log = logging.getLogger(__name__)


class TurnLost(Permanent):
    """The stream rejected a turn as already recorded, but the recorded turn cannot be read."""


class TurnLog:
    """Writes and reads turns; turns above the bus's payload limit go through the blob store.

    job_bytes: bytes that this replica has added to the stream, by job uid.
    """

    def __init__(self, bus: Bus, blobs: Blobs) -> None:
        self._bus = bus
        self._blobs = blobs
        self.job_bytes: Counter[str] = Counter()
        self._waiting: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """Turns that wait because the stream is full."""
        return len(self._waiting)

    def explain(self) -> str:
        """Return whether turns wait for space in the stream, for people."""
        return f"the stream {subjects.TURNS} is full" if self._waiting else f"the stream {subjects.TURNS} has room"

    async def find(self, namespace: str, job: str, episode: str, number: int) -> Turn | None:
        """Return a recorded turn; None if it is not recorded. Raises BusUnavailable, and as `wire.unpack`."""
        stored = await self._bus.last(subjects.TURNS, subjects.turn(namespace, job, episode, number))
        return None if stored is None else await self._read(stored.data)

    async def episode(self, namespace: str, job: str, episode: str) -> dict[int, Turn]:
        """Return all recorded turns of an episode by number. Raises as `find`."""
        stored = await self._bus.replay(subjects.TURNS, subjects.turn(namespace, job, episode, "*"))
        turns = [await self._read(one.data) for one in stored]
        return {turn.turn: turn for turn in turns}

    async def record(self, turn: Turn) -> Turn:
        """Store a turn unless it is already stored; return the stored one.

        Retries with backoff, until cancelled, while the bus or the blob store is unavailable or the stream is
        full. Publishes without a message id: with one, the server would accept a second writer's turn as a
        duplicate, and that writer would take its own turn for the stored one.
        """
        name, wait_s = request_id(turn.episode, turn.turn), _FIRST_WAIT_S
        try:
            while True:
                try:
                    return await self._record(turn)
                except StreamFull as error:
                    self._wait_for_room(name, error)
                except (BusUnavailable, BlobUnavailable) as error:
                    _log.warning("turn %s of %s is not recorded yet: %s", turn.turn, turn.episode, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        finally:
            self._waiting.discard(name)

    def _wait_for_room(self, name: str, error: StreamFull) -> None:
        """Note a turn that waits, and log only the first: with a full stream every turn waits and retries each second."""
        if not self._waiting:
            _log.warning("turns wait for room in the stream %s, the first is %s: %s", subjects.TURNS, name, error)
        self._waiting.add(name)

    async def _record(self, turn: Turn) -> Turn:
        limit = self._bus.max_payload_bytes - _HEADROOM_BYTES
        data = await wire.pack(turn, self._blobs, limit)
        failpoint("rollout.record.before_publish")
        try:
            await self._bus.publish(
                subjects.turn(turn.namespace, turn.job, turn.episode, turn.turn), data, expect_last=0
            )
        except RevisionConflict:
            return await self._first(turn)
        self.job_bytes[turn.uid] += len(data) + _MESSAGE_BYTES
        failpoint("rollout.record.after_publish")
        return turn

    async def _first(self, turn: Turn) -> Turn:
        stored = await self.find(turn.namespace, turn.job, turn.episode, turn.turn)
        if stored is None:
            raise TurnLost(f"turn {turn.turn} of {turn.episode} is recorded, but cannot be read")
        return stored

    async def _read(self, data: bytes) -> Turn:
        message = await wire.unpack(data, self._blobs)
        if not isinstance(message, Turn):
            raise wire.BadMessage(f"expected Turn, found {type(message).__name__}")
        return message
