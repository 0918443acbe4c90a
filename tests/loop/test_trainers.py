"""Three trainers share a team's agents. One loses the lease of an agent, one leaves and one is killed, each within a step."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.killing import Killed
from tests.loop.harness import Ended, Loop
from tests.loop.jobs import team

from marlaas_api import subjects, wire
from marlaas_api.messages import Phase
from marlaas_worker.trainer import assignment
from marlaas_worker.trainer.commit import AgentLease, PolicyKey, VersionContents

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]

Disturb = Callable[[PolicyKey, AgentLease], Awaitable[None]]


def at_commits(patch: pytest.MonkeyPatch, agent: str, disturbances: dict[int, Disturb]) -> None:
    """Call each function once, when an agent's step of its number is about to be committed."""
    commit = PolicyKey.commit

    async def disturbed(policy: PolicyKey, lease: AgentLease, contents: VersionContents) -> AgentLease:
        if policy._assignment.agent.name == agent and (disturb := disturbances.pop(contents.result.step, None)):
            await disturb(policy, lease)
        return await commit(policy, lease, contents)

    patch.setattr(PolicyKey, "commit", disturbed)


async def test_an_agent_whose_trainer_loses_it_leaves_or_is_killed_within_a_step_is_continued_by_another_one(
    undisturbed: dict[str, Ended], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders: list[str] = []

    async def lose(policy: PolicyKey, lease: AgentLease) -> None:
        """Another trainer binds the agent, and releases it."""
        holders.append(lease.record.holder)
        record = lease.record.model_copy(update={"epoch": lease.record.epoch + 1, "holder": ""})
        await policy._bucket.update(policy._assignment.policy_key, wire.encode(record), lease.revision)

    async def leave(_: PolicyKey, lease: AgentLease) -> None:
        holders.append(lease.record.holder)
        loop.stop(lease.record.holder)
        await asyncio.Event().wait()  # until it is cancelled

    async def die(_: PolicyKey, lease: AgentLease) -> None:
        holders.append(lease.record.holder)
        loop.stop(lease.record.holder)
        raise Killed(lease.record.holder)

    monkeypatch.setattr(assignment, "GRACE_S", 0.5)
    at_commits(monkeypatch, "verifier", {0: lose, 1: leave, 2: die})
    job = team(steps=4)
    async with Loop({"tiny": tiny_model}, tmp_path, trainers=3) as loop:
        await loop.submit(job)
        await loop.until(lambda: bool(loop.deaths))  # its lease is released by nobody, and its report expires:
        await (await loop.bus.bucket(subjects.REPLICAS)).delete(subjects.replica_key("trainer", "tiny", holders[2]))
        ended, epoch = await loop.ended(job), (await loop.record(job, "verifier")).epoch
    assert ended.progress.phase is Phase.SUCCEEDED, ended.progress.message
    assert {name: versions[:3] for name, versions in ended.weights.items()} == undisturbed["team"].weights
    assert [len(set(versions)) for versions in ended.weights.values()] == [5, 5]
    committed = [made.trainer for made in ended.histories["verifier"][1:]]
    assert committed[1] != holders[1]
    assert holders[2] not in committed[2:]
    assert holders[1] not in committed[1:], "it has left"
    assert epoch >= 4, "lost, and bound again after each disturbance"
    assert loop.deaths == [holders[2]]
