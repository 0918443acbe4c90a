"""The role on a real nats-server: what the fake cannot show."""

from typing import Any

from marlaas_api.messages import ReplyPhase


async def test_turns_and_versions_over_a_real_server(nats_harness: Any) -> None:
    harness = nats_harness
    await harness.replica()
    job = await harness.job()
    await harness.verified("rollout-0", job.adapter(0))
    for number in range(3):
        assert (await harness.ask(job.request(turn=number))).phase is ReplyPhase.RESULT
    await harness.commit(job, 1)
    await harness.verified("rollout-0", job.adapter(1))
    await harness.ask(job.request(index=1))
    turns = [await harness.turn(job.request(turn=2)), await harness.turn(job.request(index=1))]
    assert [(turn.version, turn.opens_segment) for turn in turns] == [(0, False), (1, True)]
    assert (await harness.story("VersionVerified")).uid == job.uid


async def test_a_killed_server_loses_no_turn_and_costs_no_second_generation(
    nats_harness: Any, shut_engine: Any
) -> None:
    harness = nats_harness
    await harness.replica(engine=shut_engine)
    job = await harness.job()
    async with harness.asking(job.request()):
        await shut_engine.called.wait()
        await harness.nats.kill()
        shut_engine.open.set()
        await harness.nats.restart()
    assert (await harness.ask(job.request())).phase is ReplyPhase.RESULT
    assert (await harness.turn(job.request())).text == "yes"
    assert len(shut_engine.calls) == 1


async def test_a_replica_taken_over_on_a_real_server_goes_on_with_the_conversation(nats_harness: Any) -> None:
    harness = nats_harness
    first = await harness.replica("rollout-0")
    job = await harness.job()
    await harness.ask(job.request(turn=0))
    await first.kill()
    second = await harness.replica("rollout-1")
    assert (await harness.ask(job.request(turn=1), of="rollout-1")).phase is ReplyPhase.RESULT
    fed = first.engine.calls[0].prompt_ids
    assert second.engine.calls[0].prompt_ids[: len(fed) + 4] == [*fed, *map(ord, "yes"), 1]
