"""Leader lease: a key that its holder renews, and that expires if the holder stops."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.errors import Unreadable
from marlaas_api.fenced import FencedKey, Overtaken
from marlaas_api.messages import ReplicaReport
from marlaas_api.retries import patiently
from marlaas_api.wire import decode_as, encode
from marlaas_worker.role import RoleContext

KEY = subjects.replica_key("orchestrator", "all", "leader")
RENEW_S = 2.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LeaderLease:
    """Takes, renews and releases the leader lease: a key on the bus that names the one orchestrator replica that runs all jobs.

    After a restart under the same name, the holder takes its lease again. context: of this replica.
    """

    context: RoleContext
    _held: FencedKey | None = None

    async def hold(self) -> bool:
        """Take or renew the lease; return whether this replica holds it now: False if another one does, or if the lease cannot be parsed."""
        key = self._held or FencedKey(await self.context.bus.bucket(subjects.REPLICAS), KEY)
        try:
            if self._held is None:
                found = await key.read()
                if found is not None and not self._is_own(found):
                    return False
            name, now = self.context.name, self.context.now()
            await key.write(encode(ReplicaReport(role="orchestrator", pool="all", replica=name, at=now)))
        except (Overtaken, Unreadable):  # an unreadable lease is another release's
            self._held = None
            return False
        self._held = key
        return True

    async def renew(self) -> None:
        """Renew the lease every RENEW_S seconds, and return once this replica has lost it. Retry while NATS does not answer."""
        while True:
            await asyncio.sleep(RENEW_S)
            if not await patiently(self.hold, "renewing the lease", RENEW_S):
                log.warning("lost the lease")
                return

    async def release(self) -> None:
        """Delete the lease, if this replica holds it, so that a standby takes over at once."""
        if self._held is not None:
            found = await self._held.read()  # the answer to the last renewal may be missing
            with contextlib.suppress(Overtaken, Unreadable):
                if found is not None and self._is_own(found):
                    await self._held.delete()

    def _is_own(self, data: bytes) -> bool:
        return decode_as(ReplicaReport, data).replica == self.context.name
