import asyncio
import os

import pytest
from tests.rollout.service.harness import RolloutHarness
from tests.rollout.service.scripted import LIMITS

from marlaas_api.cpu_shares import COMPUTE_SHARE, FULL_SHARE
from marlaas_worker.rollout import service
from marlaas_worker.rollout.reception import Reception


class Shares:
    """Records the CPU shares that a role sets for its session."""

    def __init__(self) -> None:
        self.last: int | None = None
        self._changed = asyncio.Event()

    def set(self, pid: int, niceness: int) -> bool:
        assert pid == os.getpid()
        self.last = niceness
        self._changed.set()
        return True

    async def until(self, niceness: int) -> None:
        async with asyncio.timeout(30):
            while self.last != niceness:
                self._changed.clear()
                await self._changed.wait()


async def test_the_engine_gets_a_full_share_when_agents_outnumber_slots(
    harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = Shares()
    monkeypatch.setattr(service, "set_share", shares.set)
    harness.shares_cpu = True
    await harness.replica()
    jobs = [await harness.job(f"job-{number}") for number in range(LIMITS.slots)]
    await shares.until(COMPUTE_SHARE)
    jobs.append(await harness.job("one-more"))
    await shares.until(FULL_SHARE)
    await harness.admit(jobs[0], admitted=False)
    await shares.until(COMPUTE_SHARE)


async def test_agents_of_other_replicas_do_not_count(harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = Shares()
    monkeypatch.setattr(service, "set_share", shares.set)
    monkeypatch.setattr(Reception, "elsewhere", lambda self: frozenset(one.adapter(0) for one in self._agents[:1]))
    harness.shares_cpu = True
    await harness.replica()
    jobs = [await harness.job(f"job-{number}") for number in range(LIMITS.slots + 2)]
    await shares.until(FULL_SHARE)
    await harness.admit(jobs[0], admitted=False)
    await shares.until(COMPUTE_SHARE)


async def test_a_role_that_shares_no_cpu_leaves_its_session_alone(
    harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = Shares()
    monkeypatch.setattr(service, "set_share", shares.set)
    await harness.serving()
    assert shares.last is None
