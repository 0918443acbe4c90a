"""Leader lease: a key that its holder renews, and that expires if the holder stops."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.bus import RevisionConflict
from marlaas_api.errors import Retryable, Unreadable
from marlaas_api.messages import ReplicaReport
from marlaas_api.wire import decode_as, encode
from marlaas_worker.role import RoleContext

KEY = subjects.replica_key("orchestrator", "all", "leader")
RENEW_S = 2.0

log = logging.getLogger(__name__)


class LostLease(Exception):
    """Another orchestrator wrote a key that is reserved for the holder of the lease; this one must stop at once."""


@dataclass(slots=True)
class LeaderLease:
    """The lease, as this replica knows it. After a restart under the same name, the holder takes its lease again."""

    context: RoleContext
    revision: int | None = None

    async def hold(self) -> bool:
        """Take or renew the lease; return False while another replica holds it."""
        bucket = await self.context.bus.bucket(subjects.REPLICAS)
        data = encode(self._report())
        try:
            if self.revision is not None:
                self.revision = await bucket.update(KEY, data, self.revision)
                return True
            entry = await bucket.get(KEY)
            if entry is None or entry.data is None:
                self.revision = await bucket.create(KEY, data)
                return True
            if decode_as(ReplicaReport, entry.data).replica != self.context.name:
                return False
            self.revision = await bucket.update(KEY, data, entry.revision)
            return True
        except (RevisionConflict, Unreadable):  # an unreadable lease is another release's
            self.revision = None
            return False

    async def keep(self) -> None:
        """Renew the lease; return once another replica holds it. Retry while NATS does not answer."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                if not await self.hold():
                    log.warning("lost the lease")
                    return
            except Retryable as error:
                log.warning("renewing the lease failed, retry in %g s: %s", RENEW_S, error)

    async def release(self) -> None:
        """Delete the lease, so that a standby takes over at once."""
        if self.revision is not None:
            bucket = await self.context.bus.bucket(subjects.REPLICAS)
            entry = await bucket.get_from_leader(KEY)  # the answer to the last renewal may be missing
            with contextlib.suppress(RevisionConflict, Unreadable):
                if entry and entry.data and decode_as(ReplicaReport, entry.data).replica == self.context.name:
                    await bucket.delete(KEY, entry.revision)

    def _report(self) -> ReplicaReport:
        return ReplicaReport(role="orchestrator", pool="all", replica=self.context.name, at=self.context.now())
