"""One active orchestrator: a key that its holder keeps renewing and that expires with it."""

from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.bus import RevisionConflict
from marlaas_api.messages import ReplicaReport
from marlaas_api.wire import decode_as, encode
from marlaas_worker.role import RoleContext

KEY = subjects.replica_key("orchestrator", "all", "leader")


@dataclass(slots=True)
class LeaderLease:
    """The lease as this replica sees it. A holder that comes back under its own name takes up where it was."""

    context: RoleContext
    revision: int | None = None

    async def hold(self) -> bool:
        """Take or renew it; False while another replica is alive and holds it, or took it from us."""
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
        except RevisionConflict:
            self.revision = None
            return False

    async def release(self) -> None:
        """Let a standby take over at once."""
        if self.revision is not None:
            bucket = await self.context.bus.bucket(subjects.REPLICAS)
            await bucket.delete(KEY)

    def _report(self) -> ReplicaReport:
        return ReplicaReport(role="orchestrator", pool="all", replica=self.context.name, at=self.context.now())
