import pytest
from tests.rollout.service.harness import RolloutHarness
from tests.rollout.service.scripted import LIMITS

from marlaas_api.cpu_shares import COMPUTE_SHARE, FULL_SHARE
from marlaas_api.names import AdapterRef
from marlaas_worker.rollout import service
from marlaas_worker.rollout.reception import Reception


async def test_the_engine_gets_a_full_share_when_its_agents_outnumber_its_slots(
    harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents of other replicas do not count, and a role that shares no CPU leaves its session alone."""
    shares: list[int] = []
    elsewhere: list[AdapterRef] = []
    monkeypatch.setattr(service, "set_share", lambda pid, niceness: shares.append(niceness))
    monkeypatch.setattr(Reception, "elsewhere", lambda self: frozenset(elsewhere))
    await harness.serving()
    assert shares == []
    harness.shares_cpu = True
    await harness.replica("rollout-1")
    for number in range(LIMITS.slots - 1):
        await harness.job(f"job-{number}")
    await harness.until(lambda: shares[-1:] == [COMPUTE_SHARE])
    last = await harness.job("one-more")
    await harness.until(lambda: shares[-1:] == [FULL_SHARE])
    elsewhere.append(last.adapter(0))
    await harness.until(lambda: shares[-1:] == [COMPUTE_SHARE])
    elsewhere.clear()
    await harness.until(lambda: shares[-1:] == [FULL_SHARE])
    await harness.admit(last, admitted=False)
    await harness.until(lambda: shares[-1:] == [COMPUTE_SHARE])
