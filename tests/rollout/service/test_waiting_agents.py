"""No turn holds a place, KV cache or a slot while it waits for another agent, so teams play on an engine with room for one turn."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.rollout.service.asking import Job

from marlaas_api.messages import GenerateRequest, ReplyPhase

AGENTS = ("solver", "verifier")
SPEAKERS = ("solver", "verifier", "solver")
KV_TOKENS = 32


def used(role: Any) -> tuple[int, float, int]:
    """Return the engine places, reserved KV tokens and versions that the requests of a replica hold."""
    budget = role._engine.limiter.budget
    return budget._num_inside, budget.num_reserved, role._versions.proven.table.num_running


def turn(job: Job, index: int, number: int) -> GenerateRequest:
    """A turn of an episode, whose agents reply to each other; each goes on with its own conversation."""
    parent = number - 2 if number >= 2 else None
    return job.request(index=index, turn=number, parent=parent, agent=SPEAKERS[number])


async def begin(harness: Any, engine: Any) -> Job:
    """A replica, and a team of two agents at version 0."""
    await harness.replica(engine=engine)
    job: Job = await harness.job(agents=[{"name": name} for name in AGENTS])
    for name in AGENTS:
        await harness.commit(job, 0, agent=name)
    return job


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"kv_tokens": KV_TOKENS}], ids=["one place", "KV of one"])
async def test_a_turn_that_waits_for_its_agents_version_leaves_the_room_for_one_to_the_other_turns(
    harness: Any, make_engine: Callable[..., Any], roles: list[Any], limits: Any
) -> None:
    engine = make_engine(limits={"slots": 1, **limits})
    job = await begin(harness, engine)
    during, generate = list[tuple[int, float, int]](), engine.generate

    async def watched(*arguments: Any) -> Any:
        during.append(used(roles[0]))
        return await generate(*arguments)

    engine.generate = watched

    async def say(index: int, number: int) -> None:
        await harness.result(turn(job, index, number))
        assert used(roles[0]) == (0, 0.0, 0)

    await say(0, 0)
    await harness.pin(turn(job, 0, 1), 1)
    async with harness.asking(turn(job, 0, 1)) as asked:
        await asked.until_it_says("version 1 was not served")
        assert used(roles[0]) == (0, 0.0, 0)
        for number in range(len(SPEAKERS)):
            await say(1, number)
        await harness.commit(job, 1, agent="verifier")
        assert (await asked.end()).phase is ReplyPhase.RESULT
    await say(0, 2)
    assert {(places, versions) for places, _, versions in during} == {(1, 1)}
    assert max(tokens for _, tokens, _ in during) >= KV_TOKENS
