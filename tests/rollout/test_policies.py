from tests.harness import a_manifest, a_progress, job_document

from marlaas_api import subjects, wire
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.messages import BusMessage, PolicyRecord
from marlaas_worker.rollout.policies import Policies


class PoliciesHarness:
    """Policies of the pool `tiny`, and the number of their changes."""

    def __init__(self) -> None:
        self.bus = MemoryServer().connect("test")
        self.num_changes = 0
        self.policies = Policies(self.bus, "tiny", self._count)

    def _count(self) -> None:
        self.num_changes += 1

    async def put(self, bucket: str, key: str, message: BusMessage) -> None:
        await self.bus.ensure()
        await (await self.bus.bucket(bucket)).put(key, wire.encode(message))
        for cache in (self.policies._jobs, self.policies._progress, self.policies._policy):
            await cache.refresh()


async def test_counters_and_leases_change_nothing_that_is_served() -> None:
    harness, document = PoliciesHarness(), job_document()
    key = subjects.policy_key(document.namespace, document.job, "policy")
    manifest = await MemoryBlobs().put("a", "manifest", wire.encode(a_manifest(document, 0)))
    committed = PolicyRecord(uid=document.uid, version=0, manifest=manifest, holder="trainer-0")
    await harness.put(subjects.JOBS, document.ref.key, document)
    await harness.put(subjects.PROGRESS, document.ref.key, a_progress(document))
    await harness.put(subjects.POLICY, key, committed)
    assert harness.num_changes == 3
    await harness.put(subjects.PROGRESS, document.ref.key, a_progress(document, tokens=500, step=1))
    await harness.put(subjects.POLICY, key, committed.model_copy(update={"holder": "trainer-1"}))
    assert harness.num_changes == 3
    (served,) = harness.policies.served()
    assert [adapter.version for adapter in harness.policies.newest([served])] == [0]
    await harness.put(subjects.POLICY, key, committed.model_copy(update={"version": 1}))
    await harness.put(subjects.PROGRESS, document.ref.key, a_progress(document, admitted=False))
    assert harness.num_changes == 5
    assert harness.policies.served() == []
