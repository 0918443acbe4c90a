"""State of the bus for the operator: whether it answers, was read whole, and has an orchestrator with the leader lease."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from marlaas_api import subjects
from marlaas_api.bus import Bucket, BusRefused, BusUnavailable
from marlaas_operator.snapshot import BusState

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
LEADER = subjects.replica_key("orchestrator", "all", "leader")


class BusHealth:
    """Current state of the bus.

    Attributes:
        state: the state; `synced` is set by `mark_synced`.
        usable: set once the bus has answered and was read whole.

    Args:
        changed: called when `state` changed.
        now: unix seconds.
    """

    def __init__(self, changed: Callable[[], None], now: Callable[[], float]) -> None:
        self._changed = changed
        self._now = now
        self.state = BusState(available=False, since=now(), synced=False)
        self.usable = asyncio.Event()

    async def follow(self, replicas: Bucket) -> None:
        """Read the leader lease in the bucket `replicas` every `HEARTBEAT_S`, until cancelled."""
        while True:
            try:
                leader = await replicas.get(LEADER)
            except (BusUnavailable, BusRefused) as error:
                log.debug("the bus does not answer: %s", error)
                self._set_available(False)
            else:
                self._set_available(True)
                self._set_leader(leader is not None)
            await asyncio.sleep(HEARTBEAT_S)

    def mark_synced(self) -> None:
        """Record that the bus was read whole."""
        self._set(replace(self.state, synced=True))

    def _set_available(self, available: bool) -> None:
        if available != self.state.available:
            log.info("the bus %s", "answers" if available else "does not answer any more")
            self._set(replace(self.state, available=available, since=self._now(), leaderless_since=None))

    def _set_leader(self, there: bool) -> None:
        if there != (self.state.leaderless_since is None):
            log.info("%s holds the leader lease", "an orchestrator" if there else "no orchestrator")
            self._set(replace(self.state, leaderless_since=None if there else self._now()))

    def _set(self, state: BusState) -> None:
        if state == self.state:
            return
        self.state = state
        if state.available and state.synced:
            self.usable.set()
        self._changed()
